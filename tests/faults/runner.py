"""Runs the tests of a fault in a copy of the repository that has the fault."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.faults.fault import ROOT, DoesNotApplyError, Fault

NOT_COPIED = (".git", ".venv*", ".jax_cache", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "site")
NO_TESTS = 5  # pytest's exit code where none was selected
TIME_LIMIT = 900  # seconds for the tests of one fault; nearly all take less than 30
# The tests that compile for TPUs and GPUs, and those of eight devices, run with what `make test` gives them.
COMPILED_TESTS = (
    "tests/models/test_compiled_experts.py",
    "tests/pallas_kernels",
    "tests/engine/test_compiled",
    "tests/engine/test_compiling",
    "tests/planning/test_plan_compiled",
    "tests/quantization/test_implementations",
)
EIGHT_DEVICE_TESTS = ("tests/scale_out",)
FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
ERROR = re.compile(r"^ERROR (\S+)", re.MULTILINE)

NOTICED, MISSED, DOES_NOT_APPLY, BROKEN = "noticed", "MISSED", "does not apply", "broken"


@dataclass(frozen=True)
class Result:
    """What became of a fault: `outcome`, the test that noticed it or why there is none, and seconds."""

    fault: Fault
    outcome: str
    detail: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """A run of pytest: its exit code, what it printed, and seconds."""

    code: int
    text: str
    seconds: float

    @property
    def failed(self) -> list[str]:
        """Node ids of the tests that failed."""
        return FAILED.findall(self.text)

    @property
    def errors(self) -> list[str]:
        """Node ids, or files, of setups and imports that failed."""
        return ERROR.findall(self.text)

    def outcome(self) -> tuple[str, str]:
        """The outcome of a run with a fault, and the test that noticed it or why there is none. A test has to fail: an
        import that does, a setup, or a process that dies, is no test's merit."""
        if self.code == 1 and self.failed:
            return NOTICED, self.failed[0]
        lines = self.text.strip().splitlines() or ["no output"]
        return (MISSED, lines[-1]) if self.code == 0 else (BROKEN, f"exit code {self.code}: {lines[-1]}")


class Workspace:
    """A copy of the repository, to which one fault at a time is applied."""

    def __init__(self, folder: Path):
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)

    def run(self, tests: Sequence[str], *options: str) -> Run:
        """Runs tests of this copy, which Python imports from here, in other processes too."""
        environment = dict(os.environ)
        path = [str(self.root)]
        compilers = ROOT / ".venv" / "compilers"
        if any(test.startswith(COMPILED_TESTS) for test in tests) and compilers.exists():
            path.append(str(compilers))
            environment["JAX_PLATFORMS"] = "cpu"
        if any(test.startswith(EIGHT_DEVICE_TESTS) for test in tests):
            environment["JAX_NUM_CPU_DEVICES"] = "8"
        environment["PYTHONPATH"] = os.pathsep.join(path)
        plugins = ("-p", "no:cacheprovider", "-p", "tests.faults.no_shrink")
        start = time.perf_counter()
        # Of tests that run alone, those that measure time fail beside others without any fault.
        for marker, num_devices in (("not alone", environment.get("JAX_NUM_CPU_DEVICES", "2")), ("alone", "8")):
            environment["JAX_NUM_CPU_DEVICES"] = num_devices
            command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-m", marker, *plugins, *options]
            try:
                done = subprocess.run(
                    [*command, *tests],
                    cwd=self.root,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIME_LIMIT,
                )
                code, text = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired:
                code, text = -1, f"did not end within {TIME_LIMIT} s"
            if code != NO_TESTS:
                break
        return Run(code, text, time.perf_counter() - start)

    def try_fault(self, fault: Fault) -> Result:
        """Runs the fault's tests with the fault. It is noticed where a test fails, which an import error is not."""
        try:
            path, text = fault.applied(self.root)
        except DoesNotApplyError as error:
            return Result(fault, DOES_NOT_APPLY, str(error), 0.0)
        original = path.read_text()
        try:
            _write(path, text)
            run = self.run(fault.tests, "-x")
        finally:
            _write(path, original)
        return Result(fault, *run.outcome(), run.seconds)


def environments(faults: Sequence[Fault]) -> list[list[str]]:
    """The tests of all faults, each once, parted by the environment that they need."""
    tests = sorted({test for fault in faults for test in fault.tests})
    compiled = [test for test in tests if test.startswith(COMPILED_TESTS)]
    eight = [test for test in tests if test.startswith(EIGHT_DEVICE_TESTS)]
    others = [test for test in tests if test not in compiled and test not in eight]
    return [part for part in (others, compiled, eight) if part]


def is_part_of(failure: str, test: str) -> bool:
    """Whether a failed node id belongs to the node id, file or folder `test`."""
    return failure == test or failure.startswith((f"{test}::", f"{test}[", f"{test.rstrip('/')}/"))


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # A change within a second, of the same size, would leave Python's compiled file in place.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
