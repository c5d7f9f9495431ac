"""The blockwise implementation against dense attention, its memory, and its independence of unused capacity."""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import xla
from pallas_kernels.flash_attention.specs import AttentionSpec

# Error of one rounding; a sum of K products of unit size errs by about this times sqrt(K).
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}
BLOCK = 16


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16, so that short sequences have several."""
    monkeypatch.setattr(xla, "QUERY_BLOCK", BLOCK)
    monkeypatch.setattr(xla, "KEY_BLOCK", BLOCK)
    monkeypatch.setattr(xla, "DECODE_KEY_BLOCK", BLOCK)


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call; `num_keys` None means as many as queries."""

    num_queries: int
    num_keys: int | None = None
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 16
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    offset: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    dtype: str = "float32"

    @property
    def batch_size(self) -> int:
        return len(self.lengths or self.offset or (0, 0))

    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        rng = np.random.default_rng([self.num_queries, self.num_keys or 0, self.head_dim])
        num_keys = self.num_keys or self.num_queries
        shapes = [(self.num_queries, self.heads[0])] + [(num_keys, self.heads[1])] * 2
        arrays = [rng.standard_normal((self.batch_size, *shape, self.head_dim), np.float32) for shape in shapes]
        return tuple(jnp.asarray(array, self.dtype) for array in arrays)

    def call(self):
        """A jitted function (q, k, v, implementation) of its own, so that it is traced with the blocks of the test."""
        vectors = {
            "query_offset": None if self.offset is None else jnp.array(self.offset, jnp.int32),
            "kv_lengths": None if self.lengths is None else jnp.array(self.lengths, jnp.int32),
        }
        options = {"causal": self.causal, "window": self.window, "scale": self.scale, **vectors}
        return jax.jit(lambda q, k, v, name: flash_attention(q, k, v, implementation=name, **options), static_argnums=3)

    def tolerance(self) -> float:
        return ROUNDING[self.dtype] * math.sqrt(self.head_dim)


CASES = {
    # lengths around the block, one token, and far more keys than queries
    "one_token": Case(1),
    "below_a_block": Case(15),
    "one_block": Case(16),
    "above_a_block": Case(17),
    "three_blocks": Case(48),
    "not_a_multiple": Case(61),
    "more_keys": Case(5, 70, offset=(65, 3)),
    "fewer_keys": Case(40, 10, causal=False),
    # groups and head dims
    "groups_1": Case(33, heads=(4, 4)),
    "groups_2": Case(33, heads=(4, 2)),
    "groups_3": Case(33, heads=(6, 2)),
    "groups_16": Case(33, heads=(16, 1)),
    "head_dim_64": Case(33, head_dim=64),
    "head_dim_80": Case(33, head_dim=80),
    "head_dim_128": Case(33, head_dim=128),
    # masks
    "full": Case(35, causal=False),
    "scale": Case(35, scale=0.5),
    "window_1": Case(35, window=1),
    "window_block": Case(50, window=16),
    "window_17": Case(50, window=17),
    "window_beyond": Case(35, window=1000),
    "window_decode": Case(1, 64, window=5, offset=(63, 20)),
    # ragged rows: offsets, lengths, length 0, lengths at block borders
    "decode": Case(1, 64, offset=(63, 0, 15, 16), lengths=(64, 1, 16, 17)),
    "chunk": Case(8, 64, offset=(0, 10, 40), lengths=(8, 18, 45)),
    "long_chunk": Case(40, 96, offset=(0, 30, 50), lengths=(40, 33, 90)),
    "empty_row": Case(3, 40, offset=(0, 0), lengths=(0, 3)),
    "all_empty": Case(3, 40, offset=(0, 0), lengths=(0, 0)),
    "one_key_block": Case(4, 12, offset=(0, 6), lengths=(0, 10)),
    "window_and_lengths": Case(8, 96, window=9, offset=(0, 30, 80), lengths=(8, 38, 84)),
    "full_and_lengths": Case(20, 50, causal=False, offset=(0, 0), lengths=(7, 50)),
    # bfloat16
    "bf16": Case(61, dtype="bfloat16"),
    "bf16_head_dim_128": Case(33, heads=(4, 1), head_dim=128, dtype="bfloat16"),
    "bf16_ragged": Case(8, 64, offset=(0, 10, 40), lengths=(8, 18, 45), dtype="bfloat16"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.usefixtures("small_blocks")
def test_equals_dense_attention(case):
    q, k, v = case.operands()
    run = case.call()
    out, expected = run(q, k, v, "xla"), run(q, k, v, "reference")
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    np.testing.assert_allclose(
        out.astype(jnp.float32), expected.astype(jnp.float32), rtol=0, atol=case.tolerance(), strict=True
    )


def test_equals_dense_attention_with_the_blocks_of_production():
    case = Case(xla.QUERY_BLOCK + 3, head_dim=8, window=300)
    q, k, v = case.operands()
    run = case.call()
    np.testing.assert_allclose(run(q, k, v, "xla"), run(q, k, v, "reference"), rtol=0, atol=case.tolerance())


def test_dense_attention_is_the_textbook_formula():
    # One query head, written out in float64.
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in Case(7).operands())
    scores = np.where(np.tri(7, dtype=bool), q @ k.T / np.sqrt(16), -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    out = flash_attention(*(jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v)), implementation="reference")
    np.testing.assert_allclose(out[0, :, 0], weights @ v, atol=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_the_comparison_catches_a_window_that_is_one_key_short():
    case, other = Case(50, window=16), Case(50, window=15)
    q, k, v = case.operands()
    difference = jnp.abs(case.call()(q, k, v, "xla") - other.call()(q, k, v, "reference")).max()
    assert difference > 100 * case.tolerance()


GRADIENT_CASES = ["one_token", "not_a_multiple", "more_keys", "fewer_keys", "groups_3", "full", "window_17", "bf16"]


@pytest.mark.parametrize("name", GRADIENT_CASES)
@pytest.mark.usefixtures("small_blocks")
def test_gradients_equal_those_of_dense_attention(name):
    case = CASES[name]
    operands = case.operands()
    run = case.call()
    # Each output gets a weight of its own, so that no gradient cancels.
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(operands[0].shape, np.float32))

    def loss(operands, implementation):
        return jnp.sum(run(*operands, implementation).astype(jnp.float32) * weight)

    found, expected = (jax.grad(loss)(operands, implementation) for implementation in ("xla", "reference"))
    for ours, dense in zip(found, expected, strict=True):
        scale = max(1.0, float(jnp.abs(dense.astype(jnp.float32)).max()))
        np.testing.assert_allclose(
            ours.astype(jnp.float32), dense.astype(jnp.float32), rtol=0, atol=4 * scale * case.tolerance()
        )


@pytest.mark.usefixtures("small_blocks")
def test_a_query_without_keys_gives_zeros():
    case = Case(3, 40, offset=(0, 0), lengths=(0, 3))
    out = case.call()(*case.operands(), "xla")
    assert np.array_equal(out[0], np.zeros_like(out[0]))
    assert np.all(out[1] != 0)


@pytest.mark.parametrize("name", ["decode", "long_chunk", "one_key_block", "window_and_lengths", "full_and_lengths"])
@pytest.mark.usefixtures("small_blocks")
def test_what_lies_beyond_a_rows_length_is_never_read(name):
    case = CASES[name]
    q, k, v = case.operands()
    run = case.call()
    is_stale = jnp.arange(k.shape[1]) >= jnp.array(case.lengths)[:, None]
    clean = run(q, k, v, "xla")
    for junk in (jnp.nan, jnp.inf, 1e30):
        stale = [jnp.where(is_stale[..., None, None], junk, x) for x in (k, v)]
        assert np.array_equal(run(q, *stale, "xla"), clean)


@pytest.mark.usefixtures("small_blocks")
def test_rows_are_independent():
    case = CASES["long_chunk"]
    q, k, v = case.operands()
    run = case.call()
    clean = run(q, k, v, "xla")
    poisoned = [x.at[1].set(jnp.nan) for x in (q, k, v)]
    out = run(*poisoned, "xla")
    assert np.array_equal(out[0], clean[0])
    assert np.array_equal(out[2], clean[2])
    assert np.isnan(out[1]).any()


@pytest.mark.parametrize("num_queries", [1, 8, 32])
def test_a_nan_is_never_hidden(num_queries):
    # Every real query sees key 0, so none may come out finite: a row that sees NaN is not a row that sees nothing.
    case = Case(num_queries, 128, offset=(0, 60), lengths=(num_queries, 60 + num_queries))
    operands = case.operands()
    run = case.call()
    for i, poisoned in enumerate(operands):
        place = (1,) if i == 0 else (1, 0)
        out = run(*operands[:i], poisoned.at[place].set(jnp.nan), *operands[i + 1 :], "xla")
        assert np.isnan(out[1]).all(), "qkv"[i]
        assert np.isfinite(out[0]).all()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_queries", [1, 40])
@pytest.mark.usefixtures("small_blocks")
def test_unused_capacity_changes_no_bit(num_queries, window):
    offset = (0, 40, 8)
    lengths = tuple(start + num_queries for start in offset)
    case = Case(num_queries, 80, offset=offset, lengths=lengths, window=window)
    q, k, v = case.operands()
    outs = []
    for capacity in (80, 96, 100, 333):
        padding = ((0, 0), (0, capacity - 80), (0, 0), (0, 0))
        wider = [jnp.pad(x, padding, constant_values=jnp.nan) for x in (k, v)]
        outs.append(case.call()(q, *wider, "xla"))
    for out in outs[1:]:
        assert np.array_equal(out, outs[0])


def test_blocks_nobody_sees_are_not_computed():
    positions, lengths = jnp.array([[40], [3]]), jnp.array([41, 4])
    spec = AttentionSpec(2, 1, 4096, 1, 2, 16, causal=True, window=None, scale=1.0)
    assert [int(x) for x in xla._block_range(positions, lengths, BLOCK, spec)] == [0, 3]
    spec = replace(spec, window=4)
    assert [int(x) for x in xla._block_range(positions + 100, lengths + 100, BLOCK, spec)] == [6, 9]


def temp_bytes(function, *shapes) -> int:
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*operands).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_number_of_tokens():
    def size(num_tokens):
        return temp_bytes(flash_attention, *[(1, num_tokens, heads, 16) for heads in (2, 1, 1)])

    tokens = 32768
    operand_bytes = 4 * tokens * 16 * 4
    assert size(tokens) < tokens * tokens * 4 / 200
    assert size(tokens) < 4 * operand_bytes
    assert size(tokens) < 2.2 * size(tokens // 2)


def test_memory_of_the_gradient_stays_far_below_the_scores():
    tokens = 8192
    shapes = [(1, tokens, heads, 16) for heads in (2, 1, 1)]
    size = temp_bytes(jax.grad(lambda *x: flash_attention(*x).sum(), (0, 1, 2)), *shapes)
    assert size < 2 * tokens * tokens * 4 / 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 4, 16)}, r"q \[B, T, Hq, K\].*got q \(2, 4, 16\)"),
        ({"v": (2, 8, 2, 8)}, "equal k, v"),
        ({"q": (3, 4, 4, 16)}, "batch and head_dim must agree"),
        ({"q": (2, 4, 4, 32)}, "batch and head_dim must agree"),
        ({"q": (2, 4, 3, 16)}, "3 query heads must be a multiple of the 2 key heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    shapes = {"q": (2, 4, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16), **changes}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(flash_attention, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "cudnn7"}, "implementation='cudnn7' is not one of xla, reference"),
        ({"window": 0}, "window=0 needs causal attention and at least 1 key"),
        ({"window": 4, "causal": False}, "window=4 needs causal"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(flash_attention, **options), *Case(4).operands())


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16", "bfloat16"), ("int32",) * 3])
def test_dtypes_that_do_not_fit_are_refused(dtypes):
    operands = [x.astype(dtype) for x, dtype in zip(Case(4).operands(), dtypes, strict=True)]
    with pytest.raises(ValueError, match="one floating dtype"):
        flash_attention(*operands)
