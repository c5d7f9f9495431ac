"""Cases that `make test` runs of a parametrized test."""

from pathlib import Path

import pytest


class Case:
    def __init__(self, nodeid: str, *markers: pytest.MarkDecorator):
        self.nodeid, self.markers = nodeid, {marker.name: marker.mark for marker in markers}

    def get_closest_marker(self, name: str):
        return self.markers.get(name)


MATRIX, SLOW = pytest.mark.matrix, pytest.mark.slow
CASES = [
    Case("a.py::test_plain[1]"),
    Case("a.py::test_plain[2]"),
    Case("a.py::test_first[1]", MATRIX, SLOW),
    Case("a.py::test_first[2]", MATRIX),
    Case("a.py::test_first[3]", MATRIX),
    Case("a.py::test_named[1]", MATRIX("x[2]", "3")),
    Case("a.py::test_named[x[2]]", MATRIX("x[2]", "3")),
    Case("a.py::test_named[3]", MATRIX("x[2]", "3")),
]


def test_a_matrix_keeps_its_first_quick_case_or_the_named_ones(request):
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    left_out = []
    kept = conftest.quick_cases(CASES, lambda items: left_out.extend(items))
    # Slow ones stay, and are skipped with the reason.
    names = [case.nodeid.partition("_")[2] for case in kept]
    assert names == ["plain[1]", "plain[2]", "first[1]", "first[2]", "named[x[2]]", "named[3]"]
    assert [case.nodeid.partition("_")[2] for case in left_out] == ["first[3]", "named[1]"]
