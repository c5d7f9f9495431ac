"""The one suite of paged attention, as a fixture that every implementation's tests take: `check(shape, ...)`."""

from dataclasses import replace

import pytest

from tests.pallas_kernels.paged_attention.suite import check_paged, check_rows_alone, run_paged


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
