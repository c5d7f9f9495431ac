"""Routing by prefix: a request goes to the replica that has most of its prompt cached, unless that one is too busy.

The router remembers which prompts it sent where, and forgets the oldest as caches do, without asking the replicas (as
SGLang's and vLLM's routers). Plain Python: no JAX here.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

import xxhash

Name = TypeVar("Name")


def block_keys(prompt: bytes, block_bytes: int, salt: bytes = b"") -> list[int]:
    """Keys of the whole blocks of a prompt: equal where the block and all before it are equal, and the salt.

    Args:
      prompt: token ids as bytes of `array("i")` (for the pages that an engine caches: 4 * page_size bytes a block), or
        text where tokens are unknown.
      salt: what else separates caches: adapter, cache_salt, tools.
    """
    key, keys = xxhash.xxh3_64_intdigest(salt), []
    for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
        key = xxhash.xxh3_64_intdigest(prompt[start : start + block_bytes], seed=key)
        keys.append(key)
    return keys


class PrefixRouter(Generic[Name]):
    """Which blocks each replica is thought to have cached.

    Args:
      max_blocks: that a replica's cache holds; the least recently used are forgotten.
      max_imbalance: requests that the replica with the prefix may run more than the one that runs fewest; beyond them
        the latter gets the request, and has the prefix, too.
    """

    def __init__(self, max_blocks: int = 1 << 16, max_imbalance: int = 8):
        if max_blocks < 1 or max_imbalance < 0:
            raise ValueError(f"max_blocks={max_blocks} must be at least 1, and max_imbalance={max_imbalance} 0")
        self._max_blocks, self._max_imbalance = max_blocks, max_imbalance
        self._blocks: dict[Name, OrderedDict[int, None]] = {}
        self._owners: dict[int, set[Name]] = {}

    def choose(self, keys: Sequence[int], loads: Mapping[Name, int], avoided: Collection[Name] = ()) -> Name:
        """The replica for a request, which is thought to have its blocks from then on; of equals, that with fewest.

        Args:
          keys: of the prompt (`block_keys`). loads: unfinished requests of each replica that may be chosen.
          avoided: chosen only where there is no other.

        Raises ValueError without replicas.
        """
        if not loads:
            raise ValueError("there is no replica to choose from")
        able = {name: load for name, load in loads.items() if name not in avoided} or loads
        least = min(able.values())
        known = self.num_known(keys, able)
        near = [name for name, load in able.items() if load <= least + self._max_imbalance]
        chosen = max(near, key=lambda name: (known.get(name, 0), -able[name], -len(self._blocks.get(name, ()))))
        self.record(chosen, keys)
        return chosen

    def num_known(self, keys: Sequence[int], names: Collection[Name]) -> dict[Name, int]:
        """Blocks from the beginning that replicas are thought to have; those with none are left out."""
        known: dict[Name, int] = {}
        for count, key in enumerate(keys, 1):
            owners = self._owners.get(key, set())
            names = [name for name in names if name in owners]
            if not names:
                break
            known.update(dict.fromkeys(names, count))
        return known

    def record(self, name: Name, keys: Sequence[int]) -> None:
        """A replica has the blocks of a prompt."""
        blocks = self._blocks.setdefault(name, OrderedDict())
        for key in reversed(keys):  # the end is forgotten before the beginning
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
                self._owners.setdefault(key, set()).add(name)
        while len(blocks) > self._max_blocks:
            self._forget(name, blocks.popitem(last=False)[0])

    def remove(self, name: Name) -> None:
        """A replica was lost, or emptied its cache."""
        for key in self._blocks.pop(name, ()):
            self._forget(name, key)

    def _forget(self, name: Name, key: int) -> None:
        owners = self._owners[key]
        owners.discard(name)
        if not owners:
            del self._owners[key]
