"""One suite over named shapes for every implementation, against dense float32 attention."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention, unpack
from pallas_kernels.paged_attention.layout import from_stored
from pallas_kernels.paged_attention.shapes import SMALL, Shape

# Error of one rounding; a sum of n products of unit size errs by about this times sqrt(n).
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}


def run(shape: Shape, arguments: dict, implementation: str):
    call = partial(paged_attention, **shape.options, implementation=implementation)
    return jax.jit(lambda arrays: call(**arrays))(arguments)


def is_query(shape: Shape, arguments: dict) -> np.ndarray:
    tokens = np.arange(shape.num_tokens)[:, None]
    starts, lengths = np.asarray(arguments["query_starts"]), np.asarray(arguments["query_lengths"])
    return ((tokens >= starts) & (tokens < starts + lengths)).any(1)


def check(shape: Shape, page_layout: str, implementation: str, **options):
    """The implementation's output and cache are the oracle's; nothing else was written."""
    arguments = shape.arguments(page_layout, **options)
    expected, expected_pages = run(shape, arguments, "reference")
    out, pages = run(shape, arguments, implementation)
    rows = is_query(shape, arguments)
    assert out.dtype == arguments["q"].dtype
    tolerance = ROUNDING[shape.dtype] * math.sqrt(shape.head_dim)
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[rows], np.asarray(expected, np.float32)[rows], atol=tolerance, rtol=tolerance
    )
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for name, found, wanted in zip(type(pages)._fields, pages, expected_pages, strict=True):
        if found is not None:
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32), err_msg=name)


@pytest.mark.parametrize("page_layout", ["separate", "interleaved"])
@pytest.mark.parametrize("name", SMALL)
def test_xla(name, page_layout):
    check(SMALL[name], page_layout, "xla")
