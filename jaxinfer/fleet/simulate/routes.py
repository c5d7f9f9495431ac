"""Routing of a request, in time that hardly grows with the number of replicas."""

import heapq
from collections.abc import Sequence

from jaxinfer.fleet.routing import PrefixRouter


class LoadIndex:
    """Unfinished requests of the replicas that may be chosen, by number, and blocks that each is thought to have."""

    def __init__(self) -> None:
        self.loads: dict[int, int] = {}
        self.num_blocks: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []  # (load, blocks, replica), old ones among them

    def set(self, replica: int, load: int, num_blocks: int | None = None) -> None:
        """Changes a load; the number of blocks stays where none is given."""
        self.loads[replica] = load
        blocks = self.num_blocks[replica] = self.num_blocks.get(replica, 0) if num_blocks is None else num_blocks
        heapq.heappush(self._heap, (load, blocks, replica))
        if len(self._heap) > 16 * len(self.loads) + 64:
            self._heap = [(load, self.num_blocks[replica], replica) for replica, load in self.loads.items()]
            heapq.heapify(self._heap)

    def remove(self, replica: int) -> None:
        del self.loads[replica], self.num_blocks[replica]

    def least(self) -> int:
        """The replica with the least load, of several the one with fewest blocks, then the first. There must be one."""
        while True:
            load, blocks, replica = self._heap[0]
            if self.loads.get(replica) == load and self.num_blocks[replica] == blocks:
                return replica
            heapq.heappop(self._heap)


class IndexedPrefixRouter(PrefixRouter[int]):
    """Chooses as `PrefixRouter`, from a `LoadIndex`."""

    def choose_from(self, keys: Sequence[int], index: LoadIndex) -> int:
        """As `choose`: the first, in order of numbers, of those that `choose` finds equal."""
        chosen = self._choose(keys, index)
        self.record(chosen, keys)
        index.set(chosen, index.loads[chosen], len(self._blocks[chosen]))
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
            near = [(loads[name], index.num_blocks[name], name) for name in owners if loads[name] <= limit]
            if near:
                return min(near)[-1]
        return least
