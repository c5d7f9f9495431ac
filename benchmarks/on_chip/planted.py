"""Failures that are planted among the pieces by `--plant`, to see that a run survives them."""

import os
import time
from collections.abc import Iterator

from benchmarks.on_chip.results import CardResults, Row
from benchmarks.on_chip.sizes import Sizes

HANG_LIMIT = 4.0  # seconds
_is_poisoned = False


def exception(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """An error that leaves the process's context unusable, as an illegal address on a GPU does."""
    global _is_poisoned
    yield Row("before the exception", 1.0)
    _is_poisoned = True
    raise RuntimeError("planted: CUDA_ERROR_ILLEGAL_ADDRESS")


def abort(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """A process that ends."""
    yield Row("before the abort", 1.0)
    os.abort()


def hang(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """A piece that does not end."""
    yield Row("before the hang", 1.0)
    while True:
        time.sleep(1)


RUNS = {"exception": exception, "abort": abort, "hang": hang}


def raise_if_poisoned() -> None:
    """Raises after `exception`, as every later call of a poisoned context."""
    if _is_poisoned:
        raise RuntimeError("planted: the context of this process is poisoned")
