"""One planted fault: a small change of the product that the tests must notice."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class DoesNotApplyError(RuntimeError):
    """The text that a fault replaces does not occur exactly once: the catalogue has to follow the code."""


@dataclass(frozen=True)
class Fault:
    """Attributes:
    name: area/what, unique. file: a product file, from the root of the repository, or a folder in which code moves.
    old: text that occurs exactly once there. new: what replaces it.
    tests: pytest node ids, files or folders of `make test`, none of them slow, that must fail with it.
    why: what a user would suffer from it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    @property
    def area(self) -> str:
        return self.name.split("/")[0]

    def applied(self, root: Path = ROOT) -> tuple[Path, str]:
        """The file that has the text, and its content with the fault. Raises DoesNotApplyError."""
        place = root / self.file
        paths = sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.is_file() else []
        if not paths:
            raise DoesNotApplyError(f"{self.name}: the fault no longer applies, there is no {self.file}")
        texts = {path: text for path in paths if self.old in (text := path.read_text())}
        count = sum(text.count(self.old) for text in texts.values())
        if count != 1 or self.old == self.new:
            raise DoesNotApplyError(
                f"{self.name}: the fault no longer applies, {self.file} has {count} times {self.old!r}, not once"
            )
        ((path, text),) = texts.items()
        return path, text.replace(self.old, self.new)
