"""Pieces about kernels: the same answers as XLA's on the chip itself, and their share of what the chip can do."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.attention import (
    Measurement,
    copy_rate,
    matrix_rate,
    measure_cudnn_decode,
    measure_paged,
    measure_prefill,
)
from benchmarks.on_chip.results import Results, Row
from benchmarks.on_chip.sizes import Sizes
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.on_device import in_layouts
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.measure import random_operands, seconds_per_step
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.paged_attention import layout, paged_attention, platform_layout
from pallas_kernels.paged_attention.shapes import MODELS, PagedShape, decode_shape
from pallas_kernels.platform import current_platform
from pallas_kernels.quantized_matmul import choose, make_spec, quantized_matmul
from pallas_kernels.recurrence import RaggedBatch, RecurrentTokens, linear_recurrence

# Error of one rounding; a sum of n products of unit size errs by about this times sqrt(n).
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}
GOALS = {2: 0.90, 1: 0.85}  # of decode attention, by bytes of a number in the cache
CUDNN_CONTEXTS = (8192,)


def own_kernel() -> str | None:
    """The name of the Pallas kernels of this platform; None on a CPU."""
    return {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}.get(current_platform())


def rates(sizes: Sizes, results: Results) -> Iterator[Row]:
    """What shares are taken of: a large copy and a large matrix product."""
    platform = current_platform()
    yield Row("copy", copy_rate(platform, sizes.rate_sizes.get("num_bytes")), "B/s")
    yield Row("matrix product", matrix_rate(platform, sizes.rate_sizes.get("size")), "FLOP/s")


# The same answers as XLA's.


def paged_parity(model: str, program: str, sizes: Sizes, results: Results) -> Iterator[Row]:
    """A paged kernel and XLA on the same pages, by type of the cache."""
    make = partial(decode_shape, model, dtype=sizes.q_dtype, page_size=sizes.page_size)
    context = sizes.parity_context
    shapes: dict[str, Callable[..., PagedShape]] = {
        "decode": partial(make, 16, context),
        "verify": partial(make, 8, context, num_new=8),
        "prefill": partial(make, 1, context, num_new=min(512, context)),
        "mixed": lambda **options: _mixed(make, context, **options),
    }
    for dtype in sizes.cache_dtypes:
        shape = shapes[program](cache_dtype=dtype)
        yield _compared(f"{program} {model} {dtype}", shape)


def _mixed(make: Callable[..., PagedShape], context: int, **options: Any) -> PagedShape:
    """Sequences of other lengths that decode, verify and store a prompt in one call."""
    shape = make(1, context, num_new=min(64, context // 2), **options)
    short, long = context // 3 + 1, context - 7
    lengths = ((1, short), (min(64, context // 2), context), (0, 5), (1, long), (8, 8), (5, short))
    return replace(shape, lengths=lengths, max_query_length=min(64, context // 2))


def _compared(case: str, shape: PagedShape) -> Row:
    arguments = random_arguments(shape)

    def run(implementation: str, page_layout: str) -> tuple[jax.Array, Any]:
        def call(arrays):
            arrays = arrays | {"pages": layout.pack(arrays["pages"], page_layout)}
            out, pages = paged_attention(**arrays, **shape.options, implementation=implementation)
            return out, layout.unpack(pages, shape.heads[1], shape.head_dim)

        return jax.jit(call)(arguments)

    expected, expected_pages = run("xla", "separate")
    kernel = own_kernel() or "xla"
    page_layout = platform_layout(current_platform(), shape.cache_dtype, has_values=True)
    try:
        found, pages = run(kernel, page_layout)
    except NotImplementedError as error:
        return Row(case, note=f"not run: {error}")
    rows = _rows_of(shape)
    error = float(jnp.max(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32))[rows]))
    tolerance = ROUNDING[shape.dtype] * math.sqrt(shape.head_dim)
    same = all(
        bool(jnp.array_equal(ours, theirs))
        for ours, theirs in zip(jax.tree.leaves(pages), jax.tree.leaves(expected_pages), strict=True)
    )
    note = "" if same else "pages differ"
    return Row(case, error, "error", is_right=same and error <= tolerance, note=note or f"tolerance {tolerance:.2g}")


def _rows_of(shape: PagedShape) -> np.ndarray:
    """Whether each row is a query."""
    rows = np.zeros(shape.num_tokens, bool)
    start = 0
    for new, _ in shape.lengths:
        rows[start : start + new] = True
        start += new + shape.gap
    return rows


def random_arguments(shape: PagedShape, seed: int = 0) -> dict[str, Any]:
    """Arrays of a call, with random keys and values in pages in random order, in the separate layout."""
    rng = np.random.default_rng(seed)
    new, vectors = random_operands(shape, rng)
    page = shape.page()
    stored = (page.num_pages, page.page_size, page.num_kv_heads, page.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(stored, np.float32)) for _ in range(2))
    (k, k_scales), (v, v_scales) = layout.to_stored(k, page.key_dtype), layout.to_stored(v, page.value_dtype)
    scales = (None if one is None else one.swapaxes(1, 2) for one in (k_scales, v_scales))
    starts = jnp.cumsum(vectors["query_lengths"]) - vectors["query_lengths"]
    return new | vectors | {"pages": layout.SeparatePages(k, v, *scales), "query_starts": starts}


def flash_parity(sizes: Sizes, results: Results) -> Iterator[Row]:
    """Prompts without pages, ours and cuDNN's, against XLA's."""
    for model in sizes.shapes:
        num_q, num_kv, head_dim = MODELS[model]
        length = sizes.prompts_of_kernels[0]
        q = jax.random.normal(jax.random.key(0), (1, length, num_q, head_dim), sizes.q_dtype)
        k, v = jax.random.normal(jax.random.key(1), (2, 1, length, num_kv, head_dim), sizes.q_dtype)
        expected = flash_attention(q, k, v, implementation="xla").astype(jnp.float32)
        for name in filter(None, (own_kernel() or "xla", "cudnn" if current_platform() == "gpu" else None)):
            case = f"flash {model} {name}"
            try:
                found = flash_attention(q, k, v, implementation=name).astype(jnp.float32)
            except NotImplementedError as error:
                yield Row(case, note=f"not run: {error}")
                continue
            error = float(jnp.max(jnp.abs(found - expected)))
            tolerance = ROUNDING[sizes.q_dtype] * math.sqrt(head_dim)
            yield Row(case, error, "error", is_right=error <= tolerance, note=f"tolerance {tolerance:.2g}")


def product_parity(sizes: Sizes, results: Results) -> Iterator[Row]:
    """Products with quantized weights against the same product in float32."""
    for recipe in sizes.quantized:
        for rows in sizes.product_rows:
            x, weight = _product(recipe, rows, sizes.product_shapes[0], sizes.q_dtype)
            found = jax.jit(_multiply)(x, weight)
            with jax.default_matmul_precision("highest"):
                expected = x.astype(jnp.float32) @ weight.dequantize()
            error = float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))
            tolerance = 4 * ROUNDING[sizes.q_dtype]
            note = f"{_form_of(x, weight)}, tolerance {tolerance:.2g}"
            yield Row(f"product {recipe} {rows} rows", error, "relative", is_right=error <= tolerance, note=note)


def state_parity(sizes: Sizes, results: Results) -> Iterator[Row]:
    """Recurrent states and copies of pages against XLA's."""
    slots, heads, width = (4, 4, 16) if sizes.q_dtype == "float32" else (16, 32, 128)
    for kind in ("gated_delta", "ssd"):
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal((slots, heads, width), np.float32) for _ in range(2))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v, g = rng.standard_normal((slots, heads, width), np.float32), -rng.exponential(0.3, (slots, heads))
        beta = rng.uniform(size=(slots, heads)) if kind == "gated_delta" else None
        tokens = RecurrentTokens(*(None if x is None else jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)))
        state = jnp.asarray(rng.standard_normal((slots, heads, width, width), np.float32))
        starts = jnp.arange(slots, dtype=jnp.int32)
        batch = RaggedBatch(starts, jnp.ones_like(starts), jnp.full_like(starts, 5))

        def run(name, tokens=tokens, state=state, batch=batch):
            return linear_recurrence(tokens, state, batch, max_query_length=1, implementation=name)

        expected = jax.jit(run, static_argnums=0)("xla")
        case = f"{kind} state"
        try:
            found = jax.jit(run, static_argnums=0)(own_kernel() or "xla")
        except NotImplementedError as error:
            yield Row(case, note=f"not run: {error}")
            continue
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        error = max(float(jnp.max(jnp.abs(ours - theirs))) for ours, theirs in pairs)
        yield Row(case, error, "error", is_right=error <= 1e-4, note="tolerance 1e-4")
    pages = jax.random.normal(jax.random.key(3), (32, sizes.page_size, 8, 128), sizes.q_dtype)
    source, destination = jnp.arange(1, 9, dtype=jnp.int32), jnp.arange(17, 25, dtype=jnp.int32)
    copied = copy_pages(pages, source, destination)
    is_same = bool(jnp.array_equal(copied, pages.at[destination].set(pages[source])))
    yield Row("copies of pages", 0.0 if is_same else 1.0, "error", is_right=is_same)


# Shares of what the chip can do.


def decode_speed(sizes: Sizes, results: Results) -> Iterator[Row]:
    """Decode and verification attention: bytes that must move over the rate of the copy."""
    rate, platform = results.rate("copy"), current_platform()
    make = partial(decode_shape, sizes.shapes[0], dtype=sizes.q_dtype, page_size=sizes.page_size)
    for num_new in sizes.new_tokens:
        for batch in (sizes.batches[0], sizes.batches[-1]):
            for context in sizes.contexts:
                for dtype in sizes.cache_dtypes:
                    shape = make(batch, context, cache_dtype=dtype, num_new=num_new)
                    case = f"{'decode' if num_new == 1 else 'verify 8'} b{batch} c{context} {dtype}"
                    goal = GOALS.get(jnp.dtype(dtype).itemsize) if num_new == 1 and sizes.has_goals else None
                    measure = partial(measure_paged, rate=rate, platform_name=platform, layers=sizes.layers)
                    yield _paged_row(case, partial(measure, case, shape, own_kernel() or "xla"), goal)
                    if own_kernel() is not None and context == sizes.contexts[0]:
                        yield _paged_row(f"{case} xla", partial(measure, f"{case} xla", shape, "xla"))
                    if platform == "gpu" and dtype == "bfloat16" and context in CUDNN_CONTEXTS:
                        yield _of(measure_cudnn_decode(f"{case} cudnn, contiguous", shape, rate), "copy")


def _paged_row(case: str, measure: Callable[[], Measurement], goal: float | None = None) -> Row:
    try:
        return _of(measure(), "copy", goal)
    except ArithmeticError as error:
        return Row(case, note=f"not measured: {error}")


def _of(found: Measurement, of: str, goal: float | None = None) -> Row:
    if found.microseconds is None:
        return Row(found.case, note=f"not run: {found.note}")
    note = f"{found.rate:.1f} {found.unit}"
    return Row(found.case, found.microseconds, "us", found.share, of, goal, note=note)


def prefill_speed(sizes: Sizes, results: Results) -> Iterator[Row]:
    """Attention of prompts: FLOPs over the rate of the matrix product."""
    platform = current_platform()
    for length in sizes.prompts_of_kernels:
        for name in filter(None, (own_kernel(), "cudnn" if platform == "gpu" else None, "xla")):
            heads = MODELS[sizes.shapes[0]]
            case = f"prefill {length} {name}"
            try:
                found = measure_prefill(length, heads, name, results.rate("matrix product"), platform)
            except ArithmeticError as error:
                yield Row(case, note=f"not measured: {error}")
                continue
            yield _of(replace(found, case=case), "matrix product")


def product_speed(sizes: Sizes, results: Results) -> Iterator[Row]:
    """Products with quantized weights: bytes of the weight over the rate of the copy, for few rows."""
    rate = results.rate("copy")
    for recipe in sizes.quantized:
        for rows in sizes.product_rows:
            for shape in sizes.product_shapes:
                x, weight = _product(recipe, rows, shape, sizes.q_dtype)
                num_bytes = weight.num_bytes + x.nbytes + 4 * rows * shape[1]
                copies = 1 if current_platform() == "cpu" else max(1, min(32, 2**29 // num_bytes))
                weights = [jax.tree.map(lambda leaf, i=i: leaf + jnp.zeros_like(leaf), weight) for i in range(copies)]

                @jax.jit
                def loop(operands, n):
                    x, weights = operands

                    def step(_, carry):
                        for one in weights:
                            out = _multiply(carry, one)
                            carry = x + (out.mean() * 1e-3).astype(x.dtype)
                        return carry

                    return lax.fori_loop(0, n, step, x)[:1, :1]

                case = f"product {recipe} {rows} rows {shape[0]} x {shape[1]}"
                try:
                    seconds = seconds_per_step(loop, (x, weights), 4) / copies
                except ArithmeticError as error:
                    yield Row(case, note=f"not measured: {error}")
                    continue
                share = num_bytes / seconds / rate
                yield Row(case, seconds * 1e6, "us", share, "copy", note=_form_of(x, weight))


def _product(recipe: str, rows: int, shape: tuple[int, int], dtype: str) -> tuple[jax.Array, QuantizedArray]:
    weight = quantize(jax.random.normal(jax.random.key(1), shape) * 0.02, recipe)
    weight = in_layouts({"w": weight}, current_platform())["w"]
    return jax.random.normal(jax.random.key(0), (rows, shape[0])).astype(dtype), weight


def _multiply(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    scheme = weight.scheme
    operands = (weight.values, weight.scales, weight.zeros, weight.codebook)
    options: Any = {"block": scheme.block, "activations": scheme.activations, "out_dtype": jnp.float32}
    return quantized_matmul(x, *operands, **options)


def _form_of(x: jax.Array, weight: QuantizedArray) -> str:
    scheme = weight.scheme
    operands = (x, weight.values, weight.zeros, weight.codebook)
    return choose(make_spec(*operands, block=scheme.block, activations=scheme.activations)).implementation
