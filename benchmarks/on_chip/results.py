"""The file of results: rows of each piece, written whole after every change, so that a run can end at any time."""

import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DONE, FAILED, CRASHED, TIMED_OUT = "done", "failed", "crashed", "timed out"


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
      value, unit: what was measured; None where the case cannot run here, for the reason in `note`.
      share: of what the chip can do (`of`), and goal: the least share that is wanted.
      is_right: of a comparison, whether it is within its tolerance.
    """

    case: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    of: str = ""
    goal: float | None = None
    is_right: bool | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """ "WRONG", "SHORT", "ok" or, where nothing is asked, ""."""
        if self.is_right is False:
            return "WRONG"
        if self.share is not None and self.goal is not None:
            return "ok" if self.share >= self.goal else "SHORT"
        return "ok" if self.is_right else ""


@dataclass
class Results:
    """Results by piece. `machine` and `settings` must be those of the run that is resumed.

    Attributes:
      pieces: by name: `status`, `seconds`, `rows`, and `error` where it did not end well.
      running: the piece that was begun last and has not ended; found: its rows so far.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: str | None = None
    found: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, file: Path, machine: dict[str, Any], settings: dict[str, Any]) -> "Results":
        """Reads a file of results, or begins one.

        Raises ValueError for a file of another machine or of other settings, and for one that is no file of results.
        """
        if not file.exists():
            return cls(machine, settings)
        found = cls.read(file)
        for name, ours in (("machine", machine), ("settings", settings)):
            theirs = getattr(found, name)
            if theirs != ours:
                changed = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
                pairs = ", ".join(f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in changed)
                raise ValueError(f"{file} cannot be resumed, its {name} differ: {pairs}. Name another file")
        return found

    @classmethod
    def read(cls, file: Path) -> "Results":
        """Raises ValueError for a file that is not one of results."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is not a file of results: {error}") from error

    def save(self, file: Path) -> None:
        """Writes the file whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(file)

    def begin(self, name: str, file: Path) -> None:
        """Says that a piece runs."""
        self.running, self.found = name, []
        self.save(file)

    def add(self, row: Row, file: Path) -> None:
        """A row of the piece that runs."""
        self.found.append(asdict(row))
        self.save(file)

    def end(self, file: Path, status: str, seconds: float, error: str = "") -> None:
        """The piece that runs has ended, well or not, with the rows that it gave."""
        if self.running is None:
            raise RuntimeError("no piece runs")
        piece: dict[str, Any] = {"status": status, "seconds": round(seconds, 1), "rows": self.found}
        self.pieces[self.running] = piece | ({"error": error} if error else {})
        self.running, self.found = None, []
        self.save(file)

    def rows(self, name: str) -> list[Row]:
        return [Row(**row) for row in self.pieces.get(name, {}).get("rows", [])]

    def rate(self, case: str) -> float:
        """A rate of the piece "rates", in bytes/s or FLOP/s. Raises RuntimeError if it was not measured."""
        for row in self.rows("rates"):
            if row.case == case and row.value is not None:
                return row.value
        raise RuntimeError(f"the piece 'rates' has not measured {case!r}, which shares are taken of")

    @property
    def is_right(self) -> bool:
        """Whether every piece that ran ended well and no comparison is wrong."""
        return all(
            piece["status"] == DONE and all(row["is_right"] is not False for row in piece["rows"])
            for piece in self.pieces.values()
        )


def this_machine() -> dict[str, Any]:
    """The chip and the versions, without a name or a path of this machine."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "driver": getattr(device.client, "platform_version", "").splitlines()[0],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }
