"""jaxinfer as a peer: one engine for all measures, no prefix reuse, since repeats send the same prompts."""

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import CACHE_TOKENS, MAX_MODEL_LEN, MAX_SEQS
from jaxinfer import LLM, SamplingParams

PAGE_SIZE = 16


class Jaxinfer:
    compiles_shapes = True

    def __init__(self, folder: Path, draft: Path | None, *, drafts: str | None = None, **given: Any):
        """Opens a checkpoint's folder, or a GGUF file with the options of `LLM` that are given."""
        # "auto" keeps the weights of a 16-bit checkpoint in 16 bits, and computes in float32 on a CPU.
        options: dict[str, Any] = {"dtype": "auto", "max_model_len": MAX_MODEL_LEN, "max_seqs": MAX_SEQS}
        if folder.is_dir():
            allowed = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
            options["max_model_len"] = min(MAX_MODEL_LEN, allowed)
        if drafts is not None:
            options |= {"max_seqs": 1, "draft": str(draft) if drafts == "model" else drafts}
        elif not given:  # as many tokens of cache as the others
            options |= {"page_size": PAGE_SIZE, "num_pages": CACHE_TOKENS // PAGE_SIZE + 1}
        self._llm = LLM(folder, prefix_cache=False, **{**options, **given})

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [one.outputs[0].token_ids for one in outputs]

    def close(self) -> None:
        self._llm.close()
