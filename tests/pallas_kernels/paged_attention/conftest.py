"""The one suite of paged attention, as a fixture that every implementation's tests take: `check(shape, ...)`."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import SeparatePages, paged_attention, unpack
from tests.pallas_kernels.paged_attention.shapes import PagedShape

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
    out, pages = run_paged(shape, arguments, "reference")
    tokens = np.arange(shape.num_tokens)[:, None]
    starts, lengths = np.asarray(arguments["query_starts"]), np.asarray(arguments["query_lengths"])
    rows = ((tokens >= starts) & (tokens < starts + lengths)).any(1)
    return rows, np.asarray(out, np.float32), [None if a is None else np.asarray(a.astype(jnp.float32)) for a in pages]


def check_paged(shape: PagedShape, implementation: str, page_layout: str, *, seed: int = 0) -> None:
    """Output and cache are the oracle's: every query's row, every new token, and nothing else written."""
    rows, expected, expected_pages = _expected(shape, seed)
    out, pages = run_paged(shape, shape.arguments(page_layout, seed=seed), implementation)
    assert out.dtype == jnp.dtype(shape.dtype)
    found = np.asarray(out, np.float32)
    tolerance = ROUNDING[shape.dtype] * math.sqrt(shape.head_dim)
    np.testing.assert_allclose(found[rows], expected[rows], atol=tolerance, rtol=tolerance)
    assert np.isfinite(found).all(), "padding rows must be finite when q is"
    for name, array, wanted in zip(pages._fields, pages, expected_pages, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(np.asarray(array.astype(jnp.float32)), wanted, err_msg=name)


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


@pytest.fixture
def check():
    return check_paged


@pytest.fixture
def check_alone():
    return check_rows_alone


@pytest.fixture
def run():
    return run_paged


@pytest.fixture
def with_dtypes():
    """The shape with another dtype of queries and cache."""
    return lambda shape, dtype, cache_dtype: replace(shape, dtype=dtype, cache_dtype=cache_dtype)
