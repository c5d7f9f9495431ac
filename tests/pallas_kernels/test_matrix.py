"""Every Pallas kernel in its interpreter, in all dtypes, pages and widths: without a race, a read out of bounds or of
memory that nothing wrote, and near float64 in relative norm. What a kernel does not take is refused with its reason.

Caches and pages of paged attention are crossed in full. Dtypes of queries, widths and kinds of calls are laid over them
so that every two values of any two properties occur together (`test_every_two_values_occur_together`): the full product
of 2,700 calls would take two hours. Whatever else is a property of one kernel is in its own tests.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.flash_attention import api as flash_api
from pallas_kernels.flash_attention import pallas_gpu as flash_gpu
from pallas_kernels.flash_attention import pallas_tpu as flash_tpu
from pallas_kernels.norm import api as norm_api
from pallas_kernels.norm import pallas_gpu as norm_gpu
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.page_copy import pallas_tpu as page_copy_tpu
from pallas_kernels.paged_attention import PageShape, choose, empty_pages, gpu_blocks, paged_attention, tpu_kernel
from pallas_kernels.quantized_matmul import api as product_api
from pallas_kernels.quantized_matmul import pallas_gpu as product_gpu
from pallas_kernels.quantized_matmul import pallas_tpu as product_tpu
from pallas_kernels.recurrence import RecurrentTokens, linear_recurrence
from pallas_kernels.recurrence import pallas_tpu as recurrence_tpu
from pallas_kernels.recurrence.reference import recurrence
from tests.pallas_kernels.flash_attention.harness import HARNESSES, check_gradients, exact
from tests.pallas_kernels.flash_attention.shapes import FlashShape
from tests.pallas_kernels.gpu_interpreter import interpreted_gpu
from tests.pallas_kernels.norm.exact import exact_gradients, exact_norm, stored_sum
from tests.pallas_kernels.paged_attention.shapes import PagedShape
from tests.pallas_kernels.paged_attention.suite import SMALL_BLOCKS, check_paged, use_blocks, use_small_splits
from tests.pallas_kernels.quantized_matmul.weights import exact_product, head, transposed
from tests.pallas_kernels.recurrence.calls import batch_of, per_head
from tests.pallas_kernels.relative_norm import assert_near
from tests.pallas_kernels.tpu_interpreter import interpreted_tpu

pytestmark = pytest.mark.slow

FLOATS = ("float32", "bfloat16", "float16")
CACHES = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8", "int4", "int8_int4")
PAGES = (8, 16, 32, 64, 128, 256)
WIDTHS = (64, 80, 96, 128, 192, 256)


# Paged attention


def paged_shape(kind: str, dtype: str, cache: str, page: int, width: int) -> PagedShape:
    """A call of some tens of keys or, of large pages, of some pages; new tokens begin, end and cross pages."""
    base = max(page, 32)
    lengths, heads, options = {
        "decode": (((1, base), (1, base + 1), (0, 3), (1, base + 37)), (6, 3), {"max_query_length": 1}),
        "verify": (
            ((8, base + 3), (6, 6), (0, 0), (1, base + 33)),
            (4, 2),
            {"max_query_length": 8, "tree": True, "window": base // 2 + 5},
        ),
        "prefill": (((20, base + 7), (17, 17)), (4, 1), {"soft_cap": 3.0, "sinks": True}),
        "mixed": (
            ((1, base + 1), (18, base + 9), (0, 5), (4, base + 33)),
            (2, 2),
            {"window": base // 2 + 5, "num_padding": 3},
        ),
    }[kind]
    return PagedShape(lengths, page, heads, width, dtype, cache, **options)


KINDS = ("decode", "verify", "prefill", "mixed")


def tpu_reason(dtype: str, cache: str, page: int, width: int) -> str | None:
    """Why paged attention on TPUs does not take a call, or None."""
    if cache == "int8_int4":
        return "it reads the interleaved layout, not separate"
    if dtype == "float16":
        return "takes queries of float32 or bfloat16, not float16"
    return "reads caches of .*, not float16" if cache == "float16" else None


def gpu_reason(dtype: str, cache: str, page: int, width: int) -> str | None:
    """Why paged attention on GPUs does not take a call, or None."""
    if dtype == "float32":
        return "float32 queries would be rounded to 10 bits"
    if cache in ("int8_int4", *FLOATS) and cache != dtype:
        return f"a {cache} cache needs queries of the same dtype"
    if cache in ("int8", "int4") and page < 32:
        return f"{page} int8 scales of a page and head are less than a copy"
    if width == 192:
        return "head_dim=192 is not one of 64, 80, 96, 128, 256"
    return f"head_dim={width} is not 128 or 256" if cache == "int4" and width % 128 else None


REASONS = {"pallas_tpu": tpu_reason, "pallas_gpu": gpu_reason}
Call = tuple[str, str, int, int, str]  # dtype, cache, page, width, kind


def calls_taken(implementation: str) -> list[Call]:
    reason = REASONS[implementation]
    facts = itertools.product(FLOATS, CACHES, PAGES, WIDTHS)
    return [(*call, kind) for call in facts if reason(*call) is None for kind in KINDS]


def pairs(calls: Iterable[Call]) -> set:
    """Every two values of two properties that occur together."""
    return {(i, j, call[i], call[j]) for call in calls for i, j in itertools.combinations(range(5), 2)}


def paged_cases(implementation: str) -> list[Call]:
    """Every cache with every page, and the other properties in turn; then calls with pairs that did not occur."""
    taken, cases = calls_taken(implementation), []
    for (row, cache), (column, page) in itertools.product(enumerate(CACHES), enumerate(PAGES)):
        own = [call for call in taken if call[1:3] == (cache, page)]
        if own:
            dtypes, widths = ([*dict.fromkeys(call[index] for call in own)] for index in (0, 3))
            dtype, width = dtypes[column % len(dtypes)], widths[(row + column) % len(widths)]
            cases.append((dtype, cache, page, width, KINDS[(row + 2 * column + (row + column) // 2) % len(KINDS)]))
    seen = pairs(cases)
    for call in taken:
        if call not in cases and pairs([call]) - seen:
            cases.append(call)
            seen |= pairs([call])
    return cases


CASES = {implementation: paged_cases(implementation) for implementation in REASONS}


@pytest.mark.parametrize(("dtype", "cache", "page", "width", "kind"), CASES["pallas_tpu"])
def test_paged_attention_on_tpus(dtype, cache, page, width, kind):
    with interpreted_tpu(), use_blocks(*SMALL_BLOCKS):
        check_paged(paged_shape(kind, dtype, cache, page, width), "pallas_tpu", "interleaved")


@pytest.mark.parametrize(("dtype", "cache", "page", "width", "kind"), CASES["pallas_gpu"])
def test_paged_attention_on_gpus(dtype, cache, page, width, kind, monkeypatch):
    use_small_splits(monkeypatch)
    with interpreted_gpu():
        check_paged(paged_shape(kind, dtype, cache, page, width), "pallas_gpu", "separate")


@pytest.mark.parametrize("implementation", REASONS)
def test_every_two_values_occur_together(implementation):
    taken, cases = calls_taken(implementation), CASES[implementation]
    print(f"{implementation}: {len(cases)} calls of {len(taken)}")
    assert pairs(taken) == pairs(cases) != pairs(cases[::2])


@pytest.mark.parametrize("implementation", REASONS)
def test_paged_attention_refuses_the_rest(implementation):
    """By name and with the reason; None then takes XLA's form."""
    reason, counts = REASONS[implementation], {True: 0, False: 0}
    context = compat.interpreted() if implementation == "pallas_gpu" else tpu_context()
    with context:
        for dtype, cache, page, width in itertools.product(FLOATS, CACHES, PAGES, WIDTHS):
            shape = paged_shape("decode", dtype, cache, page, width)
            layout = "interleaved" if implementation == "pallas_tpu" and cache != "int8_int4" else "separate"
            why = reason(dtype, cache, page, width)
            counts[why is None] += 1
            if why is None:
                assert choose(shape.spec(layout), implementation).implementation == implementation
                continue
            call = partial(paged_attention, implementation=implementation, **shape.options)
            with pytest.raises(NotImplementedError, match=why):
                jax.eval_shape(lambda arguments, call=call: call(**arguments), shape.abstract(layout))
    print(f"{implementation}: {counts[True]} taken, {counts[False]} refused")
    assert all(counts.values())


def tpu_context():
    """Calls are taken as on a TPU; nothing is run."""
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())


# Flash attention


def flash_shape(kind: str, dtype: str, width: int, heads: tuple[int, int] = (2, 1)) -> FlashShape:
    """Of several blocks of keys, and on TPUs of queries. The GPU interpreter takes a second or more for each head."""
    if kind == "causal":
        return FlashShape(70, 150, heads, width, dtype=dtype, offset=(80, 0), lengths=(150, 70))
    options = {"window": 40, "soft_cap": 4.0, "sinks": True, "segments": True}
    return FlashShape(70, 150, (2, 1), width, dtype=dtype, offset=(0, 60), lengths=(70, 120), **options)


FLASH = {
    "pallas_tpu": (("float32", "bfloat16"), flash_tpu.HEAD_DIMS),
    "pallas_gpu": (("bfloat16", "float16"), flash_gpu.HEAD_DIMS),
}
FLASH_CASES = [
    (name, dtype, width, kind)
    for name, (dtypes, widths) in FLASH.items()
    for row, (dtype, width) in enumerate(itertools.product(dtypes, widths))
    for kind in (("causal", "everything") if name == "pallas_tpu" else (("causal", "everything")[row % 2],))
]


def check_flash(shape: FlashShape, attend) -> None:
    """Output and log-sum-exp, beside keys and values beyond the lengths that are NaN."""
    (found, lse), (wanted, exact_lse) = attend(shape, shape.arguments(stale=np.nan)), exact(shape)
    assert found.dtype == shape.dtype
    assert_near(*(np.asarray(x).reshape(-1, *x.shape[2:]) for x in (found, wanted)), shape.dtype)
    is_seen = np.isfinite(exact_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~is_seen)
    # Scores are float32 whatever the operands.
    assert_near(np.asarray(lse)[is_seen], exact_lse[is_seen], "float32", roundings=2)


@pytest.mark.parametrize(("name", "dtype", "width", "kind"), FLASH_CASES)
def test_flash_attention_and_its_gradients(name, dtype, width, kind, monkeypatch):
    shape = flash_shape(kind, dtype, width, heads=(4, 2) if name == "pallas_tpu" else (2, 1))
    attend = HARNESSES[name](monkeypatch)
    check_flash(shape, attend)
    check_gradients(shape, attend)


@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_refuses_the_rest(name, monkeypatch):
    dtypes, widths = FLASH[name]
    monkeypatch.setattr(flash_api, "current_platform", lambda: name.removeprefix("pallas_"))
    with compat.interpreted():
        for dtype, width in itertools.product(FLOATS, WIDTHS):
            shape = flash_shape("causal", dtype, width)
            if dtype in dtypes and width in widths:
                assert flash_api.explain(**shape.abstract(), implementation=name).implementation == name
                continue
            why = f"kernel takes .*, not {dtype if dtype not in dtypes else width}"
            with pytest.raises(NotImplementedError, match=why):
                jax.eval_shape(shape.call(name), shape.abstract())


# Norms


NORM_KINDS = ("rms", "rms_float32", "rms_zero_centred", "layer")
# Dtypes of hidden states and weights; of the widths one has vectors of one number, the last one full registers.
NORM_CASES = list(
    itertools.product(
        NORM_KINDS,
        (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")),
        (128, 640, 1024, 8192),
    )
)


def norm_call(kind: str, dtypes: tuple[str, str], width: int):
    """Operands (x, weight, bias, term) of three rows, and their spec. XLA has narrow norms without a term."""
    rng, (dtype, weight_dtype) = np.random.default_rng(0), dtypes
    x, term = (jnp.asarray(rng.standard_normal((3, width)), dtype) for _ in range(2))
    weight, bias = (jnp.asarray(rng.uniform(0.5, 1.5, width), weight_dtype) for _ in range(2))
    operands = (x, weight, bias if kind == "layer" else None, None if width == 1024 else term)
    return operands, norm_api.make_spec(*operands, kind=kind, eps=1e-5)


def check_norm(kind: str, dtypes: tuple[str, str], width: int) -> None:
    operands, spec = norm_call(kind, dtypes, width)
    x, weight, bias, term = operands
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for _ in range(2))
    with interpreted_gpu():
        assert norm_api.choose(spec, platform="gpu").implementation == "pallas_gpu"
        (total, out), pull = jax.vjp(lambda *operands: norm_gpu.norm(*operands, spec), *operands)
        found = pull(cotangents)
    stored = stored_sum(x, term)
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(stored, np.float32))
    assert_near(out, exact_norm(stored, weight, bias, spec), dtypes[0])
    d_total, *d_others = exact_gradients(stored, weight, bias, cotangents, spec)
    for one, operand, wanted in zip(found, operands, (d_total, *d_others, d_total), strict=True):
        if operand is None:
            assert one is None
            continue
        assert one.dtype == operand.dtype
        # Of a weight or bias the sums of few rows may be near zero: its norm is that of all.
        rows = (3, -1) if operand.ndim == 2 else (1, -1)
        assert_near(np.asarray(one).reshape(rows), wanted.reshape(rows), dtypes[0], roundings=2)


@pytest.mark.parametrize(("kind", "dtypes", "width"), NORM_CASES)
def test_norms_and_their_gradients(kind, dtypes, width):
    check_norm(kind, dtypes, width)


def test_norms_refuse_the_rest(monkeypatch):
    monkeypatch.setattr(norm_api, "current_platform", lambda: "gpu")
    refused = {576: "multiples of 128 up to 8192, not 576", 16384: "not 16384", 64: "not 64", 128: "norms of heads"}
    with compat.interpreted():
        for (width, why), dtype in itertools.product(refused.items(), FLOATS):
            x = jax.ShapeDtypeStruct((2, width), dtype)
            call = partial(norm_api.norm, weight=None, kind="rms", eps=1e-5, implementation="pallas_gpu")
            with pytest.raises(NotImplementedError, match=why):
                jax.eval_shape(call, x)


# Products with quantized weights


EXTRAS = {"int8": (None, "zeros", "minima"), "int4": (None, "zeros", "minima", "codebook")}
TPU_PRODUCTS = [
    (dtype, values, extra, group)
    for dtype, values in itertools.product(("float32", "bfloat16"), EXTRAS)
    for extra, group in itertools.product(EXTRAS[values], (16, 32, 64, 128, 256))
]
GPU_PRODUCTS = list(itertools.product(("int8", "int4"), (None, "zeros"), (64, 128), (1, 20, 130)))


def check_tpu_product(dtype: str, values: str, extra: str | None, group: int) -> None:
    """A block of outputs that is not full, chunks of inputs of which the last is narrow, rows that are padded."""
    inputs = 320 if group <= 64 else 512
    arrays, x = head(inputs, 300, group, values, extra), jax.random.normal(jax.random.key(0), (5, inputs)).astype(dtype)
    with interpreted_tpu():
        found = product_api.quantized_matmul(
            x, *arrays, block=(group, 1), is_transposed=True, out_dtype=jnp.float32, implementation="pallas_tpu"
        )
        jax.block_until_ready(found)
    # Integers are exact in bfloat16, numbers of a codebook are rounded.
    assert_near(found, exact_product(x, arrays, group), dtype if extra == "codebook" else "float32")


@pytest.mark.parametrize(("dtype", "values", "extra", "group"), TPU_PRODUCTS)
def test_products_on_tpus(dtype, values, extra, group):
    check_tpu_product(dtype, values, extra, group)


def check_gpu_product(values: str, extra: str | None, group: int, rows: int) -> None:
    """More steps than stages, splits of groups where they pay, rows that are padded, several tiles of rows."""
    inputs, outputs = 12 * group, 128
    arrays = head(inputs, outputs, group, values, extra)
    x = jax.random.normal(jax.random.key(0), (rows, inputs)).astype(jnp.bfloat16)
    w = transposed(arrays)
    spec = product_api.make_spec(x, w[0], w[2], None, block=(group, 1), activations=None)
    with interpreted_gpu():
        assert product_api.choose(spec, platform="gpu").implementation == "pallas_gpu"
        found = jax.block_until_ready(product_gpu.matmul(x, *w, spec, "gpu"))
    assert_near(found, exact_product(x, arrays, group), "float32")


@pytest.mark.parametrize(("values", "extra", "group", "rows"), GPU_PRODUCTS)
def test_products_on_gpus(values, extra, group, rows):
    check_gpu_product(values, extra, group, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows_of_groups_on_tpus(dtype):
    """Scales, zeros and minima of an embedding's groups are taken to the bit."""
    array = (jax.random.normal(jax.random.key(0), (300, 20)) * 40).astype(dtype)
    indices = jnp.array([0, 299, 5, 127, 128, 7, 8, 256])
    with interpreted_tpu():
        np.testing.assert_array_equal(product_tpu.take_rows(array, indices), array[indices])


PRODUCTS_REFUSED = {
    "pallas_tpu": {
        (("float8_e4m3fn", "float32"), (32, 1), True): "reads int4 and int8, not float8_e4m3fn",
        (("int8", "float32"), (48, 1), True): "not blocks of",
        (("int8", "bfloat16"), (128, 1), False): "XLA fuses",
        (("int4", "bfloat16"), (384, 1), True): "XLA fuses",
    },
    "pallas_gpu": {
        (("float8_e4m3fn", "bfloat16"), (64, 1), False): "is for integers",
        (("int8", "float32"), (64, 1), False): "takes bfloat16, not float32",
        (("int8", "float16"), (64, 1), False): "takes bfloat16, not float16",
        (("int4", "bfloat16"), (32, 1), False): "groups of 64 or 128 inputs, not blocks of",
        (("int4", "bfloat16"), (384, 1), False): "XLA fuses",
        (("int4", "bfloat16"), (64, 1), True): "multiplies by weights .inputs, outputs",
    },
}


@pytest.mark.parametrize("name", PRODUCTS_REFUSED)
def test_products_refuse_the_rest(name):
    with compat.interpreted():
        for ((values, dtype), block, is_transposed), why in PRODUCTS_REFUSED[name].items():
            x = jax.ShapeDtypeStruct((4, 384), dtype)
            weight = jax.ShapeDtypeStruct((384, 384), values)
            options = {"block": block, "activations": None, "is_transposed": is_transposed}
            spec = product_api.make_spec(x, weight, None, None, **options)
            with pytest.raises(NotImplementedError, match=why):
                product_api.choose(spec, name, platform=name.removeprefix("pallas_"))


# Linear recurrences


# Of a state: key heads, key width, heads, value width.
STATES = [(2, 128, 4, 64), (8, 128, 16, 128), (1, 128, 6, 64), (2, 256, 2, 128), (2, 128, 2, 256)]
RECURRENCES = [
    (kind, state, tokens)
    for state in STATES
    for kind, tokens in itertools.product(("gated_delta", "ssd"), (1, 5, 16) if state[0] < 8 else (1,))
]


def check_recurrence(kind: str, state_shape: tuple[int, int, int, int], num_tokens: int) -> None:
    """A new sequence whose slot holds garbage, one that goes on, an idle one, and one with a single token."""
    num_key_heads, key_size, num_heads, value_size = state_shape
    rng, lengths = np.random.default_rng(0), [num_tokens, num_tokens, 0, 1]
    count = sum(lengths)
    arrays = (
        *(rng.normal(size=(count, num_key_heads, key_size)) / key_size**0.5 for _ in range(2)),
        rng.normal(size=(count, num_heads, value_size)),
        -rng.exponential(0.3, size=(count, num_heads)),
        rng.uniform(size=(count, num_heads)) if kind == "gated_delta" else None,
    )
    tokens = RecurrentTokens(*(None if x is None else jnp.asarray(x, jnp.float32) for x in arrays))
    batch = batch_of(*zip([0, 9, 5, 70], lengths, strict=True))
    before = rng.normal(size=(4, num_key_heads, key_size, num_heads // num_key_heads * value_size))
    before = jnp.asarray(before, jnp.float32).at[0].set(jnp.nan)
    with interpreted_tpu():
        run = partial(linear_recurrence, short_tokens=num_tokens, max_query_length=num_tokens)
        out, after = jax.jit(partial(run, implementation="pallas_tpu"))(tokens, before, batch)
        jax.block_until_ready(after)
    np.testing.assert_array_equal(after[2], before[2])
    for slot, (start, length) in enumerate(zip(batch.query_starts, lengths, strict=True)):
        if not length:
            continue
        own = jax.tree.map(lambda x, start=start, length=length: x[start : start + length], tokens)
        old = per_head(before[slot], num_heads) if slot else None
        wanted, state = recurrence(*own, state=old)
        assert_near(out[start : start + length], wanted, "float32")
        assert_near(per_head(after[slot], num_heads), state, "float32")


@pytest.mark.parametrize(("kind", "state", "num_tokens"), RECURRENCES)
def test_recurrences_on_tpus(kind, state, num_tokens):
    check_recurrence(kind, state, num_tokens)


def test_recurrences_refuse_the_rest():
    for (key_size, width, tokens), why in {
        (64, 128, 1): r"multiples of 128, not \[64, 128\]",
        (128, 96, 1): r"multiples of 128, not \[128, 96\]",
        (128, 128, 17): "up to 16 tokens of a slot, not 17",
    }.items():
        operands = RecurrentTokens(
            *(jnp.zeros((17, 1, size)) for size in (key_size, key_size, width)), jnp.zeros((17, 1))
        )
        with tpu_context(), pytest.raises(NotImplementedError, match=why):
            linear_recurrence(
                operands,
                jnp.zeros((1, 1, key_size, width)),
                batch_of((0, 1)),
                short_tokens=tokens,
                implementation="pallas_tpu",
            )


# Page copies


def check_page_copy(page: int) -> None:
    """Pages of caches of every dtype, in every layout, in one call."""
    rng, caches = np.random.default_rng(0), {}
    for cache, width, layout in itertools.product(CACHES, (64, 256), ("separate", "interleaved")):
        if cache == "int8_int4" and layout == "interleaved":
            continue

        def draw(array):
            raw = rng.integers(0, 120, (*array.shape, array.dtype.itemsize), np.uint8)
            return jnp.asarray(raw.view(array.dtype)[..., 0])

        shape = PageShape(6, page, 3, width, cache)
        caches[cache, str(width), layout] = jax.tree.map(draw, empty_pages(shape, layout))
    source, destination = jnp.array([3, 3, 5, 0], jnp.int32), jnp.array([1, 2, 4, 6], jnp.int32)
    with interpreted_tpu():
        found = copy_pages(caches, source, destination, jnp.int32(4), implementation="pallas_tpu")
        jax.block_until_ready(found)

    def compare(old, new):
        wanted = np.array(old)
        wanted[[1, 2, 4]] = wanted[[3, 3, 5]]
        np.testing.assert_array_equal(np.asarray(new).view(np.uint8), wanted.view(np.uint8))

    jax.tree.map(compare, caches, found)


@pytest.mark.parametrize("page", PAGES)
def test_page_copies_on_tpus(page):
    check_page_copy(page)


# That these checks can fail


def _fault_tpu_attention(monkeypatch):
    """The newest key of an item is not seen."""
    visible = tpu_kernel._visible

    def blind(program, refs, item, block, part):
        seen = visible(program, refs, item, block, part)
        keys = block * program.sizes.num_keys + jax.lax.broadcasted_iota(jnp.int32, seen.shape, 1)
        return seen & (keys != item.end_key - 1)

    monkeypatch.setattr(tpu_kernel, "_visible", blind)
    test_paged_attention_on_tpus("bfloat16", "bfloat16", 64, 128, "decode")


def _fault_tpu_wait(monkeypatch):
    """A block of keys is not waited for: a race."""
    monkeypatch.setattr(tpu_kernel, "wait_for_block", lambda *arguments: None)
    test_paged_attention_on_tpus("bfloat16", "int8", 32, 128, "decode")


def _fault_gpu_attention(monkeypatch):
    """Scores are 5 % too large."""
    monkeypatch.setattr(gpu_blocks, "LOG2_E", 1.05 * gpu_blocks.LOG2_E)
    test_paged_attention_on_gpus("bfloat16", "int8", 64, 128, "decode", monkeypatch)


def _fault_tpu_flash(monkeypatch):
    """Scores are 5 % too large."""
    scores = flash_tpu.scaled_scores
    monkeypatch.setattr(flash_tpu, "scaled_scores", lambda *arguments: 1.05 * scores(*arguments))
    check_flash(flash_shape("causal", "bfloat16", 128), HARNESSES["pallas_tpu"](monkeypatch))


def _fault_gpu_flash(monkeypatch):
    """Scores are 5 % too large."""
    monkeypatch.setattr(flash_gpu, "LOG2_E", 1.05 * flash_gpu.LOG2_E)
    check_flash(flash_shape("causal", "bfloat16", 64), HARNESSES["pallas_gpu"](monkeypatch))


def _fault_flash_gradient(monkeypatch):
    """Gradients of scores are 5 % too large."""
    gradient = flash_api.scaled_scores_gradient
    monkeypatch.setattr(flash_api, "scaled_scores_gradient", lambda *arguments: 1.05 * gradient(*arguments))
    check_gradients(flash_shape("causal", "bfloat16", 64), HARNESSES["pallas_tpu"](monkeypatch))


def _fault_norm(monkeypatch):
    """Another number is added to the mean square."""
    row = norm_gpu._row
    monkeypatch.setattr(norm_gpu, "_row", lambda refs, spec: row(refs, replace(spec, eps=0.02)))
    check_norm("rms", ("bfloat16", "bfloat16"), 1024)


def _fault_norm_gradient(monkeypatch):
    """The gradient of the stored sum is left out."""
    norm = norm_gpu.xla.norm
    monkeypatch.setattr(norm_gpu.xla, "norm", lambda x, *others: norm(jax.lax.stop_gradient(x), *others))
    check_norm("rms", ("float32", "float32"), 1024)


def _fault_tpu_product(monkeypatch):
    """Codes begin at another number."""
    monkeypatch.setattr(product_tpu, "code_zero", lambda values: 1)
    check_tpu_product("bfloat16", "int8", "minima", 32)


def _fault_gpu_product(monkeypatch):
    """A group is left out."""
    kernel = product_gpu._kernel
    monkeypatch.setattr(
        product_gpu, "_kernel", lambda *refs, num_steps, **sizes: kernel(*refs, num_steps=num_steps - 1, **sizes)
    )
    check_gpu_product("int4", None, 64, 20)


def _fault_recurrence(monkeypatch):
    """Keys and queries are slightly too large."""
    column = recurrence_tpu._as_column
    monkeypatch.setattr(recurrence_tpu, "_as_column", lambda row: 1.00001 * column(row))
    check_recurrence("ssd", STATES[0], 5)


def _fault_page_copy(monkeypatch):
    """A copy goes the other way."""
    kernel = page_copy_tpu._kernel
    monkeypatch.setattr(
        page_copy_tpu, "_kernel", lambda scalars, *refs: kernel((scalars[1], scalars[0], scalars[2]), *refs)
    )
    check_page_copy(8)


FAULTS = {name.removeprefix("_fault_"): fault for name, fault in list(globals().items()) if name.startswith("_fault_")}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name, monkeypatch):
    # A kernel that was traced without the fault is traced again. JAX 0.12 raises at a race.
    jax.clear_caches()
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=r"roundings of|RACE|race|Not equal|nan"):
        FAULTS[name](monkeypatch)
    jax.clear_caches()


def _tpu_probe(fault: str | None):
    """Copies x to scratch memory and that to the result: without a wait, without a copy, or with a row beyond x."""

    def kernel(index, x_ref, out_ref, scratch, done):
        copy = pltpu.make_async_copy(x_ref.at[index[0]], scratch, done)
        if fault != "unwritten":
            copy.start()
        if fault is None or fault == "bounds":
            copy.wait()
        out_ref[...] = scratch[...]
        if fault == "race":
            copy.wait()

    x, index = jnp.ones((2, 8, 128)), jnp.array([7 if fault == "bounds" else 1], jnp.int32)
    with interpreted_tpu():
        run = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
            ),
        )
        return np.asarray(jax.jit(run)(index, x))


def _gpu_probe(fault: str | None):
    """As `_tpu_probe`, by TMA."""

    def kernel(index, x_ref, out_ref):
        def body(scratch, done):
            if fault != "unwritten":
                plgpu.copy_gmem_to_smem(x_ref.at[index[0]], scratch, done)
            if fault is None or fault == "bounds":
                plgpu.barrier_wait(done)
            out_ref[...] = scratch[...]
            if fault == "race":
                plgpu.barrier_wait(done)

        pl.run_scoped(body, plgpu.SMEM((8, 128), jnp.float32), plgpu.Barrier())

    x, index = jnp.ones((2, 8, 128)), jnp.array([7 if fault == "bounds" else 1], jnp.int32)
    with interpreted_gpu():
        run = compat.kernel(
            kernel, out_type=jax.ShapeDtypeStruct((8, 128), jnp.float32), grid=(1,), grid_names=("i",), name="p"
        )
        return np.asarray(jax.jit(run)(index, x))


@pytest.mark.parametrize("probe", [_tpu_probe, _gpu_probe])
def test_the_interpreters_check_what_they_should(probe):
    assert (probe(None) == 1).all()
    assert np.isnan(probe("unwritten")).all()
    for fault in ("race", "bounds"):
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError, IndexError), match=r"RACE|race|[Bb]ounds"):
            probe(fault)
