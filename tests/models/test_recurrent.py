"""Models with recurrent layers: chunks, ragged batches and drafts give what one pass over the sequence gives."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import (
    CachedAttention,
    PagedAttention,
    StateAttention,
    StateOptions,
    attend_without_cache,
    commit,
    init_cache,
    init_paged_cache,
    init_state_cache,
    state_bytes,
)
from jaxinfer.models import (
    ConvConfig,
    DeltaConfig,
    MambaConfig,
    ModelConfig,
    RopeConfig,
    bind,
    collect,
    init_params,
    tap_names,
)
from pallas_kernels.recurrence import RaggedBatch

BASE = ModelConfig(
    architecture="Tiny",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
)
DELTA = replace(
    BASE,
    layer_kinds=("gated_delta", "attention", "gated_delta"),
    delta=DeltaConfig(2, 4, 8, 6),
    is_attention_gated=True,
)
MAMBA = replace(
    BASE,
    layer_kinds=("mamba2", "attention", "none"),
    mamba=MambaConfig(4, 8, 2, 6),
    mlp_layers=(True, False, True),
)
SIDE_BY_SIDE = replace(BASE, num_layers=2, layer_kinds=("attention_and_mamba2",) * 2, mamba=MAMBA.mamba)
CONV = replace(BASE, layer_kinds=("short_conv", "attention", "short_conv"), conv=ConvConfig(3, 32))
MODELS = {"delta": DELTA, "mamba": MAMBA, "side by side": SIDE_BY_SIDE, "conv": CONV}
TOLERANCE = 2e-5
PAGE = 16


@pytest.fixture(params=list(MODELS), scope="module")
def model(request):
    """A configuration, and parameters of which none is zero."""
    config = MODELS[request.param]
    leaves, tree = jax.tree.flatten(init_params(config, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return config, jax.tree.unflatten(tree, noisy)


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, count, dtype=np.int32)


@partial(jax.jit, static_argnums=0)
def full(config, params, tokens):
    """Hidden states [B, T, D] without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return bind(config, params)(tokens, positions, attend_without_cache)


@pytest.mark.slow
@pytest.mark.matrix
def test_chunks_in_rows_of_a_cache(model):
    """Two sequences of other lengths in the rows of a cache that held others."""
    config, params = model
    tokens = np.stack([tokens_of(0, 70), tokens_of(1, 70)])
    expected = full(config, params, tokens)

    @jax.jit
    def run(params, cache, part, rows, starts, lengths):
        attend = CachedAttention(cache, rows, starts, lengths, part.shape[1])
        hidden = bind(config, params)(part, starts[:, None] + jnp.arange(part.shape[1]), attend)
        return hidden, attend.cache

    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), init_cache(config, 3, 80, jnp.float32))
    rows, starts = jnp.array([2, 0]), np.zeros(2, np.int32)
    for lengths in ([20, 13], [7, 20], [1, 1], [20, 20], [20, 16]):
        part = np.zeros((2, 20), np.int32)
        for row in range(2):
            part[row, : lengths[row]] = tokens[row, starts[row] : starts[row] + lengths[row]]
        hidden, cache = run(params, cache, part, rows, jnp.asarray(starts), jnp.asarray(lengths))
        for row in range(2):
            wanted = expected[row, starts[row] : starts[row] + lengths[row]]
            np.testing.assert_allclose(hidden[row, : lengths[row]], wanted, atol=TOLERANCE)
        starts += np.asarray(lengths, np.int32)
    assert starts.tolist() == [68, 70]


@partial(jax.jit, static_argnames=("config", "options"))
def ragged(params, pages, states, tokens, starts, lengths, *, config, options=None):
    """One step of three slots over pages and states: hidden states, pages, states."""
    first = jnp.cumsum(lengths) - lengths
    row = jnp.arange(tokens.shape[0])
    sequence = jnp.clip(jnp.searchsorted(first + lengths, row, side="right"), 0, 2)
    positions = row - first[sequence] + starts[sequence]
    table = 1 + jnp.arange(3 * 8, dtype=jnp.int32).reshape(3, 8)
    paged = PagedAttention(pages, table, first, lengths, starts + lengths)
    attend = StateAttention(paged, states, RaggedBatch(first, lengths, starts), options)
    hidden = bind(config, params)(tokens, positions, attend)
    return hidden, paged.cache, attend.states


def new_caches(config, garbage=0.0):
    pages = init_paged_cache(config, 1 + 3 * 8, PAGE, jnp.float32)
    states = jax.tree.map(lambda x: jnp.full_like(x, garbage), init_state_cache(config, 3, jnp.float32))
    return pages, states


def step_tokens(prompts, starts, lengths, size):
    parts = [prompts[s][starts[s] : starts[s] + lengths[s]] for s in range(3)]
    return np.pad(np.concatenate(parts), (0, size - sum(lengths)))


@pytest.mark.slow
@pytest.mark.matrix
def test_ragged_batches_in_pages_and_slots(model):
    """Prompts in chunks beside decode steps and idle slots; a slot is taken over from another sequence."""
    config, params = model
    prompts = [tokens_of(2, 100), tokens_of(3, 100), tokens_of(4, 100)]
    expected = full(config, params, np.stack(prompts))
    pages, states = new_caches(config, jnp.nan)
    starts = np.array([0, 0, 0], np.int32)
    for lengths in ([70, 1, 0], [1, 64, 3], [1, 1, 40], [0, 5, 1], [1, 1, 1]):
        tokens = step_tokens(prompts, starts, lengths, 112)
        hidden, pages, states = ragged(
            params, pages, states, tokens, jnp.asarray(starts), jnp.asarray(lengths, jnp.int32), config=config
        )
        row = 0
        for s, length in enumerate(lengths):
            wanted = expected[s, starts[s] : starts[s] + length]
            np.testing.assert_allclose(hidden[row : row + length], wanted, atol=TOLERANCE)
            row += length
        starts += np.asarray(lengths, np.int32)
        if lengths == [0, 5, 1]:  # another sequence in slot 0
            starts[0], prompts[0] = 0, prompts[2]
            expected = expected.at[0].set(expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("is_uniform", [False, True])
def test_a_rejected_draft_leaves_no_trace(model, is_uniform):
    """Drafts with wrong tokens, of which none, some or all are kept, beside a prompt; then the right tokens."""
    config, params = model
    prompts = [tokens_of(5, 40), tokens_of(6, 40), tokens_of(7, 40)]
    expected = full(config, params, np.stack(prompts))
    pages, states = new_caches(config)
    options = StateOptions(short_tokens=4, defers=True, is_uniform=is_uniform)
    starts, lengths = np.zeros(3, np.int32), np.array([20, 0, 17], np.int32)
    run = partial(ragged, config=config, options=options)
    tokens = step_tokens(prompts, starts, lengths, 48)
    _, pages, states = run(params, pages, states, tokens, jnp.asarray(starts), jnp.asarray(lengths))
    for lengths, kept in (([4, 20, 4], [2, 20, 0]), ([3, 4, 4], [1, 4, 3]), ([4, 4, 1], [4, 1, 1])):
        lengths = np.array(lengths, np.int32)
        batch = RaggedBatch(jnp.asarray(np.cumsum(lengths) - lengths, jnp.int32), jnp.asarray(lengths), starts)
        batch = batch._replace(starts=jnp.asarray(starts))
        tokens, row = step_tokens(prompts, starts, lengths, 48), 0
        for s in range(3):
            tokens[row + kept[s] : row + lengths[s]] = 63 - tokens[row + kept[s] : row + lengths[s]]
            row += lengths[s]
        hidden, pages, states = run(params, pages, states, tokens, jnp.asarray(starts), jnp.asarray(lengths))
        states = commit(states, batch, jnp.array(kept, jnp.int32), options)
        row = 0
        for s in range(3):
            wanted = expected[s, starts[s] : starts[s] + kept[s]]
            np.testing.assert_allclose(hidden[row : row + kept[s]], wanted, atol=TOLERANCE)
            row += lengths[s]
        starts += np.asarray(kept, np.int32)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_state_of_another_slot_is_noticed(model):
    """The comparisons above can fail."""
    config, params = model
    prompts = [tokens_of(8, 40), tokens_of(9, 40), tokens_of(10, 40)]
    expected = full(config, params, np.stack(prompts))
    pages, states = new_caches(config)
    starts, lengths = np.zeros(3, np.int32), np.array([20, 20, 20], np.int32)
    tokens = step_tokens(prompts, starts, lengths, 64)
    _, pages, states = ragged(params, pages, states, tokens, jnp.asarray(starts), jnp.asarray(lengths), config=config)
    states = states.put(jnp.array([0, 1, 3]), states.take(jnp.array([1, 0, 2])))
    starts, lengths = lengths, np.ones(3, np.int32)
    tokens = step_tokens(prompts, starts, lengths, 64)
    hidden, _, _ = ragged(params, pages, states, tokens, jnp.asarray(starts), jnp.asarray(lengths), config=config)
    differs = [float(jnp.abs(hidden[s] - expected[s, 20]).max()) > 10 * TOLERANCE for s in range(3)]
    assert differs == [True, True, False]


@pytest.mark.slow
@pytest.mark.matrix
def test_taps_are_those_of_the_parts_that_a_layer_has(model):
    config, params = model
    names = tap_names(config)
    found, tap = collect(names)
    bind(config, params)(tokens_of(11, 5)[None], jnp.arange(5)[None], attend_without_cache, tap)
    assert sorted(found) == sorted(names)
    if config is MAMBA:
        assert "layers.1.mlp" not in names
        assert "layers.2.attention" not in names


@pytest.mark.slow
@pytest.mark.matrix
def test_configurations_survive_json_and_choices_of_layers(model):
    config, _ = model
    assert ModelConfig.from_dict(config.to_dict()) == config
    last = config.with_layers([config.num_layers - 1])
    assert last.layer_kinds == config.layer_kinds[-1:]
    assert last.num_layers == 1
    assert DELTA.kinds == (0, 1, 0)
    assert MAMBA.kinds == (0, 1, 2)


def test_bytes_of_a_state():
    # Two layers of 3 columns of 2 * 16 + 24 channels, and of 4 matrices [8, 6], in float32.
    assert state_bytes(DELTA, jnp.float32) == 2 * 4 * (3 * 56 + 4 * 8 * 6)
    assert state_bytes(BASE, jnp.float32) == 0


def test_pages_alone_are_refused():
    pages = init_paged_cache(DELTA, 4, PAGE, jnp.float32)
    one = jnp.array([1], jnp.int32)
    attend = PagedAttention(pages, jnp.array([[1]], jnp.int32), one - 1, one, one)
    with pytest.raises(ValueError, match="PagedAttention has no states for recurrent layers"):
        bind(DELTA, init_params(DELTA, jax.random.key(0)))(jnp.array([1]), jnp.array([0]), attend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_kinds": ("gated_delta",) * 3}, "'gated_delta', but the configuration describes no such layer"),
        ({"layer_kinds": ("attention", "lstm", "attention")}, "layer_kinds names 'lstm'"),
        ({"layer_kinds": ("attention",)}, "1 layer_kinds for 3 layers"),
        ({"layer_kinds": ("none",) * 3, "mlp_layers": (True, False, True)}, "layer 1 has neither a mixer nor an MLP"),
        ({"layer_kinds": ("short_conv",) * 3, "conv": CONV.conv, "block": "post_norm"}, "need block='pre_norm'"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeltaConfig(3, 4, 8, 8), "num_value_heads=4 is not a multiple of num_key_heads=3"),
        (lambda: MambaConfig(4, 8, 3, 8), "num_heads=4 is not a multiple of num_groups=3"),
        (lambda: MambaConfig(4, 8, 2, 8, part_multipliers=(1.0,)), "5 factors, got 1"),
        (lambda: ConvConfig(1, 8), "width 1 has no state"),
        (lambda: ConvConfig(0, 8), "width must be a positive integer, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
