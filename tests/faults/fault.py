"""One planted fault: a small change of the product that the tests must notice."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class DoesNotApplyError(RuntimeError):
    """The text that a fault replaces does not occur exactly once: the catalogue has to follow the code."""


@dataclass(frozen=True)
class Fault:
    """Attributes:
    name: area/what, unique. file: product file, from the root of the repository. old: text that occurs exactly once in
      it. new: what replaces it.
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

    def applied(self, root: Path = ROOT) -> str:
        """The text of the file with the fault. Raises DoesNotApplyError."""
        path = root / self.file
        if not path.is_file():
            raise DoesNotApplyError(f"{self.name}: the fault no longer applies, there is no {self.file}")
        text = path.read_text()
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise DoesNotApplyError(
                f"{self.name}: the fault no longer applies, {self.file} has {count} times {self.old!r}, not once"
            )
        return text.replace(self.old, self.new)
