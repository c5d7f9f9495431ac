"""Launches of a program compiled for a GPU, as XLA plans them: kernels and copies, graphs, and waits of the host.

XLA writes the plan beside other texts of a compilation (`xla_dump_to`). A kernel or a copy is a launch. Launches of a
graph are started together; a loop or a conditional outside a graph makes the host wait for its predicate.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_kernels import ahead_of_time

_THUNK = re.compile(r"(?P<indent>\s*)\d+: k(?P<kind>\w+)\s*\[[^]]*\]\s*(?P<name>\S*)(?: grid: \[(?P<grid>[^]]*)\])?")
_BRANCH = re.compile(r"\s*(\w+):\s*$")
_CONTROL = ("While", "Conditional", "CommandBuffer")


@dataclass(frozen=True)
class Thunk:
    """A node of the plan.

    Attributes:
      kind: XLA's, "CustomKernel", "Copy", "CustomCall", "While", ... name: of a kernel. blocks: of a kernel's grid.
      branches: nodes by branch: of a loop "condition" and "body", of a graph one of no name.
    """

    kind: str
    name: str = ""
    blocks: int = 1
    branches: dict[str, list["Thunk"]] = field(default_factory=dict)

    def launches(self) -> Iterator["Thunk"]:
        """The launches of one run: of a loop one pass, of a conditional the branch with the fewest, which is that of
        requests that ask for nothing more."""
        if self.kind not in _CONTROL:
            yield self
        elif self.kind == "Conditional":
            runs = ([launch for node in nodes for launch in node.launches()] for nodes in self.branches.values())
            yield from min(runs, key=len, default=[])
        else:
            yield from (launch for nodes in self.branches.values() for node in nodes for launch in node.launches())

    def waits(self) -> int:
        """Predicates that the host reads in one run."""
        if self.kind == "CommandBuffer":
            return 0
        inside = [sum(node.waits() for node in nodes) for nodes in self.branches.values()]
        if self.kind == "Conditional":
            return 1 + min(inside, default=0)
        return (self.kind == "While") + sum(inside)

    def graphs(self) -> int:
        """Graphs that one run starts, in the branches with the fewest launches."""
        return (self.kind == "CommandBuffer") or sum(
            node.graphs() for nodes in self.branches.values() for node in nodes
        )


@dataclass(frozen=True)
class LaunchPlan:
    """Attributes:
    thunks: the plan before graphs were formed. formed: with them.
    """

    thunks: Sequence[Thunk]
    formed: Sequence[Thunk]

    @property
    def loop(self) -> Sequence[Thunk]:
        """The launches of one pass of the first loop, its predicate among them: a step of decoding."""
        return [*next(thunk for thunk in self.thunks if thunk.kind == "While").launches()]

    @property
    def num_graphs(self) -> int:
        return sum(thunk.graphs() for thunk in self.formed)

    @property
    def num_waits(self) -> int:
        """Predicates that the host reads in one run in which each loop makes one pass."""
        return sum(thunk.waits() for thunk in self.formed)


def read_thunks(text: str) -> list[Thunk]:
    """Parses a plan."""
    top = Thunk("Program", branches={"": []})
    path: list[tuple[int, Thunk, str]] = [(-1, top, "")]  # indentation, node, the branch that is read
    label: str | None = None
    for line in text.splitlines():
        if (begins := _BRANCH.match(line)) is not None:
            label = begins[1]
            continue
        thunk = _THUNK.match(line)
        if thunk is None and "No thunks" not in line:
            continue
        indent = len(line) - len(line.lstrip())
        while path[-1][0] >= indent:
            path.pop()
        at, parent, branch = path[-1]
        if label is not None:
            branch, label = label, None
            path[-1] = (at, parent, branch)
        nodes = parent.branches.setdefault(branch, [])
        if thunk is not None:
            grid = thunk["grid"] or "1"
            node = Thunk(thunk["kind"], thunk["name"], math.prod(map(int, grid.split(","))))
            nodes.append(node)
            path.append((indent, node, ""))
    return top.branches[""]


def compile_with_plan(
    chip: str, function: Callable, *arguments: Any, **options: Any
) -> tuple[ahead_of_time.Compilation, LaunchPlan]:
    """As `ahead_of_time.compile_for`, with the plan of the program's launches."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compilation = ahead_of_time.compile_for(chip, function, *arguments, compiler_options=dump, **options)
        plans = [
            read_thunks(file.read_text(encoding="utf-8"))
            for name in ("thunk_sequence", "thunk_sequence_after_thunk_passes")  # the second only if it differs
            for file in Path(folder).glob(f"*{name}.txt")
        ]
    return compilation, LaunchPlan(plans[0], plans[-1])
