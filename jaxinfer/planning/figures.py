"""What is read off a compiled program: memory, FLOPs, bytes moved, bytes between devices; and sums of several."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pallas_kernels.ahead_of_time import Compilation
from pallas_kernels.hbm_traffic import Instruction, Program

# What a device sends of each byte of an operation's result over p devices (ring algorithms; Chan et al. 2007).
_SENT = {
    "all-reduce": lambda p: 2 * (p - 1) / p,
    "all-gather": lambda p: (p - 1) / p,
    "reduce-scatter": lambda p: p - 1,
    "all-to-all": lambda p: (p - 1) / p,
    "collective-permute": lambda p: 1,
}
_KERNEL = re.compile(r"paged_attention_\d+_queries")


@dataclass(frozen=True)
class Figures:
    """One program on one device.

    Attributes:
      argument_bytes, output_bytes, aliased_bytes, temporary_bytes, code_bytes: of the compiler's memory analysis.
      flops: as the compiler counts them, of one run in which loops run once; None where it does not.
      moved_bytes: between HBM and the chip in such a run, attention left out; kernel_bytes: what attention's kernels
        move if every sequence is as long as its page table. None where only the TPU's programs tell.
      num_collectives, sent_bytes: operations between devices, and what a device sends in them.
      resident_bytes: see `programs.Planned`. seconds: what compiling took.
    """

    argument_bytes: float
    output_bytes: float
    aliased_bytes: float
    temporary_bytes: float
    code_bytes: float
    flops: float | None
    moved_bytes: float | None
    kernel_bytes: float | None
    num_collectives: float
    sent_bytes: float
    resident_bytes: float = 0.0
    seconds: float = 0.0

    @property
    def total_bytes(self) -> float:
        """What a device holds while the program runs."""
        held = self.argument_bytes + self.resident_bytes + self.output_bytes - self.aliased_bytes
        return held + self.temporary_bytes + self.code_bytes

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "total_bytes": self.total_bytes}


def figures_of(found: Compilation, num_devices: int, *, is_tpu: bool, loop_trips: int = 1) -> Figures:
    """Reads a compiled program of so many devices."""
    program = Program(found.program.as_text()) if is_tpu or num_devices > 1 else None
    moved = kernels = None
    if program is not None and is_tpu:
        moves = program.moves(loop_trips=loop_trips)
        attention = [move for move in moves if is_attention(move.instruction)]
        every = sum(move.num_bytes for move in attention)
        moved = sum(move.num_bytes for move in moves) - every
        # A step has a kernel for short queries and one for long ones; a sequence's pages are read by one of them.
        kinds = {name for move in attention for name in _KERNEL.findall(move.instruction.text)[:1]}
        kernels = every / max(len(kinds), 1)
    exchanged = list(_exchanges(program, num_devices)) if program is not None and num_devices > 1 else []
    return Figures(
        argument_bytes=found.argument_bytes,
        output_bytes=found.output_bytes,
        aliased_bytes=found.aliased_bytes,
        temporary_bytes=found.temporary_bytes,
        code_bytes=found.code_bytes,
        flops=found.cost.get("flops"),
        moved_bytes=moved,
        kernel_bytes=kernels,
        num_collectives=len(exchanged),
        sent_bytes=sum(exchanged),
        seconds=found.seconds,
    )


def is_attention(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "paged_attention" in instruction.text


def _exchanges(program: Program, num_devices: int):
    """Bytes that a device sends, for each operation between devices in a run."""
    for instruction, times in program.executed():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode not in _SENT:
            continue
        # Of an asynchronous gather the operand comes first among the results.
        arrays = instruction.results[1:] if instruction.opcode == "all-gather-start" else instruction.results
        size = sum(array.num_bytes for array in arrays[: max(1, len(instruction.operands))])
        for _ in range(times):
            yield size * _SENT[opcode](num_devices)


def combined(base: Figures, more: Sequence[tuple[Figures, float]]) -> Figures:
    """base + sum of factor * (larger - base): what the compiled small programs say of the whole one.

    Seconds are those that were really spent. A figure that one of them lacks stays None.
    """
    values: dict[str, float | None] = {}
    for field in fields(base):
        first = getattr(base, field.name)
        others = [(getattr(larger, field.name), factor) for larger, factor in more]
        if first is None or any(value is None for value, _ in others):
            values[field.name] = None
        else:
            values[field.name] = first + sum(factor * (value - first) for value, factor in others)
    seconds = base.seconds + sum(larger.seconds for larger, _ in more)
    every = [base, *(larger for larger, _ in more)]
    # A smaller program may need more scratch memory than a larger one: never less than what was seen.
    temporaries = max([values["temporary_bytes"] or 0.0, *(one.temporary_bytes for one in every)])
    # Code does not grow with the layers: beyond some size the compiler calls what it else repeats (decoding with
    # Llama-3-8B for v6e: 9, 13, 27 and 10 MB with 2, 4, 12 and 32 layers).
    code = max(one.code_bytes for one in every)
    values |= {"temporary_bytes": temporaries, "code_bytes": code}
    return replace(base, **{**values, "seconds": seconds})  # type: ignore[arg-type]
