"""The process that runs pieces, one after another. It ends with the process that started it."""

import os
import threading
import time
import traceback
from pathlib import Path

from benchmarks.on_chip.results import DONE, FAILED, Results, this_machine
from benchmarks.on_chip.sizes import sizes_for


def main(file: Path, settings: dict, until: float) -> int:
    """Runs the pieces that have no result yet, as long as the time (`until`, in seconds of `time.time()`) allows.

    Returns 0 when all are done, 3 when time is short for the next one.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from jaxinfer import compilation_cache

    compilation_cache.enable()
    if settings["tiny"]:
        compilation_cache.keep_all()  # each piece begins without programs, and few of these take long enough to be kept
    machine = this_machine()
    sizes = sizes_for(machine["platform"], is_tiny=settings["tiny"])
    results = Results.open(file, machine, settings)

    from benchmarks.on_chip import models
    from benchmarks.on_chip.pieces import pieces

    only = settings["only"]
    every = pieces(sizes, file.parent)
    if unknown := [text for text in only if not any(text in piece.name for piece in every)]:
        raise ValueError(
            f"--only {unknown[0]!r} is in no piece's name; they are {', '.join(one.name for one in every)}"
        )
    for piece in every:
        if piece.name in results.pieces or (only and not any(part in piece.name for part in only)):
            continue
        if time.time() + piece.seconds / 2 > until and not settings["tiny"]:
            return 3
        results.begin(piece.name, file)
        begin = time.perf_counter()
        try:
            for row in piece.run(sizes, results):
                results.add(row, file)
        except Exception as error:  # whatever one piece raises is its result: the others run
            traceback.print_exc()
            results.end(file, FAILED, time.perf_counter() - begin, f"{type(error).__name__}: {error}")
        else:
            results.end(file, DONE, time.perf_counter() - begin)
        models.free()
    return 0


def _end_with_parent() -> None:
    """Ends this process when its standard input closes: a killed parent leaves no process on the chip."""
    while os.read(0, 1024):
        pass
    os._exit(4)
