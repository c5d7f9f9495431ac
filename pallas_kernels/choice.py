"""Which implementation of an operation runs, and why none of the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """The implementation taken, and why each of the others was not."""

    implementation: str
    reasons: dict[str, str] = field(default_factory=dict)


def pick(
    operation: str,
    modules: Mapping[str, Any],
    by_platform: Mapping[str, tuple[str, ...]],
    spec: Any,
    implementation: str | None,
    platform: str,
) -> Choice:
    """The named implementation, or the first of the platform's that can do `spec`.

    Each of `modules` has `unsupported(spec, platform)`: the reason why not, or None. The last of a platform can do all.
    Raises ValueError for an unknown name, NotImplementedError with the reason when a named one cannot.
    """
    if implementation is not None and implementation not in modules:
        raise ValueError(f"{operation}: implementation={implementation!r} is not one of {', '.join(modules)}")
    reasons = {name: module.unsupported(spec, platform) for name, module in modules.items()}
    if implementation is not None:
        if reasons[implementation] is not None:
            raise NotImplementedError(f"{operation}: {implementation} cannot run this: {reasons[implementation]}")
        taken, otherwise = implementation, f"{implementation} was named"
    else:
        taken = next(name for name in by_platform.get(platform, ("xla",)) if reasons[name] is None)
        otherwise = f"{taken} is preferred on a {platform}"
    return Choice(taken, {name: reason or otherwise for name, reason in reasons.items() if name != taken})
