"""Bytes that a program compiled for a TPU moves between HBM and the chip, from its scheduled HLO.

XLA's own "bytes accessed" counts every branch of every conditional, an embedding table for a gather of a few of its
rows, and an array twice when it is copied into vector memory (VMEM) before use. Here an instruction counts the bytes
that it reads from and writes to HBM; arrays in VMEM are free.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COST = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
HOST_SPACE = "S(5)"  # in layouts: the host's memory
# The compiler's kernels for `jax.lax.ragged_dot`, which have no cost estimate: each expert is read once.
_RAGGED = "ragged-dot"
# Bits of an element of dtypes without a number in their name.
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"add-dependency", "optimization-barrier"}
_CALLS = ("call", "call-start", "async-start", "custom-call-start")
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is the update
_VIEWS = ("bitcast", "reshape")
# Later parts of an asynchronous instruction, which is counted where it starts.
_LATER = ("-done", "-update")


@dataclass(frozen=True)
class HloArray:
    """One array of an instruction's result. Sizes exclude the padding of tiles."""

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (_BITS[self.dtype] if bits is None else int(bits.group())) // 8

    @property
    def hbm_bytes(self) -> int:
        return self.num_bytes if self.in_hbm else 0


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: `results` are the arrays of its type, `operands` the names of its inputs."""

    name: str
    opcode: str
    results: tuple[HloArray, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @cached_property
    def called(self) -> str | None:
        """The computation of a fusion, call or loop."""
        found = _CALLED.search(self.text)
        return found.group(1) if found else None

    @property
    def hbm_bytes(self) -> int:
        return sum(array.hbm_bytes for array in self.results)


@dataclass(frozen=True)
class Move:
    """Bytes that an instruction moves in one run of the program, all its executions together."""

    instruction: Instruction
    num_bytes: int


class Program:
    """A compiled program's HLO text (`compiled.as_text()`), parsed."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if (header := _COMPUTATION.match(line)) is not None:
                current = self.computations.setdefault(header.group(2), {})
                self.entry = header.group(2) if header.group(1) else self.entry
            elif (start := _INSTRUCTION.match(line)) is not None:
                instruction = _parse(start.group(2), line[start.end() :], start.group(1) is not None)
                current[instruction.name] = instruction
        if not self.entry:
            raise ValueError("the text has no entry computation; is it compiled HLO?")

    @property
    def instructions(self) -> Iterator[Instruction]:
        """All instructions, fused ones included."""
        return (instruction for computation in self.computations.values() for instruction in computation.values())

    def moves(self, *, takes_branches: bool = False, loop_trips: int = 1) -> list[Move]:
        """The instructions that move bytes in one run of the program.

        Loops without a known trip count run `loop_trips` times. A conditional runs its first branch (the false one of
        `lax.cond`) or, with `takes_branches`, the branch that moves the most bytes. Raises ValueError for a Pallas call
        without a cost estimate.
        """
        return list(self._moves(self.entry, takes_branches, loop_trips))

    def host_bytes(self, loop_trips: int = 1) -> int:
        """Bytes that one run of the program copies from the host's memory to the device. Loops as in `moves`."""
        return sum(times * copied_from_host(one) for one, times in self.executed(loop_trips))

    def executed(self, loop_trips: int = 1) -> Iterator[tuple[Instruction, int]]:
        """(instruction, number of executions) in one run of the program, inside fusions and asynchronous calls too.

        Branches and unknown trip counts are treated as in `moves`.
        """
        yield from self._executed(self.entry, 1, loop_trips)

    def _executed(self, name: str, times: int, loop_trips: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations.get(name, {}).values():
            if instruction.opcode == "while":
                trips = int(found.group(1)) if (found := _TRIPS.search(instruction.text)) else loop_trips
                yield from self._executed(instruction.called or "", times * trips, loop_trips)
            elif instruction.opcode == "conditional":
                yield from self._executed(self._branches(instruction)[0], times, loop_trips)
            else:
                yield instruction, times
                if instruction.opcode in (*_CALLS, "fusion"):
                    yield from self._executed(instruction.called or "", times, loop_trips)

    def _moves(self, name: str, takes_branches: bool, loop_trips: int) -> Iterator[Move]:
        computation = self.computations[name]
        for instruction in computation.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = int(found.group(1)) if (found := _TRIPS.search(instruction.text)) else loop_trips
                for move in self._moves(instruction.called or "", takes_branches, loop_trips):
                    yield Move(move.instruction, move.num_bytes * trips)
            elif opcode == "conditional":
                yield from self._branch(instruction, takes_branches, loop_trips)
            elif opcode in _CALLS and instruction.called is not None:
                yield from self._moves(instruction.called or "", takes_branches, loop_trips)
            elif num_bytes := self._num_bytes(instruction, computation):
                yield Move(instruction, num_bytes)

    def _branches(self, instruction: Instruction) -> list[str]:
        """Names of a conditional's computations, the false branch first."""
        if (found := _BRANCHES.search(instruction.text)) is not None:
            return _NAME.findall(found.group(1))
        # A boolean conditional names its true branch first.
        return re.findall(r"(?:false|true)_computation=%([\w.\-]+)", instruction.text)[::-1]

    def _branch(self, instruction: Instruction, takes_branches: bool, loop_trips: int) -> list[Move]:
        branches = [list(self._moves(name, takes_branches, loop_trips)) for name in self._branches(instruction)]
        return max(branches, key=lambda moves: sum(m.num_bytes for m in moves)) if takes_branches else branches[0]

    def _num_bytes(self, instruction: Instruction, computation: dict[str, Instruction]) -> int:
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(_LATER):
            return 0
        if opcode == "copy-start":  # (destination, source, context)
            return sum(array.hbm_bytes for array in instruction.results[:2])
        if opcode == "slice-start":  # ((source), destination, context)
            source, destination = instruction.results[:2]
            return destination.num_bytes * (source.in_hbm + destination.in_hbm)
        sources = [_of(computation, name) for name in instruction.operands]
        if opcode == "custom-call":
            return _custom_call_bytes(instruction, sources)
        if opcode == "fusion":
            return self._fusion_bytes(instruction, sources)
        if opcode in _SLICES:
            read = instruction.results[0].num_bytes if any(a.in_hbm for a in sources[0]) else 0
            return read + instruction.hbm_bytes
        if opcode in _UPDATES:
            update = sum(a.num_bytes for a in sources[_UPDATES[opcode]])
            return 2 * update if instruction.hbm_bytes else 0
        read = sum(array.hbm_bytes for arrays in sources for array in arrays)
        return read + instruction.hbm_bytes

    def _fusion_bytes(self, instruction: Instruction, sources: list[tuple[HloArray, ...]]) -> int:
        body = self.computations[instruction.called or ""]
        written = instruction.hbm_bytes
        updated = self._updated(body)
        if updated is not None and written:
            written = updated[1]
        read = 0
        for index, arrays in enumerate(sources):
            if any(array.in_hbm for array in arrays) and not (updated and updated[0] == index):
                read += self._read(body, index, sum(array.num_bytes for array in arrays))
        return read + written

    def _updated(self, body: dict[str, Instruction]) -> tuple[int, int] | None:
        """The index of the parameter that a fusion updates in place and the bytes of the update, or None."""
        root = next(instruction for instruction in body.values() if instruction.is_root)
        while root.opcode in _VIEWS and root.operands[0] in body:
            root = body[root.operands[0]]
        if root.opcode == "fusion":
            inner = self._updated(self.computations[root.called or ""])
            if inner is None:
                return None
            source, size = root.operands[inner[0]], inner[1]
        elif root.opcode in _UPDATES:
            source = root.operands[0]
            size = sum(a.num_bytes for a in _of(body, root.operands[_UPDATES[root.opcode]]))
        else:
            return None
        while body[source].opcode in _VIEWS:
            source = body[source].operands[0]
        return (_parameter(body[source]), size) if body[source].opcode == "parameter" else None

    def _read(self, body: dict[str, Instruction], index: int, size: int) -> int:
        """Bytes that a fused computation reads of parameter `index`, which has `size` bytes: all, or only slices."""
        name = next(i.name for i in body.values() if i.opcode == "parameter" and _parameter(i) == index)
        return min(size, self._read_of(body, name, size))

    def _read_of(self, body: dict[str, Instruction], name: str, size: int) -> int:
        if body[name].is_root:
            return size
        total = 0
        for user in body.values():
            if user.opcode in ("parameter", "constant") or name not in user.operands:
                continue
            if user.opcode in _SLICES and user.operands[0] == name:
                total += user.results[0].num_bytes
            elif user.opcode in _VIEWS or (user.opcode == "fusion" and self._is_view(user)):
                total += self._read_of(body, user.name, size)
            elif user.opcode == "fusion":
                total += self._read(self.computations[user.called or ""], user.operands.index(name), size)
            else:
                return size
        return total

    def _is_view(self, fusion: Instruction) -> bool:
        """Whether a fusion is a bitcast or reshape of its only operand."""
        return all(i.opcode in ("parameter", *_VIEWS) for i in self.computations[fusion.called or ""].values())


def copied_from_host(instruction: Instruction) -> int:
    """Bytes of the copy from the host's memory that an asynchronous instruction starts; 0 for any other."""
    if not instruction.opcode.endswith("-start") or not any(array.on_host for array in instruction.results):
        return 0
    return max(array.num_bytes for array in instruction.results if not array.on_host)


def _parse(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    operands = rest[start + 1 : (stop := _closing(rest, start))]
    arrays = tuple(
        HloArray(
            dtype,
            tuple(int(n) for n in shape.split(",") if n),
            not re.search(r"S\([1-9]", layout or ""),
            HOST_SPACE in layout,
        )
        for dtype, shape, layout in _ARRAY.findall(kind)
    )
    is_constant = rest.startswith(("parameter", "constant"))
    names = (operands,) if is_constant else tuple(_NAME.findall(operands))
    return Instruction(name, rest[:start], arrays, names, rest[stop + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _of(computation: dict[str, Instruction], name: str) -> tuple[HloArray, ...]:
    return computation[name].results


def _parameter(instruction: Instruction) -> int:
    return int(instruction.operands[0])


def _custom_call_bytes(instruction: Instruction, sources: list[tuple[HloArray, ...]]) -> int:
    if 'custom_call_target="tpu_custom_call"' not in instruction.text:
        return 0  # allocations and concatenations of adjacent buffers by the compiler
    found = _COST.search(instruction.text)
    if found is None and instruction.name.startswith(_RAGGED):
        return instruction.hbm_bytes + sum(array.hbm_bytes for arrays in sources for array in arrays)
    if found is None:
        raise ValueError(f"{instruction.name} has no cost estimate: its bytes are unknown")
    return int(found.group(1))
