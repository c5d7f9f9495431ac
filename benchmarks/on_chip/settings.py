"""Settings of a run, and how its processes tell each other how they ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.on_chip.results import FILE

# Exit statuses.
ALL_DONE, REFUSED, NO_TIME, ANOTHER_PROCESS = 0, 2, 3, 6


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
      out: the folder of all that the run writes. only: texts, one of which is in the names of the pieces to run.
      plant: names of failures in `planted`. again: run pieces again that did not end well.
    """

    out: Path
    is_tiny: bool = False
    only: Sequence[str] = ()
    plant: Sequence[str] = ()
    again: bool = False

    @property
    def file(self) -> Path:
        return self.out / FILE
