"""The process that runs pieces, one after another, until one fails or needs another process.

An error on a chip leaves the process's context unusable: after any exception the process is left, and the next piece
runs in a fresh one.
"""

import importlib.util
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.on_chip import child, planted
from benchmarks.on_chip.pieces import Piece, pieces
from benchmarks.on_chip.results import DONE, FAILED, CardResults, Results, this_machine
from benchmarks.on_chip.settings import ALL_DONE, ANOTHER_PROCESS, NO_TIME, Settings
from benchmarks.on_chip.sizes import Sizes, sizes_for

START_SECONDS = 180.0  # after which a process that has not begun its piece counts as hung
KEEPING_NEEDS = ("llvmlite", "flatbuffers")  # packages that the engine needs to keep traced programs


def main(settings: Settings, until: float, environment: dict[str, str]) -> int:
    """Runs pieces that have no result yet; `until` is in seconds of `time.time()`. Returns an exit status."""
    child.end_with_parent()
    if settings.is_tiny:  # kernels for CPUs are not what is tried, and take longest to compile
        sys.modules |= dict.fromkeys(("numba", "llvmlite"))
    from jaxinfer import compilation_cache
    from jaxinfer.engine import kept_programs
    from jaxinfer.measure.bench import rates as bench_rates

    kept_programs.is_on = all(map(importlib.util.find_spec, KEEPING_NEEDS))
    compilation_cache.enable()
    if settings.is_tiny:
        compilation_cache.keep_all()  # few programs of tiny sizes take long enough to be kept otherwise
        bench_rates.MIN_SECONDS = 0.02
    machine = this_machine()
    sizes = sizes_for(machine["platform"], is_tiny=settings.is_tiny)
    chosen = choose(pieces(sizes, settings.out, settings.plant), settings.only)
    results = Results.read(settings.file)
    card = results.of(machine, is_tiny=settings.is_tiny)
    if settings.again:
        card.pieces = {name: piece for name, piece in card.pieces.items() if piece["status"] == DONE}
    return Worker(sizes, results, card, settings.file, until, environment).run(chosen)


def choose(every: Sequence[Piece], only: Sequence[str]) -> list[Piece]:
    """The pieces with one of these texts in their names. Raises ValueError for a text that is in none."""
    if unknown := [text for text in only if not any(text in piece.name for piece in every)]:
        names = ", ".join(piece.name for piece in every)
        raise ValueError(f"--only {unknown[0]!r} is in no piece's name; they are {names}")
    return [piece for piece in every if not only or any(text in piece.name for text in only)]


@dataclass
class Worker:
    """Runs pieces on one card in one process, which has the variables `environment`."""

    sizes: Sizes
    results: Results
    card: CardResults
    file: Path
    until: float
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, chosen: Sequence[Piece]) -> int:
        """Runs those without a result, while there is time; returns an exit status."""
        status, process, is_usable = ALL_DONE, None, True
        for piece in chosen:
            if self.card.is_ended(piece.name):
                continue
            if time.time() + piece.seconds / 2 > self.until:
                status = NO_TIME
                continue
            if not is_usable or piece.environment != self.environment or process not in (None, piece.process):
                self.results.environment = dict(piece.environment)
                self.card.begin(piece.name, START_SECONDS)  # whose fault it is if the other process does not start
                self.results.save(self.file)
                return ANOTHER_PROCESS
            process = piece.process
            is_usable = self._run_piece(piece)
        return status

    def _run_piece(self, piece: Piece) -> bool:
        """True if the piece ended well; else this process may be unusable."""
        self.card.begin(piece.name, piece.limit)
        self.results.save(self.file)
        error = ""
        try:
            planted.raise_if_poisoned()
            for row in piece.run(self.sizes, self.card):
                self.card.found.append(vars(row))
                self.results.save(self.file)
            free()
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        self.card.end(FAILED if error else DONE, error, clocks())
        self.results.save(self.file)
        return not error


def free() -> None:
    """Frees what a piece left on the device. Raises if the device no longer answers: a piece may catch an error."""
    import gc

    import jax
    import jax.numpy as jnp

    gc.collect()
    jax.clear_caches()
    jax.block_until_ready(jnp.arange(8.0) + 1)


def clocks() -> str:
    """Clocks, power and temperature of the GPU as nvidia-smi reads them; "" without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.partition("\n")[0].strip()
