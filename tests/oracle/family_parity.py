"""Our side of a comparison with Transformers for the cases of family_cases.py."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from family_cases import NUM_GREEDY, NUM_TOKENS, Case, family_weights
from safetensors.numpy import save_file

import checkpoints_convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import ModelConfig, Params, bind, collect

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_GREEDY)


def write_checkpoint(
    directory: Path, config: dict[str, Any], shapes: dict[str, list[int]], seed: int, case: Case
) -> Path:
    """A checkpoint with the weights of a seed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: family_weights(name, tuple(shape), seed, case) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load(directory: Path) -> tuple[ModelConfig, Params]:
    """With its rotation made for the long prompt, where it depends on the length."""
    config, params = checkpoints_convert.load(directory, dtype="float32")
    return config.for_length(NUM_TOKENS), params


def hidden_names(config: ModelConfig) -> list[str]:
    """The states that Transformers returns: embedding, after each layer but the last, after the final norm."""
    return ["embed", *(f"layers.{i}.residual" for i in range(config.num_layers - 1)), "final_norm"]


def states(config: ModelConfig, params: Params, tokens: np.ndarray) -> np.ndarray:
    """Hidden states [L + 1, T, D] of int32 tokens [T] in one pass without a cache."""
    # The head is not run, so that one program serves models that tie it and models that do not.
    body = {name: leaf for name, leaf in params.items() if name != "lm_head"}
    return np.asarray(_states(replace(config, tie_word_embeddings=True), body, tokens))


@partial(jax.jit, static_argnums=0)
def _states(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    names = hidden_names(config)
    found, tap = collect(names)
    bind(config, params)(tokens[None], jnp.arange(tokens.shape[0])[None], attend_without_cache, tap)
    return jnp.stack([found[name][0] for name in names])


def logits(config: ModelConfig, params: Params, hidden: np.ndarray) -> np.ndarray:
    """float32 logits [T, V] of final hidden states [T, D]."""
    return np.asarray(bind(config, params).logits(jnp.asarray(hidden)))


def greedy(
    config: ModelConfig,
    params: Params,
    prompts: list[list[int]],
    *,
    is_deterministic: bool = True,
    max_model_len: int = 128,
) -> list[list[int]]:
    """Answers of the paged engine to prompts that are batched."""
    if any(rope.stretches for rope in config.ropes):  # the length of these answers, not of the long prompt
        rope, *local = (replace(rope, sequence_length=None) for rope in config.ropes)
        config = replace(config, rope=rope, local_rope=local[0] if local else None)
    # Deterministic, every step is the same program, so that one is compiled and not four.
    with LLM((config, params), max_model_len=max_model_len, max_seqs=2, deterministic=is_deterministic) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def max_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; NaN counts as infinity."""
    difference = np.abs(found.astype(np.float64) - expected)
    return float(np.where(np.isnan(difference), np.inf, difference).max())
