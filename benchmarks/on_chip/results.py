"""The file of results: rows of each piece by card, written whole after every change, so that a run can end any time."""

import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

DONE, FAILED, CRASHED, TIMED_OUT, CUT_OFF = "done", "failed", "crashed", "timed out", "cut off"
FILE = "results.json"


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
      value, unit: what was measured; None where the case cannot run here, for the reason in `note`.
      share: of what the chip can do (`of`), and goal: the least share that is wanted.
      is_right: of a comparison, whether it is within its tolerance.
      predicted: the value that was expected, in the same unit.
    """

    case: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    of: str = ""
    goal: float | None = None
    is_right: bool | None = None
    note: str = ""
    predicted: float | None = None

    @property
    def verdict(self) -> str:
        """ "WRONG", "SHORT", "ok" or, for a row without a bound, ""."""
        if self.is_right is False:
            return "WRONG"
        if self.share is not None and self.goal is not None:
            return "ok" if self.share >= self.goal else "SHORT"
        return "ok" if self.is_right else ""

    @property
    def difference(self) -> float | None:
        """The measured value over the predicted one, less 1; None without a prediction."""
        return self.value / self.predicted - 1 if self.value is not None and self.predicted else None


@dataclass
class CardResults:
    """Results of one card and one set of versions.

    Attributes:
      machine: the card and the versions. pieces: by name: `status`, `seconds`, `rows`, and `error` and `clocks` where
        there are any. A piece that was cut off runs again, from its start.
      running: the piece that was begun last and has not ended. begun: when, in seconds of `time.time()`. limit: its
        seconds. found: its rows so far.
    """

    machine: dict[str, Any]
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: str | None = None
    begun: float = 0.0
    limit: float = 0.0
    found: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, name: str, limit: float) -> None:
        """Notes that a piece runs."""
        self.running, self.begun, self.limit, self.found = name, time.time(), limit, []

    def end(self, status: str, error: str = "", clocks: str = "") -> None:
        """Notes that the running piece has ended, with the rows that it gave. Raises RuntimeError if none runs."""
        if self.running is None:
            raise RuntimeError("no piece runs")
        piece: dict[str, Any] = {"status": status, "seconds": round(time.time() - self.begun, 1), "rows": self.found}
        piece |= {name: text for name, text in (("error", error), ("clocks", clocks)) if text}
        before = self.pieces.get(self.running, {"rows": []})
        if status != CUT_OFF or len(self.found) >= len(before["rows"]):  # a later try may be cut off earlier
            self.pieces[self.running] = piece
        self.running, self.found = None, []

    def is_ended(self, name: str) -> bool:
        """True for a piece that has a result and is not to run again."""
        return name in self.pieces and self.pieces[name]["status"] != CUT_OFF

    @property
    def num_ended(self) -> int:
        return sum(self.is_ended(name) for name in self.pieces)

    def rows(self, name: str) -> list[Row]:
        return [Row(**row) for row in self.pieces.get(name, {}).get("rows", [])]

    def rate(self, case: str) -> float | None:
        """A rate of the piece "rates", in bytes/s or FLOP/s; None if it was not measured."""
        return next((row.value for row in self.rows("rates") if row.case == case), None)

    @property
    def is_right(self) -> bool:
        """True if every piece that ran ended well and no comparison is wrong."""
        return all(
            piece["status"] == DONE and all(row["is_right"] is not False for row in piece["rows"])
            for piece in self.pieces.values()
        )


@dataclass
class Results:
    """Results of all cards by `key_of`; environment: variables of the next process, which a worker has asked for."""

    cards: dict[str, CardResults] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "Results":
        """Reads a file; without one there are no results. Raises ValueError for a file that is not one of results."""
        if not file.exists():
            return cls()
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return cls({key: CardResults(**card) for key, card in content["cards"].items()}, content["environment"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is not a file of results: {error!r}") from error

    def save(self, file: Path) -> None:
        """Writes the file whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(file)

    def of(self, machine: dict[str, Any], *, is_tiny: bool) -> CardResults:
        """The results of this machine's card and versions, which another card's are added to."""
        return self.cards.setdefault(key_of(machine, is_tiny=is_tiny), CardResults(machine))

    @property
    def running(self) -> CardResults | None:
        """The results of the card that a piece runs on."""
        return next((card for card in self.cards.values() if card.running is not None), None)

    def cut_off(self) -> None:
        """Ends what was running when its process was killed; its rows are kept."""
        while (card := self.running) is not None:
            card.end(CUT_OFF, "runs again next time")

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All rows with their pieces' names."""
        for card in self.cards.values():
            for name in card.pieces:
                yield from ((name, row) for row in card.rows(name))


def key_of(machine: dict[str, Any], *, is_tiny: bool) -> str:
    """The card, the number of cards, and the versions that results depend on."""
    card = f"{machine['device']} x{machine['num_devices']}, JAX {machine['jax']}, jaxlib {machine['jaxlib']}"
    return f"{card}, tiny sizes" if is_tiny else card


def this_machine() -> dict[str, Any]:
    """The chip and the versions, without a name or a path of this machine."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "driver": getattr(device.client, "platform_version", "").partition("\n")[0],
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
    }
