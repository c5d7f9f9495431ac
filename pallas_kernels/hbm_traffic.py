"""Bytes that a compiled program moves between HBM and the chip, from its scheduled HLO.

XLA's own "bytes accessed" counts every branch of every conditional, an embedding table for a gather of a few of its
rows, and an array twice when it is copied into vector memory (VMEM) before use; of a GPU's program it says nothing.
Here an instruction counts the bytes that it reads from and writes to HBM; arrays in VMEM are free. A fusion reads each
element once that its results need: of an array that it only slices the slices, of one that it updates in place nothing.
A kernel counts what its estimate says. `through_cache` leaves out reads that a GPU's L2 cache serves.

Its model of the cache: an array stays there until as many bytes as the cache holds have been touched since. A kernel
touches its arrays evenly while it runs, so of what else it moves, half lies between an array that it makes and its end,
half between its start and an array that it reads. What a kernel writes counts always: the cache writes it back when it
needs the room, since nothing says that an array of temporaries is no longer needed. The L2 cache of an H100 is two
halves, and what multiprocessors of both read is in both: `CACHE_SHARE` of it counts. The replacement is taken to be
that of the least recently used, which is not documented.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COST = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
# An attribute of a GPU's kernel, whose text has no cost estimate (`mosaic_gpu_compat`).
ESTIMATE = "bytes_accessed"
_GPU_ESTIMATE = re.compile(rf'frontend_attributes=\{{[^}}]*{ESTIMATE}="(\d+)"')
# Kernels for GPUs: Pallas's, Triton's and those of NVIDIA's libraries, which have their workspace as last result.
_GPU_CALL = re.compile(r'custom_call_target="(mosaic_gpu|triton|__gpu\$|__cu)')
_LIBRARY_CALL = "__cu"
_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\)\s*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r"\bindex=(\d+)")
CACHE_SHARE = 0.5
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
# Operations whose result may need all of an operand although both have as many elements.
_MIXING = {"dot", "convolution", "reduce", "reduce-window", "sort", "scatter", "custom-call", "tuple"}
_JOINING = ("concatenate", "pad")
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
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return self.num_elements * (_BITS[self.dtype] if bits is None else int(bits.group())) // 8

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
        match = _CALLED.search(self.text)
        return match.group(1) if match else None

    @property
    def num_elements(self) -> int:
        return sum(array.num_elements for array in self.results)

    @property
    def hbm_bytes(self) -> int:
        return sum(array.hbm_bytes for array in self.results)


@dataclass(frozen=True)
class Access:
    """Bytes that one execution of an instruction reads or writes of an array of `array_bytes`. `array` is the name of
    the instruction that makes it, with "#" and a number for one of several results; "" where it is not known."""

    array: str
    num_bytes: int
    array_bytes: int


@dataclass(frozen=True)
class Move:
    """Bytes that an instruction moves in one run of the program, all its executions together: `times` times what it
    `reads` and writes."""

    instruction: Instruction
    num_bytes: int
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    times: int = 1


@dataclass(frozen=True)
class _Options:
    """Options of `Program.moves`."""

    takes_branches: bool
    loop_trips: int


class HloProgram:
    """A compiled program's HLO text (`compiled.as_text()`), parsed."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self._needs: dict[tuple[str, int], dict[str, int]] = {}
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
        """The instructions that move bytes in one run of the program, in the order in which they start.

        Loops without a known trip count run `loop_trips` times. A conditional runs its first branch (the false one of
        `lax.cond`) or, with `takes_branches`, the branch that moves the most bytes. Raises ValueError for a Pallas call
        for a TPU without a cost estimate. A GPU's kernel without one reads all of each operand and writes all of each
        result.
        """
        return list(self._moves(self.entry, _Options(takes_branches, loop_trips)))

    def host_bytes(self, loop_trips: int = 1) -> int:
        """Bytes that one run of the program copies from the host's memory to the device. Loops as in `moves`."""
        return sum(times * copied_from_host(instruction) for instruction, times in self.executed(loop_trips))

    def executed(self, loop_trips: int = 1) -> Iterator[tuple[Instruction, int]]:
        """(instruction, number of executions) in one run of the program, inside fusions and asynchronous calls too.

        Branches and unknown trip counts are treated as in `moves`.
        """
        yield from self._executed(self.entry, 1, loop_trips)

    def _executed(self, name: str, times: int, loop_trips: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations.get(name, {}).values():
            if instruction.opcode == "while":
                trips = int(match.group(1)) if (match := _TRIPS.search(instruction.text)) else loop_trips
                yield from self._executed(instruction.called or "", times * trips, loop_trips)
            elif instruction.opcode == "conditional":
                yield from self._executed(self._branches(instruction)[0], times, loop_trips)
            else:
                yield instruction, times
                if instruction.opcode in (*_CALLS, "fusion"):
                    yield from self._executed(instruction.called or "", times, loop_trips)

    def _moves(self, name: str, options: _Options) -> Iterator[Move]:
        computation = self.computations[name]
        for instruction in computation.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = int(match.group(1)) if (match := _TRIPS.search(instruction.text)) else options.loop_trips
                for move in self._moves(instruction.called or "", options):
                    yield replace(move, num_bytes=move.num_bytes * trips, times=move.times * trips)
            elif opcode == "conditional":
                yield from self._branch(instruction, options)
            elif opcode in _CALLS and instruction.called is not None:
                yield from self._moves(instruction.called or "", options)
            else:
                kernel, body = self._kernel_of(instruction), computation
                if kernel is not None:  # with the slices that it takes or writes, which it moves itself
                    instruction, body = kernel, self.computations[instruction.called or ""]
                reads, writes = self._accesses(instruction, body)
                if num_bytes := sum(access.num_bytes for access in (*reads, *writes)):
                    yield Move(instruction, num_bytes, reads, writes)

    def _kernel_of(self, fusion: Instruction) -> Instruction | None:
        """The GPU's kernel with an estimate that a fusion calls, or None."""
        if fusion.opcode != "fusion":
            return None
        body = self.computations[fusion.called or ""].values()
        return next((call for call in body if call.opcode == "custom-call" and _GPU_ESTIMATE.search(call.text)), None)

    def _branches(self, instruction: Instruction) -> list[str]:
        """Names of a conditional's computations, the false branch first."""
        if (match := _BRANCHES.search(instruction.text)) is not None:
            return _NAME.findall(match.group(1))
        # A boolean conditional names its true branch first.
        return re.findall(r"(?:false|true)_computation=%([\w.\-]+)", instruction.text)[::-1]

    def _branch(self, instruction: Instruction, options: _Options) -> list[Move]:
        branches = [list(self._moves(name, options)) for name in self._branches(instruction)]
        if not options.takes_branches:
            return branches[0]
        return max(branches, key=lambda moves: sum(m.num_bytes for m in moves))

    def _accesses(
        self, instruction: Instruction, computation: dict[str, Instruction]
    ) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """Accesses of one execution to HBM: those that read, and those that write."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(_LATER):
            return (), ()
        sources = [_of(computation, name) for name in instruction.operands]
        reads = [sum(array.hbm_bytes for array in arrays) for arrays in sources]
        written = _written(instruction)
        if opcode == "copy-start":  # (destination, source, context)
            reads, written = [instruction.results[1].hbm_bytes], written[:1]
        elif opcode == "slice-start":  # ((source), destination, context)
            source, destination = instruction.results[:2]
            reads = [destination.num_bytes * source.in_hbm]
            written = [Access(instruction.name, destination.hbm_bytes, destination.num_bytes)]
        elif opcode == "custom-call" and _GPU_CALL.search(instruction.text):
            written = written[:-1] if _has_workspace(instruction) else written
            if (match := _GPU_ESTIMATE.search(instruction.text)) is not None:
                in_place = aliased_results(instruction)  # of which the estimate has what is written
                written = [access for index, access in enumerate(written) if index not in in_place]
                rest = max(int(match.group(1)) - sum(access.num_bytes for access in written), 0)
                return (Access("", rest, rest),) * (rest > 0), tuple(written)
        elif opcode == "custom-call":
            moved = _custom_call_bytes(instruction, sources)
            return (Access("", moved, moved),) * (moved > 0), ()
        elif opcode == "fusion":
            body = self.computations[instruction.called or ""]
            reads = [self._read(instruction, index, arrays) for index, arrays in enumerate(sources)]
            written = _updated_parts(written, [update and update[1] for update in self.updates(body)])
        elif opcode in _SLICES:
            reads = [instruction.results[0].num_bytes * any(a.in_hbm for a in sources[0])]
        elif opcode in _UPDATES:
            update = sum(a.num_bytes for a in sources[_UPDATES[opcode]]) * (instruction.hbm_bytes > 0)
            return (Access("", update, update),), (Access(instruction.name, update, instruction.hbm_bytes),)
        whole: dict[str, Access] = {}  # an array that is an operand twice is read once
        for name, read, arrays in zip(instruction.operands, reads, sources, strict=False):
            if read:
                maker, size = _maker(computation, name), sum(array.num_bytes for array in arrays)
                before = whole[maker].num_bytes if maker in whole else 0
                whole[maker] = Access(maker, min(before + read, size), size)
        return tuple(whole.values()), tuple(access for access in written if access.num_bytes)

    def _read(self, fusion: Instruction, index: int, arrays: tuple[HloArray, ...]) -> int:
        """Bytes that a fusion reads of an operand."""
        if not any(array.in_hbm for array in arrays):
            return 0
        needed = self._needed_of_operand(fusion, index, fusion.num_elements)
        size, count = sum(array.num_bytes for array in arrays), sum(array.num_elements for array in arrays)
        return size if needed >= count else -(-size * needed // count)

    def updates(self, body: dict[str, Instruction]) -> list[tuple[str, int] | None]:
        """For each result of a fused computation: the name of the parameter that it updates in place and the bytes of
        the update, or None."""
        root = next(instruction for instruction in body.values() if instruction.is_root)
        return [self._update(body, body[name]) for name in (root.operands if root.opcode == "tuple" else (root.name,))]

    def _update(self, body: dict[str, Instruction], result: Instruction) -> tuple[str, int] | None:
        result = _seen_through(body, result)
        if result.opcode == "fusion":
            inner = self.computations[result.called or ""]
            updates = self.updates(inner)
            if len(updates) > 1 or updates[0] is None:
                return None
            source, size = result.operands[_parameter(inner[updates[0][0]])], updates[0][1]
        elif result.opcode in _UPDATES:
            source = result.operands[0]
            size = sum(a.num_bytes for a in _of(body, result.operands[_UPDATES[result.opcode]]))
        else:
            return None
        made = _seen_through(body, body[source])
        return (made.name, size) if made.opcode == "parameter" else None

    def _needed_of_operand(self, fusion: Instruction, index: int, of_result: int) -> int:
        """Elements that a fusion needs of an operand for so many of its results."""
        name = fusion.called or ""
        parameter = next(i.name for i in self.computations[name].values() if _is_parameter(i, index))
        return self._needed(name, of_result)[parameter]

    def _needed(self, name: str, of_result: int) -> dict[str, int]:
        """Elements of each instruction of a fused computation that are needed for so many of its results; none of an
        array for the sake of its update in place."""
        if (known := self._needs.get((name, of_result))) is not None:
            return known
        body = self.computations[name]
        in_place = {update[0] for update in self.updates(body) if update is not None}
        needed = dict.fromkeys(body, 0)
        for user in reversed(body.values()):  # users come after what they use
            if user.is_root:
                needed[user.name] = of_result
            if user.opcode in ("parameter", "constant"):
                continue
            for index, operand in enumerate(user.operands):
                is_updated = user.opcode in _UPDATES and index == 0
                if is_updated and _seen_through(body, body[operand]).name in in_place:
                    continue
                count = body[operand].num_elements
                needed[operand] = min(needed[operand] + self._needed_by(user, index, count, needed[user.name]), count)
        self._needs[name, of_result] = needed
        return needed

    def _needed_by(self, user: Instruction, index: int, count: int, needed: int) -> int:
        """Elements of operand `index`, which has `count`, for `needed` elements of an instruction's result."""
        if user.opcode in (*_SLICES, *_UPDATES):
            return needed if index == 0 else count
        if user.opcode == "fusion":
            return self._needed_of_operand(user, index, needed)
        is_alike = user.opcode in _JOINING or (user.num_elements == count and user.opcode not in _MIXING)
        return needed if is_alike else count


def through_cache(moves: Iterable[Move], l2_bytes: float, share: float = CACHE_SHARE) -> list[Move]:
    """`moves`, of `Program.moves`, without the reads that a share of a cache of `l2_bytes` bytes serves; all of them
    where that is 0. A loop's iterations count alike, and the first finds nothing in the cache that it leaves there."""
    held, touched, remaining = share * l2_bytes, 0.0, []
    last_use: dict[str, float] = {}
    for move in moves:
        own = move.num_bytes / move.times
        saved = 0
        for access in move.reads:
            since = touched + (own - access.num_bytes) / 2 - last_use.get(access.array, -math.inf)
            saved += access.num_bytes * (since + access.array_bytes <= held)
        touched += own
        for access in (*move.reads, *move.writes):
            if access.array and access.num_bytes >= access.array_bytes:  # of a part it is not known which
                last_use[access.array] = touched - (own - access.num_bytes) / 2
        remaining.append(replace(move, num_bytes=move.num_bytes - saved * move.times))
    return remaining


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
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _of(computation: dict[str, Instruction], name: str) -> tuple[HloArray, ...]:
    return computation[name].results


def _written(instruction: Instruction) -> list[Access]:
    """The results, all of which are written."""
    many = len(instruction.results) > 1
    names = (f"{instruction.name}#{index}" if many else instruction.name for index in range(len(instruction.results)))
    return [
        Access(name, array.hbm_bytes, array.num_bytes) for name, array in zip(names, instruction.results, strict=True)
    ]


def _maker(computation: dict[str, Instruction], name: str) -> str:
    """The name in `Access` of an operand's array: views and tuples are followed to what makes it."""
    maker = computation[name]
    while maker.opcode in (*_VIEWS, "optimization-barrier", "get-tuple-element"):
        source = computation[maker.operands[0]]
        if maker.opcode == "get-tuple-element":
            index = int(_INDEX.search(maker.text).group(1))  # pyright: ignore[reportOptionalMemberAccess]
            while source.opcode == "optimization-barrier":
                source = computation[source.operands[0]]
            if source.opcode != "tuple":
                return f"{source.name}#{index}"
            source = computation[source.operands[index]]
        maker = source
    return maker.name


def _parameter(instruction: Instruction) -> int:
    return int(instruction.operands[0])


def _is_parameter(instruction: Instruction, index: int) -> bool:
    return instruction.opcode == "parameter" and _parameter(instruction) == index


def _seen_through(body: dict[str, Instruction], instruction: Instruction) -> Instruction:
    """The instruction whose elements views have as they lie."""
    while instruction.opcode in _VIEWS and instruction.operands[0] in body:
        instruction = body[instruction.operands[0]]
    return instruction


def _updated_parts(written: list[Access], sizes: list[int | None]) -> list[Access]:
    """The accesses that write a fusion's results, of those that it updates in place only the update."""
    if len(written) != len(sizes):  # a result of several arrays
        return written
    return [
        access if size is None or not access.num_bytes else replace(access, num_bytes=min(size, access.num_bytes))
        for access, size in zip(written, sizes, strict=True)
    ]


def aliased_results(instruction: Instruction) -> set[int]:
    """Indices of the results of a custom call that are operands, updated in place."""
    match = _ALIASING.search(instruction.text)
    return {int(index or 0) for index in re.findall(r"\{(\d*)\}: \(", match.group(1))} if match else set()


def _has_workspace(instruction: Instruction) -> bool:
    """True for a library's call with an array of bytes for its own use as last result."""
    last = instruction.results[-1]
    is_library = f'custom_call_target="{_LIBRARY_CALL}' in instruction.text
    return is_library and len(instruction.results) > 1 and last.dtype in ("s8", "u8") and len(last.shape) == 1


def _custom_call_bytes(instruction: Instruction, sources: list[tuple[HloArray, ...]]) -> int:
    if 'custom_call_target="tpu_custom_call"' not in instruction.text:
        return 0  # allocations and concatenations of adjacent buffers by the compiler
    match = _COST.search(instruction.text)
    if match is None and instruction.name.startswith(_RAGGED):
        return instruction.hbm_bytes + sum(array.hbm_bytes for arrays in sources for array in arrays)
    if match is None:
        raise ValueError(f"{instruction.name} has no cost estimate: its bytes are unknown")
    estimate = int(match.group(1))
    arrays = [*instruction.results, *(array for source in sources for array in source)]
    # An estimate of all arrays in full says nothing of those that the compiler has placed in vector memory.
    if estimate >= sum(array.num_bytes for array in arrays):
        estimate -= sum(array.num_bytes - array.hbm_bytes for array in arrays)
    return estimate
