"""The one suite of paged attention: a call of any implementation against the oracle in float64."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning
from pallas_kernels.paged_attention import SeparatePages, gpu_kernel, gpu_schedule, paged_attention, unpack
from pallas_kernels.paged_attention.tpu_schedule import NAMES, TpuProgramSizes
from tests.pallas_kernels.paged_attention.exact import appended_pages, exact_output
from tests.pallas_kernels.paged_attention.shapes import PagedShape
from tests.pallas_kernels.relative_norm import assert_near

# Error of one rounding; a sum of n products of unit size errs by about this times sqrt(n).
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}


def run_paged(shape: PagedShape, arguments: dict, implementation: str) -> tuple[jax.Array, SeparatePages]:
    """Output and the cache in its logical form, from one jitted call."""

    def call(arrays):
        out, pages = paged_attention(**arrays, **shape.options, implementation=implementation)
        return out, unpack(pages, shape.heads[1], shape.head_dim)

    return jax.jit(call)(arguments)


@functools.cache
def _expected(shape: PagedShape, seed: int):
    arguments = shape.arguments("separate", seed=seed)
    pages = appended_pages(shape, arguments)
    tokens = np.arange(shape.num_tokens)[:, None]
    starts, lengths = np.asarray(arguments["query_starts"]), np.asarray(arguments["query_lengths"])
    rows = ((tokens >= starts) & (tokens < starts + lengths)).any(1)
    out = exact_output(shape, arguments)
    return rows, out, [None if a is None else np.asarray(a.astype(jnp.float32)) for a in pages]


def check_paged(shape: PagedShape, implementation: str, page_layout: str, *, seed: int = 0) -> None:
    """Output and cache are the oracle's: every query's row, every new token, and nothing else written."""
    rows, expected, expected_pages = _expected(shape, seed)
    out, pages = run_paged(shape, shape.arguments(page_layout, seed=seed), implementation)
    assert out.dtype == jnp.dtype(shape.dtype)
    found = np.asarray(out, np.float32)
    tolerance = ROUNDING[shape.dtype] * math.sqrt(shape.head_dim)
    np.testing.assert_allclose(found[rows], expected[rows], atol=tolerance, rtol=tolerance)
    # Of a rotated cache queries and outputs are rounded once more.
    assert_near(found[rows], expected[rows], shape.dtype, roundings=2 if shape.page().is_rotated else 1)
    assert np.isfinite(found).all(), "padding rows must be finite when q is"
    for name, array, wanted in zip(pages._fields, pages, expected_pages, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(np.asarray(array.astype(jnp.float32)), wanted, err_msg=name)


@contextlib.contextmanager
def use_blocks(*programs: TpuProgramSizes) -> Iterator[None]:
    """Sizes of the TPU kernel's program of few queries and of that of many."""
    with contextlib.ExitStack() as stack:
        for name, blocks in zip(NAMES, programs, strict=False):
            stack.enter_context(tuning.force(name, **asdict(blocks)))
        yield


# A sequence of some tens of keys goes round the ring of buffers, and one of more than 16 new tokens is several items.
SMALL_BLOCKS = TpuProgramSizes(16, 32, 3, 1), TpuProgramSizes(16, 32, 2, 1)


def use_small_splits(monkeypatch) -> None:
    """Few thread blocks and short splits of the GPU kernel: a block takes several items, and a sequence of some tens of
    keys has several splits."""
    monkeypatch.setattr(gpu_kernel, "num_resident", lambda: 3)
    monkeypatch.setattr(gpu_schedule, "SHORTEST_SPLIT", 64)
    monkeypatch.setattr(gpu_schedule, "LONGEST_SPLIT", 64)
    monkeypatch.setattr(gpu_schedule, "SPLITS_OF_A_LENGTH", 2)


def check_rows_alone(shape: PagedShape, call: Callable[[dict], jax.Array], page_layout: str = "separate") -> None:
    """A sequence's rows of `call(arguments)`, a program of one shape, keep every bit when the others are emptied."""
    arguments = shape.arguments(page_layout)
    together = np.asarray(call(arguments))
    for index, (length, _) in enumerate(shape.lengths):
        only = np.arange(len(shape.lengths)) == index
        alone = arguments | {key: jnp.where(only, arguments[key], 0) for key in ("query_lengths", "kv_lengths")}
        start = int(arguments["query_starts"][index])
        rows = slice(start, start + length)
        np.testing.assert_array_equal(np.asarray(call(alone))[rows], together[rows])
