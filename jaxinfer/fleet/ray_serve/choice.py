"""Which replica a request goes to, and in which order others are tried. Knows nothing of Ray."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal, get_args

from jaxinfer.fleet.routing import PrefixRouter

Routing = Literal["prefix", "load", "round_robin"]
ROUTINGS = get_args(Routing)
_running: dict[int, tuple[str, ...]] = {}  # names of replicas, by router


def tell_running(router: object, names: Collection[str]) -> None:
    """A router of this process sends requests to these replicas."""
    _running[id(router)] = tuple(names)


def running_replicas() -> list[str]:
    """Names of the replicas to which the routers of this process send requests."""
    return sorted({name for names in _running.values() for name in names})


class ReplicaChoice:
    """Chooses by the requests that this process has sent: Ray's own counts of a replica are up to 10 seconds old.

    Args:
      routing: "prefix", the replica that has most of the prompt cached, unless it is too busy; "load", the one with the
        fewest requests; "round_robin", each in turn.
      max_imbalance: as of `PrefixRouter`.

    Raises ValueError.
    """

    def __init__(self, routing: Routing = "prefix", max_imbalance: int = 8):
        if routing not in ROUTINGS:
            raise ValueError(f"routing={routing!r} is none of {', '.join(ROUTINGS)}")
        self._routing, self._num_chosen = routing, 0
        self._router = PrefixRouter[str](max_imbalance=max_imbalance)
        self._sent: dict[str, str] = {}  # the replica of each request that has not ended
        self._loads: Counter[str] = Counter()

    def order(
        self, request: str, keys: Sequence[int], names: Sequence[str], avoided: Collection[str] = ()
    ) -> list[str]:
        """All replicas, the best one first, which counts as chosen for the request.

        Args:
          request: id of the request. keys: of its prompt (`jaxinfer.fleet.routing.block_keys`).
          avoided: replicas that come last.
        """
        self.complete(request)
        loads = {name: self._loads[name] for name in names}
        if self._routing == "round_robin":
            able = [name for name in names if name not in avoided] or list(names)
            best = able[self._num_chosen % len(able)]
            self._num_chosen += 1
        else:
            best = self._router.choose(keys if self._routing == "prefix" else (), loads, avoided)
        self.route(request, best)
        return sorted(names, key=lambda name: (name != best, name in avoided, loads[name]))

    def route(self, request: str, name: str) -> None:
        """A request was sent to a replica, the one that was chosen or another one."""
        self.complete(request)
        self._sent[request] = name
        self._loads[name] += 1

    def complete(self, request: str) -> None:
        """A request has ended, or was not sent. A second call does nothing."""
        if (name := self._sent.pop(request, None)) is not None:
            self._loads[name] -= 1

    def keep(self, names: Collection[str]) -> None:
        """All replicas that there are: what others had cached is forgotten."""
        for name in [name for name in self._loads if name not in names]:
            self._router.remove(name)
            if not self._loads[name]:
                del self._loads[name]

    @property
    def loads(self) -> dict[str, int]:
        """Requests of each replica that have not ended."""
        return {name: load for name, load in self._loads.items() if load}
