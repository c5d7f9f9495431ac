"""Routing of a request, in time that hardly grows with the number of replicas."""

import heapq
from collections.abc import Sequence

from jaxinfer.fleet.routing import PrefixRouter


class LoadIndex:
    """Unfinished requests of the replicas that may be chosen, by number."""

    def __init__(self) -> None:
        self.loads: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # of some loads, old ones among them

    def set(self, replica: int, load: int) -> None:
        self.loads[replica] = load
        heapq.heappush(self._heap, (load, replica))
        if len(self._heap) > 16 * len(self.loads) + 64:
            self._heap = [(load, replica) for replica, load in self.loads.items()]
            heapq.heapify(self._heap)

    def remove(self, replica: int) -> None:
        del self.loads[replica]

    def least(self) -> int:
        """The replica with the least load, the first of several. There must be one."""
        while self.loads.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]


class IndexedPrefixRouter(PrefixRouter[int]):
    """Chooses as `PrefixRouter`, from a `LoadIndex`."""

    def choose_from(self, keys: Sequence[int], index: LoadIndex) -> int:
        """As `choose`: the first, in order of numbers, of those that `choose` finds equal."""
        chosen = self._choose(keys, index)
        self.record(chosen, keys)
        return chosen

    def _choose(self, keys: Sequence[int], index: LoadIndex) -> int:
        least, loads = index.least(), index.loads
        limit = loads[least] + self._max_imbalance
        # A replica that has a block has those before it, too: of a path the end is forgotten first.
        for key in reversed(keys):
            owners = self._owners.get(key)
            if not owners:
                continue
            if least in owners:
                return least
            near = [(loads[name], name) for name in owners if loads[name] <= limit]
            if near:
                return min(near)[1]
        return least
