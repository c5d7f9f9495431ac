"""Pieces that compare kernels with the same computation in float32, on the chip itself."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.on_chip.results import CardResults, Row
from benchmarks.on_chip.sizes import Sizes
from jaxinfer.cache.kv_dtype import default_page_size
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.on_device import in_layouts
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.measure import random_operands
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.paged_attention import layout, paged_attention, platform_layout
from pallas_kernels.paged_attention.shapes import MODELS, PagedShape, decode_shape
from pallas_kernels.platform import current_platform
from pallas_kernels.quantized_matmul import choose, make_spec, quantized_matmul
from pallas_kernels.recurrence import RaggedBatch, RecurrentTokens, linear_recurrence

# The largest norm of an error over the norm of the result, of any query. In bfloat16 kernels err by 2e-3 to 4e-3, a
# decode of 1,000 keys that does not see its newest one by 3e-2.
MAX_ERROR = 1e-2
PAGE_SIZES = (16, 32, 64)


def own_kernel() -> str | None:
    """The name of the Pallas kernels of this platform; None on a CPU."""
    return {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}.get(current_platform())


def relative_error(found: Any, expected: Any) -> float:
    """The norm of the difference over the norm of `expected`, the largest of any row; infinity if one is not finite."""
    found, expected = (np.asarray(array, np.float32).reshape(len(array), -1) for array in (found, expected))
    norms = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(np.max(norms)) if np.isfinite(norms).all() else float("inf")


def compared(case: str, error: float, note: str = "") -> Row:
    """The row of a comparison."""
    return Row(case, error, "relative", is_right=error <= MAX_ERROR, note=note or f"at most {MAX_ERROR:.0e}")


def paged(model: str, dtype: str, sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Paged attention over a cache of one dtype: all programs at the engine's page size, decode at the others."""
    own_size = default_page_size(current_platform(), dtype)
    shapes = paged_shapes(model, dtype, own_size, sizes)
    for program in sizes.parity_programs:
        yield from _paged_rows(f"{program} page {own_size}", shapes[program]())
    for page_size in sizes.page_sizes:
        if page_size != own_size:
            shape = paged_shapes(model, dtype, page_size, sizes)["decode"]()
            yield from _paged_rows(f"decode page {page_size}", shape)


def paged_shapes(model: str, dtype: str, page_size: int, sizes: Sizes) -> dict[str, Callable[..., PagedShape]]:
    """By the name of the program, what makes its call."""
    make = partial(decode_shape, model, dtype=sizes.q_dtype, page_size=page_size, cache_dtype=dtype)
    context = sizes.parity_context
    return {
        "decode": partial(make, sizes.parity_batch, context),
        "verify": partial(make, 8, context, num_new=8),
        "prefill": partial(make, 1, context, num_new=min(512, context)),
        "mixed": partial(_mixed, make, context),
    }


def _mixed(make: Callable[..., PagedShape], context: int) -> PagedShape:
    """Sequences of other lengths that decode, verify and store a prompt in one call."""
    shape = make(1, context, num_new=min(64, context // 2))
    short, long = context // 3 + 1, context - 7
    lengths = ((1, short), (min(64, context // 2), context), (0, 5), (1, long), (8, 8), (5, short))
    return replace(shape, lengths=lengths, max_query_length=min(64, context // 2))


def _paged_rows(case: str, shape: PagedShape) -> Iterator[Row]:
    arguments = random_arguments(shape)
    kernel = own_kernel() or "xla"
    page_layout = platform_layout(current_platform(), shape.cache_dtype, has_values=True)

    def attend(implementation: str, page_layout: str, dtype: str, arrays: dict[str, Any]) -> tuple[jax.Array, Any]:
        new = {name: arrays[name].astype(dtype) for name in ("q", "k_new", "v_new")}
        pages = layout.pack(arrays["pages"], page_layout)
        arrays = arrays | new | {"pages": pages}
        out, pages = paged_attention(**arrays, **shape.options, implementation=implementation)
        return out, layout.unpack(pages, shape.heads[1], shape.head_dim)

    run = jax.jit(partial(attend, kernel, page_layout, shape.dtype))
    try:
        found, pages = run(arguments)
    except NotImplementedError as error:
        yield Row(case, note=f"not run: {error}")
        return
    expected, expected_pages = jax.jit(partial(attend, "reference", "separate", "float32"))(arguments)
    rows = _rows_of(shape)
    is_same = all(
        bool(jnp.array_equal(ours, theirs))
        for ours, theirs in zip(jax.tree.leaves(pages), jax.tree.leaves(expected_pages), strict=True)
    )
    row = compared(case, relative_error(found[rows], expected[rows]))
    yield row if is_same else replace(row, is_right=False, note="pages differ")
    if all(new == 1 for new, _ in shape.lengths):
        blind, _ = run(random_arguments(shape, is_blind=True))
        error = relative_error(blind[rows], expected[rows])
        is_refused = error > MAX_ERROR
        note = f"blind to the newest key: {'refused' if is_refused else 'NOT NOTICED'}"
        yield Row(f"{case}, planted fault", error, "relative", is_right=is_refused, note=note)


def _rows_of(shape: PagedShape) -> np.ndarray:
    """True for each row that is a query."""
    rows = np.zeros(shape.num_tokens, bool)
    start = 0
    for new, _ in shape.lengths:
        rows[start : start + new] = True
        start += new + shape.gap
    return rows


def random_arguments(shape: PagedShape, *, is_blind: bool = False) -> dict[str, Any]:
    """Arrays of a call, with random keys and values in pages in random order, in the separate layout.

    is_blind: of a decode that does not see its newest key, otherwise the same: each sequence is a token shorter, and
    what it stores is what its pages have there.
    """
    rng = np.random.default_rng(0)
    new, vectors = random_operands(shape, rng)
    page = shape.page()
    stored = (page.num_pages, page.page_size, page.num_kv_heads, page.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(stored, np.float32), shape.dtype) for _ in range(2))
    if is_blind:
        last = vectors["kv_lengths"] - 2
        pages = vectors["page_table"][jnp.arange(len(last)), last // shape.page_size]
        new |= {"k_new": k[pages, last % shape.page_size], "v_new": v[pages, last % shape.page_size]}
        vectors["kv_lengths"] -= 1
    (k, k_scales), (v, v_scales) = layout.to_stored(k, page.key_dtype), layout.to_stored(v, page.value_dtype)
    scales = (None if one is None else one.swapaxes(1, 2) for one in (k_scales, v_scales))
    starts = jnp.cumsum(vectors["query_lengths"]) - vectors["query_lengths"]
    return new | vectors | {"pages": layout.SeparatePages(k, v, *scales), "query_starts": starts}


def flash(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Prompts without pages, ours and cuDNN's."""
    for model in sizes.shapes:
        num_q, num_kv, head_dim = MODELS[model]
        length = sizes.prompts_of_kernels[0]
        q = jax.random.normal(jax.random.key(0), (1, length, num_q, head_dim), sizes.q_dtype)
        k, v = jax.random.normal(jax.random.key(1), (2, 1, length, num_kv, head_dim), sizes.q_dtype)
        with jax.default_matmul_precision("highest"):
            inputs = (array.astype(jnp.float32) for array in (q, k, v))
            expected = flash_attention(*inputs, implementation="xla")[0]
        for name in filter(None, (own_kernel() or "xla", "cudnn" if current_platform() == "gpu" else None)):
            case = f"flash {model} {name}"
            try:
                found = flash_attention(q, k, v, implementation=name)[0]
            except NotImplementedError as error:
                yield Row(case, note=f"not run: {error}")
                continue
            yield compared(case, relative_error(found, expected))


def products(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Products with quantized weights against those with the dequantized weights in float32."""
    for recipe in sizes.quantized:
        for rows in sizes.product_rows:
            x, weight = random_product(recipe, rows, sizes.product_shapes[0], sizes.q_dtype)
            found = jax.jit(multiply)(x, weight)
            with jax.default_matmul_precision("highest"):
                expected = x.astype(jnp.float32) @ weight.dequantize()
            yield compared(f"product {recipe} {rows} rows", relative_error(found, expected), form_of(x, weight))


def random_product(recipe: str, rows: int, shape: tuple[int, int], dtype: str) -> tuple[jax.Array, QuantizedArray]:
    """Operands of a product, the weight as this platform stores it."""
    weight = quantize(jax.random.normal(jax.random.key(1), shape) * 0.02, recipe)
    weight = in_layouts({"w": weight}, current_platform())["w"]
    return jax.random.normal(jax.random.key(0), (rows, shape[0])).astype(dtype), weight


def multiply(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    """The product in float32."""
    scheme = weight.scheme
    operands: Any = (weight.values, weight.scales, weight.zeros, weight.codebook)
    options: Any = {"block": scheme.block, "activations": scheme.activations, "out_dtype": jnp.float32}
    return quantized_matmul(x, *operands, **options)


def form_of(x: jax.Array, weight: QuantizedArray) -> str:
    """The name of the implementation that multiplies them."""
    scheme = weight.scheme
    operands = (x, weight.values, weight.zeros, weight.codebook)
    return choose(make_spec(*operands, block=scheme.block, activations=scheme.activations)).implementation


def states(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Recurrent states and copies of pages against XLA's."""
    slots, heads, width = (4, 4, 16) if sizes.is_tiny else (16, 32, 128)
    for kind in ("gated_delta", "ssd"):
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal((slots, heads, width), np.float32) for _ in range(2))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v, g = rng.standard_normal((slots, heads, width), np.float32), -rng.exponential(0.3, (slots, heads))
        beta = rng.uniform(size=(slots, heads)) if kind == "gated_delta" else None
        arrays: Any = (None if x is None else jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta))
        tokens = RecurrentTokens(*arrays)
        state = jnp.asarray(rng.standard_normal((slots, heads, width, width), np.float32))
        starts = jnp.arange(slots, dtype=jnp.int32)
        batch = RaggedBatch(starts, jnp.ones_like(starts), jnp.full_like(starts, 5))

        def run(name, tokens=tokens, state=state, batch=batch):
            return linear_recurrence(tokens, state, batch, max_query_length=1, implementation=name)

        case = f"{kind} state"
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(run, static_argnums=0)("xla")
        try:
            found = jax.jit(run, static_argnums=0)(own_kernel() or "xla")
        except NotImplementedError as error:
            yield Row(case, note=f"not run: {error}")
            continue
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        yield compared(case, max(relative_error(ours, theirs) for ours, theirs in pairs))
    pages = jax.random.normal(jax.random.key(3), (32, sizes.page_sizes[-1], 8, 128), sizes.q_dtype)
    source, destination = jnp.arange(1, 9, dtype=jnp.int32), jnp.arange(17, 25, dtype=jnp.int32)
    copied = copy_pages(pages, source, destination)
    is_same = bool(jnp.array_equal(copied, pages.at[destination].set(pages[source])))
    yield Row("copies of pages", 0.0 if is_same else 1.0, "error", is_right=is_same)
