"""Pieces that measure kernels as shares of what the chip can do."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.attention import (
    Measurement,
    copy_rate,
    matrix_rate,
    measure_cudnn_decode,
    measure_paged,
    measure_prefill,
)
from benchmarks.on_chip.parity import form_of, multiply, own_kernel, random_product
from benchmarks.on_chip.results import CardResults, Row
from benchmarks.on_chip.sizes import Sizes
from jaxinfer.cache.kv_dtype import default_page_size
from pallas_kernels.measure import seconds_per_step
from pallas_kernels.paged_attention.shapes import MODELS, decode_shape
from pallas_kernels.platform import current_platform

GOALS = {2: 0.90, 1: 0.85}  # of decode attention, by bytes of a number in the cache


def rates(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Rates that shares are taken of: a large copy and a large matrix product."""
    yield Row("copy", _measured_rate("copy", sizes), "B/s")
    yield Row("matrix product", _measured_rate("matrix product", sizes), "FLOP/s")


def _measured_rate(name: str, sizes: Sizes) -> float:
    if name == "copy":
        return copy_rate(current_platform(), sizes.rate_sizes.get("num_bytes"))
    return matrix_rate(current_platform(), sizes.rate_sizes.get("size"))


def rate(name: str, sizes: Sizes, results: CardResults) -> float:
    """A rate of the piece `rates`, measured here if that piece has not run or did not end well."""
    return results.rate(name) or _measured_rate(name, sizes)


def attention(dtype: str, batch: int, context: int, num_new: int, sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Decode or verification attention: bytes that must move over the rate of the copy; XLA and cuDNN beside it."""
    copy, platform = rate("copy", sizes, results), current_platform()
    options = {"dtype": sizes.q_dtype, "page_size": default_page_size(platform, dtype)}
    shape = decode_shape(sizes.shapes[0], batch, context, cache_dtype=dtype, num_new=num_new, **options)
    measure = partial(measure_paged, rate=copy, platform_name=platform, layers=sizes.layers)
    has_goal = num_new == 1 and sizes.has_goals
    for name in dict.fromkeys((own_kernel() or "xla", "xla")):
        goal = GOALS.get(jnp.dtype(dtype).itemsize) if has_goal and name == own_kernel() else None
        yield _measured(f"{name} page {shape.page_size}", partial(measure, "", shape, name), "copy", goal)
    if platform == "gpu" and dtype == "bfloat16" and num_new == 1:
        yield _measured("cudnn, contiguous", partial(measure_cudnn_decode, "", shape, copy), "copy")


def _measured(case: str, measure: Callable[[], Measurement], of: str, goal: float | None = None) -> Row:
    try:
        found = measure()
    except ArithmeticError as error:
        return Row(case, note=f"not measured: {error}")
    if found.microseconds is None:
        return Row(case, note=f"not run: {found.note}")
    note = f"{found.rate:.1f} {found.unit}"
    return Row(case, found.microseconds, "us", found.share, of, goal, note=note)


def prompts(length: int, sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Attention of a prompt: FLOPs over the rate of the matrix product."""
    platform, heads = current_platform(), MODELS[sizes.shapes[0]]
    product = rate("matrix product", sizes, results)
    for name in filter(None, (own_kernel(), "cudnn" if platform == "gpu" else None, "xla")):
        yield _measured(name, partial(measure_prefill, length, heads, name, product, platform), "matrix product")


def products(recipe: str, sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Products with quantized weights: bytes of the weight over the rate of the copy, for few rows."""
    copy = rate("copy", sizes, results)
    for rows in sizes.product_rows:
        for shape in sizes.product_shapes:
            x, weight = random_product(recipe, rows, shape, sizes.q_dtype)
            num_bytes = weight.num_bytes + x.nbytes + 4 * rows * shape[1]
            copies = 1 if current_platform() == "cpu" else max(1, min(32, 2**29 // num_bytes))
            weights = [jax.tree.map(lambda leaf: leaf + jnp.zeros_like(leaf), weight) for _ in range(copies)]

            @jax.jit
            def loop(operands, n):
                x, weights = operands

                def step(_, carry):
                    for one in weights:
                        out = multiply(carry, one)
                        carry = x + (out.mean() * 1e-3).astype(x.dtype)
                    return carry

                return lax.fori_loop(0, n, step, x)[:1, :1]

            case = f"{rows} rows {shape[0]} x {shape[1]}"
            try:
                seconds = seconds_per_step(loop, (x, weights), 4) / copies
            except ArithmeticError as error:
                yield Row(case, note=f"not measured: {error}")
                continue
            yield Row(case, seconds * 1e6, "us", num_bytes / seconds / copy, "copy", note=form_of(x, weight))
