"""Which implementation of an operation runs, and why none of the others."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.platform import missing_platform


@dataclass(frozen=True)
class Choice:
    """The implementation taken, and why each of the others was not."""

    implementation: str
    reasons: dict[str, str] = field(default_factory=dict)


class Implementations(Mapping[str, Any]):
    """An operation's implementations: modules of `package`, and which of them a platform takes, the best first.

    Each has `unsupported(spec, platform)`: the reason why not, or None; the last of a platform can do all. A module is
    imported when it is first asked for: Pallas for the chips that are not here takes a third of a second.
    """

    def __init__(self, package: str, names: tuple[str, ...], by_platform: Mapping[str, tuple[str, ...]]):
        self._package, self._names, self._by_platform = package, names, by_platform

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return importlib.import_module(f"{self._package}.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, spec: Any, platform: str, implementation: str | None = None) -> str:
        """The named implementation, or the first of the platform's that can do `spec`.

        Raises ValueError for an unknown name, NotImplementedError with the reason when a named one cannot.
        """
        operation = self._package.rpartition(".")[2]
        if implementation is None:
            names = self._by_platform.get(platform, ("xla",))
            return next(name for name in names if self[name].unsupported(spec, platform) is None)
        if implementation not in self._names:
            raise ValueError(f"{operation}: implementation={implementation!r} is not one of {', '.join(self._names)}")
        if (reason := self[implementation].unsupported(spec, platform)) is not None:
            raise NotImplementedError(f"{operation}: {implementation} cannot run this: {reason}")
        return implementation

    def choose(self, spec: Any, platform: str, implementation: str | None = None) -> Choice:
        """What `take` takes, and why none of the others."""
        taken = self.take(spec, platform, implementation)
        otherwise = f"{taken} is preferred on a {platform}" if implementation is None else f"{taken} was named"
        others = {name: self._unsupported(name, spec, platform) for name in self if name != taken}
        return Choice(taken, {name: reason or otherwise for name, reason in others.items()})

    def _unsupported(self, name: str, spec: Any, platform: str) -> str | None:
        """Why `name` is not for `spec`, without importing Pallas to find out that it is for another platform.

        Since JAX 0.12 the import adds a value to the context of every trace: programs compiled before it are traced
        and compiled again. Interpreters run a kernel on any platform, and need Pallas.
        """
        homes = [home for home, names in self._by_platform.items() if name in names]
        if len(homes) == 1 and "jax.experimental.pallas" not in sys.modules:
            reason = missing_platform(homes[0], platform)
            if reason is not None:
                return reason
        return self[name].unsupported(spec, platform)
