"""Reading parameters ahead of their transfer to devices: several at once, within one bound on host memory."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from checkpoints_convert.parts import Bounds
from checkpoints_convert.source import Group, ParamPath, Source
from jaxinfer.quantization import QuantizedArray

# Host buffers at a time that are being read, or whose transfer to a device may still be running; a group that needs
# more by itself is read alone. Enough to keep a disk of several GB/s busy.
IN_FLIGHT_BYTES = 256 * 2**20
# Groups read at once, so that many small tensors do not wait for one another; large ones are read by more threads.
_NUM_GROUPS = 8

Found = list[np.ndarray] | QuantizedArray
Place = Callable[[ParamPath, Found], Any]


def read_ahead(
    source: Source, parts: Mapping[ParamPath, Sequence[Bounds]], place: Place, *, limit: int = IN_FLIGHT_BYTES
) -> Iterator[tuple[ParamPath, Any]]:
    """What `place` makes of every parameter, in the source's order, as they come. `place` runs on the caller's thread.

    Args:
      parts: of dense parameters, which parts are read; of those not named, all.
      place: is called again and again for a parameter whose parts are too large to be read at once, with those that
        come next, and gives None until it has had all.
      limit: bytes in flight.
    """
    tasks = deque(
        task for unit in source.units() for group in source.groups(unit) for task in _tasks(source, group, parts, limit)
    )
    pending: deque[tuple[int, Future]] = deque()
    transfers: deque[tuple[int, Any]] = deque()
    executor = ThreadPoolExecutor(_NUM_GROUPS, thread_name_prefix="checkpoint-group")
    try:
        while tasks or pending:
            while tasks:
                cost, group, wanted = tasks[0]
                held = cost + sum(size for size, _ in pending) + sum(size for size, _ in transfers)
                if held <= limit or not (pending or transfers):
                    pending.append((cost, executor.submit(_read, source, group, wanted)))
                    tasks.popleft()
                elif transfers:
                    jax.block_until_ready(transfers.popleft()[1])
                else:
                    break
            cost, future = pending.popleft()
            found = deque(future.result())
            del future
            while found:
                path, arrays = found.popleft()
                leaf = place(path, arrays)
                del arrays
                transfers.append((cost if not found else 0, leaf))
                if leaf is not None:
                    yield path, leaf
    finally:
        for _, future in pending:
            future.cancel()
        executor.shutdown()


def _tasks(
    source: Source, group: Group, parts: Mapping[ParamPath, Sequence[Bounds]], limit: int
) -> Iterator[tuple[int, Group, Mapping[ParamPath, Sequence[Bounds]]]]:
    """What is read at once, with the bytes that it takes."""
    wanted = {path: parts[path] for path in group if path in parts}
    runs = [wanted]
    if len(group) == 1 and wanted:
        runs = [{path: run} for path in group for run in source.split(path, wanted[path], limit)]
    for run in runs:
        yield source.host_bytes(group, run), group, run


def _read(source: Source, group: Group, parts: Mapping[ParamPath, Sequence[Bounds]]) -> list[tuple[ParamPath, Found]]:
    return list(source.read_group(group, parts))
