"""Hugging Face Transformers as a peer: `generate` in its modes, and `generate_batch`, its continuous batching."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from benchmarks.peers.workload import CACHE_TOKENS

LOOKUP_TOKENS = 10  # what its documentation proposes for prompt lookup
PAGE_SIZE = 32


class Generate:
    """`generate`: the prompts of a batch padded on the left, decoded until the longest answer is done."""

    def __init__(self, folder: Path, draft: Path | None, mode: str, num_threads: int):
        torch.set_num_threads(num_threads)
        self._model = _load(folder)
        self._options: dict[str, Any] = {}
        self.compiles_shapes = mode == "compiled"
        if mode in ("static", "compiled"):
            self._options = {"cache_implementation": "static", "disable_compile": True}
        if mode == "compiled":
            self._model.forward = torch.compile(self._model.forward, fullgraph=True)
        elif mode == "assisted":
            if draft is None:
                raise ValueError("assisted generation needs a draft")
            self._options["assistant_model"] = _load(draft)
        elif mode == "lookup":
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = self._model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), **self._options
        )
        return [output[row, width : width + length].tolist() for row, length in enumerate(lengths)]


class Continuous:
    """`generate_batch`'s manager, kept between calls so that its cache is made once."""

    compiles_shapes = False

    def __init__(self, folder: Path, num_threads: int):
        torch.set_num_threads(num_threads)
        self._model = _load(folder)
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        settings = ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=CACHE_TOKENS // PAGE_SIZE, max_batch_tokens=512, allow_block_sharing=False
        )
        self._manager = self._model.init_continuous_batching(config, settings)
        self._manager.start()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        names = [
            self._manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = self._manager.get_result(timeout=5)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the manager of continuous batching has stopped")
                continue
            if result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    def close(self) -> None:
        self._manager.stop(block=True)


def _load(folder: Path) -> Any:
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Nothing ends an answer early, and no setting of the checkpoint's samples.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model
