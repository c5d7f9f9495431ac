"""Our side of a comparison with Transformers: logits without and with a cache, greedy answers in several ways."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from families import NUM_NEW_TOKENS, Variant
from jax import lax

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import CachedAttention, attend_without_cache, init_cache
from jaxinfer.models import ModelConfig, Params, bind

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
Pairs = list[tuple[list[int], list[int]]]  # prompts and their greedy answers


def for_length(config: ModelConfig, num_tokens: int) -> ModelConfig:
    """The config with its rotation made for sequences of `num_tokens`, where it depends on the length."""
    if config.rope.kind not in ("dynamic", "longrope"):
        return config
    return replace(config, rope=replace(config.rope, sequence_length=num_tokens))


@partial(jax.jit, static_argnums=0)
def full_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """float32 logits [T, V] of int32 tokens [T] in one pass without a cache."""
    decoder = bind(config, params)
    return decoder.logits(decoder(tokens[None], jnp.arange(tokens.shape[0])[None], attend_without_cache))[0]


@partial(jax.jit, static_argnums=(0, 3))
def cached_logits(config: ModelConfig, params: Params, tokens: jax.Array, chunk: int) -> jax.Array:
    """The same, `chunk` tokens at a time, through row 1 of a cache that holds NaN wherever nothing was written."""
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

    _, logits = lax.scan(one, cache, (jnp.arange(num_chunks), chunks))
    return logits.reshape(num_chunks * chunk, -1)[:num_tokens]


def max_error(logits: jax.Array, expected: np.ndarray) -> float:
    """The largest difference; NaN counts as infinity."""
    difference = np.abs(np.asarray(logits, np.float64) - expected)
    return float(np.where(np.isnan(difference), np.inf, difference).max())


@contextmanager
def engine(config: ModelConfig, params: Params, variant: Variant) -> Iterator[LLM]:
    with LLM((config, params), max_model_len=variant.max_model_len, max_seqs=4) as llm:
        yield llm


def assert_alone(llm: LLM, pairs: Pairs) -> None:
    for prompt, expected in pairs:
        assert_same(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids, expected)


def assert_batched(llm: LLM, pairs: Pairs) -> None:
    """All prompts at once: rows of different lengths, padded."""
    outputs = llm.generate([prompt for prompt, _ in pairs], GREEDY, use_tqdm=False)
    for output, (_, expected) in zip(outputs, pairs, strict=True):
        assert_same(output.outputs[0].token_ids, expected)


def assert_streamed(llm: LLM, pairs: Pairs) -> None:
    """One token per call of the device."""
    for prompt, expected in pairs:
        assert_same([token for delta in llm.stream(prompt, GREEDY) for token in delta.token_ids], expected)


def assert_regrown(llm: LLM, pairs: Pairs, num_tokens: int) -> None:
    """Each token from a new request, whose prompt is all before it: no cache lives from one token to the next."""
    one = replace(GREEDY, max_tokens=1)
    for prompt, expected in pairs:
        output: list[int] = []
        for _ in range(num_tokens):
            output += llm.generate([*prompt, *output], one)[0].outputs[0].token_ids
        assert_same(output, expected[:num_tokens])


def assert_same(output: list[int], expected: list[int]) -> None:
    first = next((i for i, (a, b) in enumerate(zip(output, expected, strict=False)) if a != b), None)
    assert first is None, f"token {first} is {output[first]}, Transformers gives {expected[first]}"
    assert len(output) == len(expected), f"{len(output)} tokens, Transformers gives {len(expected)}"
