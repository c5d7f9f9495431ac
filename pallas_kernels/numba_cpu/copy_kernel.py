"""The kernel of `calls.materialized`."""

from pallas_kernels.numba_cpu.frames import answers_metadata, compiled, operand, operand_size, result
from pallas_kernels.numba_cpu.memory import get, put


@compiled
def copy_handler(frame):
    if not answers_metadata(frame):
        source, target = operand(frame, 0), result(frame, 0)
        for index in range(operand_size(frame, 0, 0)):
            put(target, index, get(source, index))
    return 0
