"""Our side of a comparison with Transformers: hidden states, logits without and with a cache, and greedy answers."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from safetensors.numpy import save_file

import checkpoints_convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import CachedAttention, attend_without_cache, init_cache
from jaxinfer.models import ModelConfig, Params, bind, collect
from tests.oracle.cases import NUM_GREEDY, Case, weights

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_GREEDY)


def write_checkpoint(
    directory: Path, config: dict[str, Any], shapes: dict[str, list[int]], seed: int, case: Case
) -> Path:
    """A checkpoint with the weights of a seed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: weights(name, tuple(shape), seed, case) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load(directory: Path, case: Case) -> tuple[ModelConfig, Params]:
    """With its rotation made for the long prompt, where it depends on the length."""
    config, params = checkpoints_convert.load(directory, dtype="float32")
    return config.for_length(case.num_tokens), params


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


@partial(jax.jit, static_argnums=(0, 3))
def cached_logits(config: ModelConfig, params: Params, tokens: jax.Array, chunk: int) -> jax.Array:
    """float32 logits [T, V], `chunk` tokens at a time, through row 1 of a cache that holds NaN where nothing was
    written."""
    num_tokens = tokens.shape[0]
    num_chunks = -(-num_tokens // chunk)
    decoder = bind(config, params)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), init_cache(config, 2, num_tokens, jnp.float32))
    chunks = jnp.pad(tokens, (0, num_chunks * chunk - num_tokens)).reshape(num_chunks, 1, chunk)

    def one(cache, index_and_chunk):
        index, chunk_tokens = index_and_chunk
        start = index * chunk
        length = jnp.minimum(chunk, num_tokens - start)
        attend = CachedAttention(cache, jnp.array([1]), start[None], length[None], chunk)
        hidden = decoder(chunk_tokens, start + jnp.arange(chunk)[None], attend)
        return attend.cache, decoder.logits(hidden)[0]

    _, found = lax.scan(one, cache, (jnp.arange(num_chunks), chunks))
    return found.reshape(num_chunks * chunk, -1)[:num_tokens]


def engine(config: ModelConfig, params: Params, case: Case, **options: Any) -> LLM:
    """Two slots; every step the same program unless `deterministic=False`, so that one is compiled and not four."""
    if any(rope.depends_on_length for rope in config.ropes):  # the length of these answers, not of the long prompt
        rope, *local = (replace(rope, sequence_length=None) for rope in config.ropes)
        config = replace(config, rope=rope, local_rope=local[0] if local else None)
    options = {"max_seqs": 2, "deterministic": True, **options}
    return LLM((config, params), max_model_len=case.max_model_len, **options)


def greedy(config: ModelConfig, params: Params, case: Case, prompts: list[list[int]], **options: Any):
    """Answers of the engine to prompts that are batched."""
    with engine(config, params, case, **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def one_by_one(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]


def streamed(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [[token for delta in llm.stream(prompt, GREEDY) for token in delta.token_ids] for prompt in prompts]


def regrown(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Each token from a new request, whose prompt is all before it: no cache lives from one token to the next."""
    output: list[int] = []
    for _ in range(num_tokens):
        output += llm.generate([*prompt, *output], replace(GREEDY, max_tokens=1))[0].outputs[0].token_ids
    return output


def max_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; NaN counts as infinity."""
    difference = np.abs(np.asarray(found, np.float64) - expected)
    return float(np.where(np.isnan(difference), np.inf, difference).max())
