"""vLLM's decoding of a model of the shape of Llama 3 8B with random weights, as rows in JSON lines; without JAX."""

import json
import sys
import tempfile
import time
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]

from benchmarks.on_chip import child
from benchmarks.on_chip.sizes import sizes_for


def main() -> None:
    child.end_with_parent()
    sizes = sizes_for("gpu", is_tiny="--tiny" in sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes.configs["8b"]), encoding="utf-8")
        llm = LLM(
            model=folder,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=sizes.prompt_tokens + sizes.answer_tokens,
            enable_prefix_caching=False,
        )
        for batch in sizes.model_batches:
            # A longer answer less the first token alone is decoding.
            first, whole = (min(_seconds(llm, batch, sizes, num) for _ in range(3)) for num in (1, sizes.answer_tokens))
            rate = batch * (sizes.answer_tokens - 1) / (whole - first)
            note = f"{batch / rate * 1e3:.2f} ms a step"
            row = {"case": f"vllm b{batch} at {sizes.prompt_tokens}", "value": rate, "unit": "tokens/s", "note": note}
            print(json.dumps(row), flush=True)


def _seconds(llm: LLM, batch: int, sizes, num_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompts = [
        TokensPrompt(prompt_token_ids=[(7 * one + i) % 250 + 3 for i in range(sizes.prompt_tokens)])
        for one in range(batch)
    ]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
