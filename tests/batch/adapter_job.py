"""A batch with adapters in a process of its own, which a test kills:

    python -m tests.batch.adapter_job IN OUT SEED...

The embedded model has an adapter of each seed, named a0, a1 and so on. Prints "serving" before the first row.
"""

import sys

from jaxinfer import LLM, compilation_cache
from jaxinfer.batch import BatchError
from tests.engine.test_adapter_stress import RANK, make_adapter, shapes

REFUSED = 7  # exit code


def main(path_in: str, path_out: str, *seeds: str) -> int:
    compilation_cache.enable()
    compilation_cache.keep_all()
    options = {"max_seqs": 4, "max_model_len": 64, "num_pages": 40, "page_size": 8, "prefill_chunk": 32}
    with LLM("demo", max_adapters=2, max_adapter_rank=RANK, **options) as llm:
        for number, seed in enumerate(seeds):
            llm.load_adapter(f"a{number}", make_adapter(int(seed), shapes(llm)))
        print("serving", flush=True)
        try:
            summary = llm.generate_file(path_in, path_out, sort=True, use_tqdm=False)
        except BatchError as error:
            print(error, flush=True)
            return REFUSED
        print(f"{summary.resumed} resumed, {summary.ok} ok, {summary.failed} failed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
