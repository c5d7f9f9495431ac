"""Progress of long reads and writes: a bar on a terminal, or a callback."""

import os
from collections.abc import Callable

# Called with the name of what was just done, the bytes done so far, and the bytes in all.
ProgressCallback = Callable[[str, int, int], None]


class Progress:
    """Counts bytes. `report` is True for a bar, which only a terminal shows, a callback, or None for silence.

    JAXINFER_PROGRESS=0 in the environment turns bars off.
    """

    def __init__(self, report: bool | ProgressCallback | None, total: int, description: str):
        self._callback = report if callable(report) else None
        self._done, self._total = 0, total
        self._bar = None
        if report is True and os.environ.get("JAXINFER_PROGRESS") != "0":
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=description, unit="B", unit_scale=True, disable=None)

    def advance(self, name: str, num_bytes: int) -> None:
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        if self._callback is not None:
            self._callback(name, self._done, self._total)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
