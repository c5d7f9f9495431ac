"""Timing of kernels on the attached device, for the tuner and the benchmarks."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention import make_schedule, make_spec, paged_attention
from pallas_kernels.paged_attention.layout import Pages, PageShape
from pallas_kernels.paged_attention.shapes import PagedShape
from pallas_kernels.platform import current_platform

# Bytes of KV cache of one case: several times the last-level cache of any chip.
MIN_CACHE_BYTES = {"cpu": 2**28, "gpu": 2**29, "tpu": 2**29}
# Calls in a pass of a loop whose length is not static: a GPU waits for the host before each pass.
CALLS_PER_PASS = 8


def seconds_per_step(loop: Callable[[Any, int], jax.Array], arguments: Any, steps: int, *, repeats: int = 5) -> float:
    """Seconds of one step: the slope of `loop(arguments, n)` from n = 1 to n = 1 + steps, medians of `repeats` runs.

    The slope excludes dispatch; the number of steps is doubled until they take longer than that. Raises ArithmeticError
    if the loop's result is not finite, or if the times are too noisy for any number of steps.
    """

    def run(n: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(arguments, n))
        return time.perf_counter() - start

    if not np.isfinite(np.asarray(loop(arguments, 1), np.float32)).all():
        raise ArithmeticError("the case computes NaN or infinity")
    one = statistics.median(run(1) for _ in range(repeats))
    for _ in range(6):
        many = statistics.median(run(1 + steps) for _ in range(repeats))
        if many > 1.5 * one:
            return (many - one) / steps
        steps *= 2
    raise ArithmeticError(f"{steps // 2} steps take {many:.2g} s and one takes {one:.2g} s: too noisy to tell")


def ideal_bytes(shape: PagedShape) -> int:
    """Bytes that a call has to move: queries, output, and the keys and values of each sequence once, with scales."""
    item = jnp.dtype(shape.cache_dtype).itemsize
    per_key = 2 * shape.heads[1] * (shape.head_dim * item + (4 if shape.cache_dtype == "int8" else 0))
    per_token = 2 * shape.heads[0] * shape.head_dim * jnp.dtype(shape.dtype).itemsize
    return sum(keys * per_key + new * per_token for new, keys in shape.lengths)


def num_layers(shape: PagedShape, platform: str) -> int:
    """Number of layers whose KV caches together exceed the chip's last-level cache, at most 16."""
    return max(1, min(16, -(-MIN_CACHE_BYTES[platform] // ideal_bytes(shape))))


def random_operands(shape: PagedShape, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random queries and new keys and values of a call, and its page table, of pages in random order, and lengths."""
    counts = [-(-keys // shape.page_size) for _, keys in shape.lengths]
    table = np.zeros((len(counts), max(counts)), np.int32)
    ids = iter(rng.permutation(shape.page().num_pages - 1) + 1)
    for row, count in enumerate(counts):
        table[row, :count] = [next(ids) for _ in range(count)]
    vectors = {
        "page_table": jnp.asarray(table),
        "query_lengths": jnp.asarray([new for new, _ in shape.lengths], jnp.int32),
        "kv_lengths": jnp.asarray([keys for _, keys in shape.lengths], jnp.int32),
    }
    shapes = shape.abstract("separate")
    new = {
        name: jnp.asarray(rng.standard_normal(shapes[name].shape, np.float32), shape.dtype)
        for name in ("q", "k_new", "v_new")
    }
    return new, vectors


def paged_loop(shape: PagedShape, implementation: str, layers: int) -> tuple[Callable, Any]:
    """A function (arguments, n) that runs n dependent steps over the caches of `layers` layers, and its arguments."""
    page_layout = "interleaved" if implementation == "pallas_tpu" else "separate"
    page = shape.page()
    new, vectors = random_operands(shape, np.random.default_rng(0))

    @jax.jit
    def loop(operands, n):
        new, vectors, caches = operands
        spec = make_spec(**new, pages=caches[0], page_table=vectors["page_table"], **shape.options)
        schedule = make_schedule(spec, **vectors, implementation=implementation)

        def step(_, carry):
            q, caches = carry
            written = []
            for pages in caches:
                out, pages = paged_attention(
                    **new | {"q": q}, pages=pages, **vectors, **shape.options, schedule=schedule
                )
                # Queries stay near the first ones, so that values do not grow.
                q = new["q"] + out * jnp.asarray(1e-3, out.dtype)
                written.append(pages)
            return q, written

        return lax.fori_loop(0, n, step, (new["q"], caches))[0][:1, :1]

    return loop, (new, vectors, [random_pages(page, page_layout, seed) for seed in range(layers)])


def random_pages(page: PageShape, page_layout: str, seed: int) -> Pages:
    """Pages of random numbers, which a chip may read more slowly than zeros."""

    def fill(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if page.has_scales and like.dtype == jnp.float32:
            return jax.random.uniform(key, like.shape, minval=0.01, maxval=0.02)
        if jnp.issubdtype(like.dtype, jnp.integer):
            return jax.random.bits(key, like.shape, jnp.uint8).astype(like.dtype)
        return jax.random.normal(key, like.shape, jnp.bfloat16).astype(like.dtype)

    leaves, structure = jax.tree.flatten(page.abstract(page_layout))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(structure, [fill(key, leaf) for key, leaf in zip(keys, leaves, strict=True)])


def flash_calls(platform: str) -> int:
    """Calls in a pass of `flash_loop`."""
    return 1 if platform == "cpu" else CALLS_PER_PASS


def flash_loop(length: int, heads: tuple[int, int, int], dtype: str, implementation: str) -> tuple[Callable, Any]:
    """A function (arguments, n) that attends n times `flash_calls` times to a prompt of `length` tokens; heads are
    (Hq, Hkv, K)."""
    num_q, num_kv, head_dim = heads
    q = jax.random.normal(jax.random.key(0), (1, length, num_q, head_dim), dtype)
    k, v = jax.random.normal(jax.random.key(1), (2, 1, length, num_kv, head_dim), dtype)

    @jax.jit
    def loop(operands, n):
        q, k, v = operands

        def step(_, carry):
            for _ in range(flash_calls(current_platform())):
                carry = q + flash_attention(carry, k, v, implementation=implementation) * jnp.asarray(1e-3, q.dtype)
            return carry

        return lax.fori_loop(0, n, step, q)[:1, :1]

    return loop, (q, k, v)
