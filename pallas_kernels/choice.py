"""Selects the implementation of an operation, with the reasons against the others."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.platform import missing_platform


@dataclass(frozen=True)
class KernelChoice:
    """The selected implementation, and the reason against each of the others."""

    implementation: str
    reasons: dict[str, str] = field(default_factory=dict)


class Implementations(Mapping[str, Any]):
    """The implementations of an operation: modules of `package`, in each platform's order of preference.

    Each module has `unsupported(spec, platform)`, which returns a reason or None; a platform's last one supports every
    call. Modules are imported on first use: importing Pallas for all chips takes a third of a second.
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
        """The name of `implementation`, or of the platform's first one that supports `spec`.

        Raises ValueError for an unknown name, NotImplementedError with the reason if the named one cannot run `spec`.
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

    def choose(self, spec: Any, platform: str, implementation: str | None = None) -> KernelChoice:
        """The implementation that `take` returns, with the reasons against the others."""
        taken = self.take(spec, platform, implementation)
        otherwise = f"{taken} is preferred on a {platform}" if implementation is None else f"{taken} was named"
        others = {name: self._unsupported(name, spec, platform) for name in self if name != taken}
        return KernelChoice(taken, {name: reason or otherwise for name, reason in others.items()})

    def _unsupported(self, name: str, spec: Any, platform: str) -> str | None:
        """The reason why `name` cannot run `spec`, or None; does not import Pallas for another platform.

        With JAX 0.12 the import adds a value to the context of every trace, so that programs are traced and compiled
        again. In an interpreter, which runs kernels on any platform, Pallas has been imported.
        """
        homes = [home for home, names in self._by_platform.items() if name in names]
        if len(homes) == 1 and "jax.experimental.pallas" not in sys.modules:
            reason = missing_platform(homes[0], platform)
            if reason is not None:
                return reason
        return self[name].unsupported(spec, platform)
