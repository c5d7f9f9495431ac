"""The catalogue of planted faults follows the code; `make test-faults` plants them and runs the tests."""

import ast
from collections import Counter

import pytest

from tests.faults.__main__ import failing_anchors, main
from tests.faults.catalogue import FAULTS
from tests.faults.fault import ROOT, DoesNotApplyError, Fault
from tests.faults.runner import BROKEN, MISSED, NOTICED, Run, environments, is_part_of

AREAS = {
    "adapters",
    *("front", "kv_events", "ray_serve"),
    *("batch", "cache", "calibration", "checkpoints", "cli", "determinism", "doors", "engine"),
    *("grammar", "heads", "histories", "kernels", "measure", "on_chip"),
    *("models", "parallel", "planning", "policies", "quantization", "replays", "sampling", "schemas", "server"),
    *("manifests", "simulate", "speculative"),
    *("store", "text", "tool-calls", "training", "training_heads", "trees", "vocabularies"),
}


def test_every_fault_applies():
    assert failing_anchors(FAULTS) == []
    assert main(["--check"]) == 0


def test_a_fault_that_no_longer_applies_is_named():
    gone = Fault("text/gone", "jaxinfer/text/stream.py", "no such line", "", ("tests/text",), "nothing")
    assert "text/gone" in failing_anchors([gone])[0]
    with pytest.raises(DoesNotApplyError, match="times 'self', not once"):
        Fault("text/often", "jaxinfer/text/stream.py", "self", "", ("tests/text",), "nothing").applied()
    with pytest.raises(DoesNotApplyError, match="there is no"):
        Fault("text/file", "jaxinfer/text/none.py", "self", "", ("tests/text",), "nothing").applied()


def test_there_are_many_faults_in_every_area():
    assert len(FAULTS) >= 40
    assert {fault.area for fault in FAULTS} == AREAS


def test_names_are_unique_and_faults_are_of_the_product():
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []
    packages = ("jaxinfer", "pallas_kernels", "cpu_kernels", "checkpoints_convert", "benchmarks", "deploy")
    for fault in FAULTS:
        assert fault.file.split("/")[0] in packages, fault.name
        assert fault.tests, fault.name
        assert fault.why, fault.name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_tests_of_a_fault_exist(fault):
    for test in fault.tests:
        function, _, case = test.partition("[")
        path, *names = function.split("::")
        assert (ROOT / path).exists(), test
        body = ast.parse((ROOT / path).read_text()).body if names else []
        for name in names:
            found = [node for node in body if getattr(node, "name", None) == name]
            assert found, f"{test}: no {name}"
            body = getattr(found[0], "body", [])
            marks = [ast.unparse(decorator) for decorator in getattr(found[0], "decorator_list", [])]
            assert "pytest.mark.slow" not in marks, f"{test} is slow: make test does not run it"
            matrix = [mark for mark in marks if mark.startswith("pytest.mark.matrix")]
            assert not case or not matrix or repr(case[:-1]) in matrix[0], f"{test}: make test does not run this case"


def test_a_failure_belongs_to_its_file_folder_and_function():
    failure = "tests/text/test_stop.py::test_a[x]"
    assert all(is_part_of(failure, test) for test in (failure, "tests/text", failure[:-3], "tests/text/test_stop.py"))
    assert not is_part_of(failure, "tests/text/test_stop.py::test_ab")


@pytest.mark.parametrize(
    ("code", "text", "outcome", "detail"),
    [
        (1, "FAILED tests/a.py::test_b[c] - assert 1 == 2\n1 failed", NOTICED, "tests/a.py::test_b[c]"),
        (0, "3 passed in 1.00s\n", MISSED, "3 passed in 1.00s"),
        (1, "ERROR tests/a.py::test_b - a fixture\n1 error", BROKEN, "exit code 1: 1 error"),
        (2, "ERROR tests/a.py\n1 error during collection", BROKEN, "exit code 2: 1 error during collection"),
        (-6, "", BROKEN, "exit code -6: no output"),
    ],
)
def test_a_fault_is_noticed_by_a_test_that_fails_and_by_nothing_else(code, text, outcome, detail):
    assert Run(code, text, 0.0).outcome() == (outcome, detail)


def test_tests_run_in_the_environments_that_they_need():
    kernel, mesh, other = "tests/pallas_kernels/test_a.py", "tests/scale_out/test_b.py", "tests/text"
    faults = [Fault("text/x", "", "", "", tests, "") for tests in ((other, mesh), (kernel, other))]
    assert environments(faults) == [[other], [kernel], [mesh]]
