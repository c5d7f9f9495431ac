"""Options of a simulated fleet, and of what is expected of it. Imports no JAX."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from jaxinfer.options import option

_fleet = partial(option, group="Fleet")
_goal = partial(option, group="Goal")

Routing = Literal["least-load", "prefix", "round-robin"]


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """How requests are routed, and how replicas fail."""

    routing: Routing = _fleet(
        "least-load",
        "least-load: the replica with the fewest unfinished requests, as jaxinfer front. prefix: the one that is "
        "thought to have most of the prompt cached. round-robin: each in turn.",
    )
    max_imbalance: int = _fleet(
        8,
        "With prefix: requests that the replica with the prefix may have more than the one that has fewest.",
        "N",
        min=0,
    )
    mtbf: float | None = _fleet(
        None, "Mean hours between two failures of a replica; default: none fails.", "HOURS", min=1e-6
    )
    restart_time: float = _fleet(
        120.0, "Seconds from a failure until the replica takes requests again.", "SECONDS", min=0
    )
    seed: int = _fleet(0, "Of failures and of made traces.", "N", min=0)
    max_waiting: int = _fleet(1024, "Requests that may wait at a replica; one more is refused.", "N", min=1)

    def __post_init__(self) -> None:
        if self.routing not in ("least-load", "prefix", "round-robin"):
            raise ValueError(f"routing must be least-load, prefix or round-robin, got {self.routing!r}")
        for name, least in (("max_imbalance", 0), ("restart_time", 0), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)!r}")
        if self.mtbf is not None and not self.mtbf > 0:
            raise ValueError(f"mtbf must be hours above 0, got {self.mtbf!r}")


@dataclass(frozen=True, kw_only=True)
class ServiceGoal:
    """Limits that a request is served well within, and what a chip costs."""

    slo_ttft: float = _goal(2000.0, "Milliseconds until the first token, at most.", "MS", min=0)
    slo_itl: float = _goal(
        100.0, "Milliseconds between tokens, at most, as the mean over those of a request.", "MS", min=0
    )
    slo_share: float = _goal(0.99, "Share of the requests that must be served within both.", "X", min=0, max=1)
    chip_price: float | None = _goal(None, "Dollars an hour for a chip: prints the cost.", "X", min=0)
