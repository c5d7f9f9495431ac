"""One of several hosts, run as `python host.py TASK PORT COUNT INDEX FOLDER`; not a test itself."""

import json
import os
import sys
from pathlib import Path

from jaxinfer import LLM, SamplingParams, compilation_cache, initialize_hosts
from jaxinfer.parallel import watchdog

OPTIONS = {"max_model_len": 64, "max_seqs": 2, "prefill_chunk": 16, "steps_per_dispatch": 4}
VARIANTS = {
    "plain": {},
    "int8 and a draft": {"quantize": "int8", "draft": "demo-draft", "num_draft_tokens": 2, "max_seqs": 1},
}
PROMPTS = ["def f(x):", "import os\n", "class A:\n"]


def answers(llm: LLM) -> dict:
    """Greedy and seeded ones, with all that can come back; the same on every host."""
    params = [
        SamplingParams(temperature=0, max_tokens=10),
        SamplingParams(temperature=0.9, seed=3, max_tokens=10, logprobs=2),
        SamplingParams(temperature=0.8, seed=4, max_tokens=6, presence_penalty=1.0),
    ]
    outputs = llm.generate(PROMPTS, params)
    found: dict = {"generate": [(one.outputs[0].token_ids, one.outputs[0].text) for one in outputs]}
    logprobs = outputs[1].outputs[0].logprobs
    found["logprobs"] = [] if logprobs is None else [list(entry) for entry in logprobs]
    return found


def more_answers(llm: LLM) -> dict:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    found: dict = {
        "score": [[round(value, 3) for value in one.raw] for one in llm.score(PROMPTS[:2], ["\n  x", "y = 1"])]
    }
    found["stream"] = [(delta.text, delta.token_ids) for delta in llm.stream(PROMPTS[0], greedy)]
    stream = llm.stream(PROMPTS[1], greedy)
    found["left"] = next(iter(stream)).token_ids
    stream.close()
    requests = [(f"key {number}", prompt, greedy) for number, prompt in enumerate(PROMPTS)]
    requests.append(("bad", [10**9], greedy))
    each = {key: str(one) if isinstance(one, ValueError) else one.outputs[0].token_ids
            for key, one in llm.generate_each(iter(requests))}  # fmt: skip
    found["each"] = sorted(each.items())
    try:
        llm.generate([[10**9]])
    except ValueError as error:
        found["refused"] = str(error)
    found["fingerprint"] = llm.fingerprint()
    return found


def run(variant: str, folder: Path, mesh: str | None) -> dict:
    with LLM("demo-draft", mesh=mesh, **(OPTIONS | VARIANTS[variant])) as llm:
        found = answers(llm)
        if variant == "plain":
            found |= more_answers(llm)
        summary = llm.generate_file(folder / "in.jsonl", folder / "out.jsonl", use_tqdm=False)
        found["batch"] = [summary.rows, summary.ok, summary.output_tokens]
    return found


def main() -> None:
    task, port, count, index, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    hosts = initialize_hosts(f"127.0.0.1:{port}", count, index)
    assert hosts is not None
    assert hosts.index == index
    if task.startswith("answers "):
        # Two hosts that read their programs from a cache do not always fail, so the answers alone would not tell.
        assert compilation_cache.enable() is None
        watchdog.BEAT_SECONDS = 0.005  # so that a beat still on its way at the end would be noticed: it aborts
        watchdog.LOST_SECONDS = 150.0  # a busy machine may give a host no processor for longer than 15 s
        found = run(task.removeprefix("answers "), folder, f"model={count}")
        (folder / f"found.{index}.json").write_text(json.dumps(found))
        return
    with LLM("demo-draft", mesh=f"model={count}", **(OPTIONS | {"max_seqs": 1})) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.generate(PROMPTS[:1], params)
        (folder / f"ready.{index}").write_text(str(os.getpid()))
        if task == "lose":
            llm.generate(PROMPTS[:1] * 10_000, params)
        elif index == 1:
            raise ValueError("a fault of this host's own")
        else:
            llm.generate(PROMPTS[:1] * 10_000, params)


if __name__ == "__main__":
    main()
