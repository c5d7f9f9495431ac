"""Arrays that a compiled program makes in HBM, where `pallas_kernels.hbm_traffic` counts only bytes that move."""

from pallas_kernels.hbm_traffic import (
    _CALLS,
    _FREE,
    _LATER,
    _UPDATES,
    HloArray,
    HloProgram,
    Instruction,
    aliased_results,
)


def made_in_hbm(program: HloProgram, at_least: int) -> list[Instruction]:
    """Instructions, in any branch, with a result of `at_least` bytes in HBM that is not one of their operands."""
    fused = {instruction.called for instruction in program.instructions if instruction.opcode == "fusion"}
    return [
        instruction
        for name, computation in program.computations.items()
        if name not in fused
        for instruction in computation.values()
        if instruction.opcode not in _FREE | {"while", "conditional"}
        and any(array.hbm_bytes >= at_least for array in _made(program, instruction, computation))
    ]


def _made(program: HloProgram, instruction: Instruction, computation: dict[str, Instruction]) -> tuple[HloArray, ...]:
    """The results that do not update an operand in place."""
    if instruction.opcode in _CALLS or instruction.opcode.endswith(_LATER):
        return ()
    if instruction.opcode in ("copy-start", "slice-start"):
        return instruction.results[:1] if instruction.opcode == "copy-start" else instruction.results[1:2]
    aliased = aliased_results(instruction)
    is_update = instruction.opcode in _UPDATES
    if instruction.opcode == "fusion":
        is_update = any(program.updates(program.computations[instruction.called or ""]))
    if is_update:
        taken = {a for name in instruction.operands if name in computation for a in computation[name].results}
        return tuple(array for array in instruction.results if array not in taken)
    return tuple(array for index, array in enumerate(instruction.results) if index not in aliased)
