"""Which cases of a parametrized test `make test` runs; the others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *always: Any) -> list[Any]:
    """The cases, slow ones marked but for those in `always`; a tuple is the arguments of one case."""
    cases = list(cases)
    assert set(always) <= set(cases), f"no such case: {set(always) - set(cases)}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in always else pytest.mark.slow)
        for case in cases
    ]
