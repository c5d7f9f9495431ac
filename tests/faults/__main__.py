"""`python -m tests.faults`: plants each fault of the catalogue and says whether the tests notice it."""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from tests.faults.catalogue import FAULTS
from tests.faults.fault import DoesNotApplyError, Fault
from tests.faults.runner import BROKEN, NOTICED, Result, Workspace, environments, is_part_of


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every fault is noticed (with --check: where every fault applies)."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults, or areas such as 'sampling'; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once, each in a copy of its own")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--check", action="store_true", help="only verify that every fault still applies")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without any fault first")
    options = parser.parse_args(arguments)
    faults = chosen(options.names)
    if not faults:
        parser.error(f"no fault is named {' or '.join(options.names)}; --list prints them")
    if options.list:
        for fault in faults:
            print(f"{fault.name:44} {fault.why}")
        return 0
    if options.check:
        problems = list(failing_anchors(faults))
        print("\n".join(problems) or f"{len(faults)} faults apply")
        return 1 if problems else 0
    results = run(faults, max(1, options.jobs), has_baseline=not options.no_baseline)
    if options.json is not None:
        rows = [{**asdict(result), "fault": result.fault.name} for result in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), f"of {len(results)} faults;", end=" ")
    times = os.times()
    print(f"{times.children_user + times.children_system:.0f} s of CPU time")
    return 0 if counts[NOTICED] == len(results) else 1


def chosen(names: Sequence[str]) -> list[Fault]:
    """The faults of these names or areas; all where there are no names."""
    return [fault for fault in FAULTS if not names or fault.name in names or fault.area in names]


def failing_anchors(faults: Sequence[Fault]) -> list[str]:
    """What is wrong with faults that no longer apply."""
    problems = []
    for fault in faults:
        try:
            fault.applied()
        except DoesNotApplyError as error:
            problems.append(str(error))
    return problems


def run(faults: Sequence[Fault], num_jobs: int, *, has_baseline: bool = True) -> list[Result]:
    """Tries the faults, after all their tests without any. Results are in the order of the faults."""
    with tempfile.TemporaryDirectory(prefix="jaxinfer-faults-") as folder, ThreadPoolExecutor(num_jobs) as pool:
        spaces: SimpleQueue[Workspace] = SimpleQueue()
        for number in range(min(num_jobs, len(faults))):
            spaces.put(Workspace(Path(folder) / str(number)))
        failures = baseline(faults, spaces, pool) if has_baseline else []

        def attempt(fault: Fault) -> Result:
            broken = [failure for failure in failures if any(is_part_of(failure, test) for test in fault.tests)]
            if broken:
                result = Result(fault, BROKEN, f"fails without the fault: {broken[0]}", 0.0)
            else:
                space = spaces.get()
                result = space.try_fault(fault)
                spaces.put(space)
            seconds = f"{result.seconds:6.1f} s"
            print(f"{result.outcome:14} {seconds} {fault.name:44} {result.detail}", flush=True)
            return result

        return list(pool.map(attempt, faults))


def baseline(faults: Sequence[Fault], spaces: "SimpleQueue[Workspace]", pool: ThreadPoolExecutor) -> list[str]:
    """Runs the tests of all faults once as the code is; returns those that fail."""

    def attempt(tests: list[str]) -> list[str]:
        space = spaces.get()
        run = space.run(tests)
        spaces.put(space)
        print(f"{'without faults':14} {run.seconds:6.1f} s {run.outcome()[1]}", flush=True)
        failures = [*run.failed, *run.errors]
        return failures if run.code in (0, 1) and (failures or run.code == 0) else list(tests)

    found = pool.map(attempt, environments(faults))
    return [failure for failures in found for failure in failures]


if __name__ == "__main__":
    sys.exit(main())
