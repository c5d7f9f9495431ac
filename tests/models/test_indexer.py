"""Attention to the tokens that an indexer chooses: against dense NumPy, with ties, and through an engine."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import PagedAttention, attend_as_stored, attend_without_cache, init_paged_cache
from jaxinfer.models import MLAConfig, ModelConfig, RopeConfig, bind, init_params
from jaxinfer.models.indexer import Choice, attend_to_chosen

LATENT = MLAConfig(12, 8, 10, 6, 16)
DENSE = ModelConfig(
    architecture="Tiny",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=20,
    rope=RopeConfig(rotary_dim=8),
    attention_scale=0.25,
    max_position_embeddings=256,
    mla=LATENT,
)


def sparse(topk: int, heads: int = 2) -> ModelConfig:
    mla = replace(LATENT, index_topk=topk, index_heads=heads, index_size=10)
    return replace(DENSE, mla=mla, head_dim=mla.key_size)


def params_of(config: ModelConfig):
    """Large weights, so that the choice is no matter of rounding."""
    return jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, init_params(config, jax.random.key(0), "float32"))


TOKENS = np.random.default_rng(0).integers(0, 64, 60).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def states(config: ModelConfig, params) -> jax.Array:
    return bind(config, params)(jnp.asarray(TOKENS)[None], jnp.arange(60)[None], attend_without_cache)[0]


@partial(jax.jit, static_argnums=0)
def one_chunk(config: ModelConfig, params, cache, tokens, start):
    table, one = jnp.arange(1, 17, dtype=jnp.int32)[None, ::-1], jnp.full(1, tokens.shape[0], jnp.int32)
    attend = PagedAttention(cache, table, jnp.zeros(1, jnp.int32), one, one + start)
    return bind(config, params)(tokens, start + jnp.arange(tokens.shape[0]), attend), attend.cache


def in_chunks(config: ModelConfig, params, sizes) -> np.ndarray:
    """Final hidden states, of chunks of those sizes through a paged cache that holds NaN where nothing was written."""
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), init_paged_cache(config, 20, 4, jnp.float32))
    start, found = 0, []
    for size in sizes:
        hidden, cache = one_chunk(config, params, cache, jnp.asarray(TOKENS[start : start + size]), start)
        found.append(hidden)
        start += size
    return np.concatenate(found)


def dense_attention(q, choice, keys, positions, value_dim, scale):
    """NumPy: all scores, a stable sort, and softmax over the first `count`."""
    size = choice.q.shape[-1]
    width, out = q.shape[-1] - size, []
    for one, index_q, weights, position in zip(q, *map(np.asarray, choice[:2]), positions, strict=True):
        seen = keys[: position + 1].astype(np.float64)
        scores = (np.maximum(seen[:, width:] @ index_q.T * size**-0.5, 0) * weights).sum(-1)
        chosen = np.argsort(-scores, kind="stable")[: choice.count]
        logits = one[:, :width] @ seen[chosen, :width].T * scale
        exact = np.exp(logits - logits.max(-1, keepdims=True))
        out.append(exact / exact.sum(-1, keepdims=True) @ seen[chosen, :value_dim])
    return np.array(out)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("length", [3, 40, 700])
def test_chosen_tokens_are_those_of_a_stable_sort(length, heads):
    """With one head of whole numbers most scores are equal, zero above all."""
    rng = np.random.default_rng(length)
    positions = np.sort(rng.integers(0, length, 12)).astype(np.int32)
    q = rng.normal(size=(12, 3, 14)).astype(np.float32)
    index_q = rng.integers(-1, 2, (12, heads, 4)).astype(np.float32)
    choice = Choice(jnp.asarray(index_q), jnp.asarray(rng.integers(-2, 3, (12, heads)), jnp.float32), 8)
    keys = rng.normal(size=(length, 14)).astype(np.float32)
    keys[:, 10:] = rng.integers(-1, 2, (length, 4))
    stored = jnp.asarray(keys)

    def read(row, at):
        return stored[at]

    rows = jnp.zeros(12, jnp.int32)
    found = attend_to_chosen(jnp.asarray(q), choice, read, length, rows, jnp.asarray(positions), value_dim=6, scale=0.5)
    np.testing.assert_allclose(found, dense_attention(q, choice, keys, positions, 6, 0.5), atol=1e-5)


@pytest.mark.slow
def test_a_choice_of_all_tokens_is_latent_attention():
    config = sparse(64)
    params = params_of(config)
    plain = {**params, "layers": {name: dict(layer) for name, layer in params["layers"].items()}}
    for layer in plain["layers"].values():
        layer["attention"] = {name: part for name, part in layer["attention"].items() if name != "indexer"}
    np.testing.assert_allclose(states(config, params), states(DENSE, plain), atol=2e-5)


@pytest.mark.slow
def test_a_choice_of_few_tokens_differs():
    config = sparse(8)
    params = params_of(config)
    difference = np.abs(np.asarray(states(config, params)) - states(sparse(64), params)).max(-1)
    assert difference[:8].max() < 1e-5 < 1e-2 < difference[20:].max()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_states_do_not_depend_on_chunks(heads):
    """One head ties at zero for about half of all tokens."""
    config = sparse(8, heads)
    params = params_of(config)
    expected = states(config, params)
    for sizes in ([60], [16, 16, 16, 12], [7, 1, 30, 22]):
        np.testing.assert_allclose(in_chunks(config, params, sizes), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 16])
def test_an_engine_gives_one_answer(heads):
    """Alone, batched, in chunks, preempted, from cached prefixes and with drafts."""
    config = sparse(8, heads)
    params, greedy = params_of(config), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [TOKENS[:size].tolist() for size in (40, 56, 33)]

    def answers(prompts=prompts, times=1, **options):
        options = {"max_model_len": 96, "max_seqs": 3, "page_size": 8, **options}
        with LLM((config, params), **options) as llm:
            for _ in range(times):
                outputs = llm.generate(prompts, greedy, use_tqdm=False)
            return [one.outputs[0].token_ids for one in outputs]

    expected = [answers([prompt], max_seqs=1)[0] for prompt in prompts]
    for options in (
        {},
        {"prefill_chunk": 16},
        {"prefill_chunk": 64},
        {"num_pages": 18},  # not enough for three answers
        {"times": 2},  # prompts are cached
        {"draft": "ngram", "num_draft_tokens": 3},
        {"draft": "layers:1", "num_draft_tokens": 3},
    ):
        assert answers(**options) == expected, options


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_dtype": "int8"}, "int8"),
        ({"kv_dtype": "fp8_e4m3"}, "float8_e4m3fn"),
        ({"draft": "layers:1", "draft_tree": (2, 1)}, "draft_tree"),
    ],
)
def test_an_engine_refuses_what_is_not_there(options, named):
    config = sparse(8)
    with pytest.raises(ValueError, match=f"indexer.*{named}"):
        LLM((config, params_of(config)), max_model_len=64, **options)


@pytest.mark.slow
def test_rounded_keys_are_refused():
    config = sparse(8)
    params = params_of(config)
    with pytest.raises(NotImplementedError, match="chosen tokens"):
        bind(config, params)(jnp.asarray(TOKENS)[None], jnp.arange(60)[None], attend_as_stored("int8"))


@pytest.mark.parametrize("fields", [{"query_rank": None}, {"index_size": 4}, {"index_heads": 0}])
def test_a_half_described_indexer_is_refused(fields):
    with pytest.raises(ValueError, match=r"index_|query_rank"):
        replace(LATENT, **{"index_topk": 8, "index_heads": 2, "index_size": 10, **fields})
