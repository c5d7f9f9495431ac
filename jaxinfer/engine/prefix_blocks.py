"""The cached blocks of an engine as other programs index them: which came, which went, on the device or in host memory.

A block is a page of tokens that all groups without a window have; its hash stands for its tokens, all before them, and
the salt. Whether a sequence can go on after a block depends, too, on windows and saved states. No JAX here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from jaxinfer.engine.prefix import PrefixNode


class BlockCame(NamedTuple):
    """A block is cached.

    Attributes:
      hash: 64 bits. parent: that of the block before it; None at the beginning.
      key: of its page in the prefix tree. salt: of its tree.
      is_on_host: in host memory, not on the device.
    """

    hash: int
    parent: int | None
    key: bytes
    salt: str
    is_on_host: bool


class BlockWent(NamedTuple):
    """A block is no longer on the device, or in host memory."""

    hash: int
    is_on_host: bool


class BlocksCleared(NamedTuple):
    """No block is cached any more."""


BlockEvent = BlockCame | BlockWent | BlocksCleared


class _Block:
    __slots__ = ("hash", "is_on_device", "is_on_host", "parent", "salt")

    def __init__(self, hash: int, parent: int | None, salt: str):
        self.hash, self.parent, self.salt = hash, parent, salt
        self.is_on_device = self.is_on_host = False


class PrefixBlocks:
    """A `PrefixObserver` that tells `sink` of blocks.

    Args:
      full_groups: the groups without a window. sink: called in the thread of the tree with the events of each change;
        that a block is in host memory comes before that it left the device.
    """

    def __init__(self, full_groups: Sequence[int], sink: Callable[[list[BlockEvent]], None]):
        self._full, self._sink = tuple(full_groups), sink
        self._blocks: dict[PrefixNode, _Block] = {}  # each after the one before it

    def __len__(self) -> int:
        return len(self._blocks)

    def changed(self, node: PrefixNode) -> None:
        """As `PrefixObserver.changed`."""
        is_on_device = all(node.pages[group] for group in self._full)
        is_on_host = all(node.has(group) for group in self._full) and any(node.hosts[group] for group in self._full)
        block = self._blocks.get(node)
        if block is None:
            if not (is_on_device or is_on_host) or (block := self._new(node)) is None:
                return
            self._blocks[node] = block
        was_on_device, was_on_host = block.is_on_device, block.is_on_host
        block.is_on_device, block.is_on_host = is_on_device, is_on_host
        if not (is_on_device or is_on_host):
            del self._blocks[node]
        events: list[BlockEvent] = []
        if is_on_device and not was_on_device:
            events.append(BlockCame(block.hash, block.parent, node.key, block.salt, False))
        if is_on_host and not was_on_host:
            events.append(BlockCame(block.hash, block.parent, node.key, block.salt, True))
        if was_on_device and not is_on_device:
            events.append(BlockWent(block.hash, False))
        if was_on_host and not is_on_host:
            events.append(BlockWent(block.hash, True))
        if events:
            self._sink(events)

    def cleared(self) -> None:
        """As `PrefixObserver.cleared`."""
        self._blocks.clear()
        self._sink([BlocksCleared()])

    def all(self) -> list[BlockEvent]:
        """The events after which a new index knows all blocks."""
        events: list[BlockEvent] = []
        for node, block in self._blocks.items():
            about = block.hash, block.parent, node.key, block.salt
            if block.is_on_device:
                events.append(BlockCame(*about, False))
            if block.is_on_host:
                events.append(BlockCame(*about, True))
        return events

    def _new(self, node: PrefixNode) -> _Block | None:
        """The block of a node; None where nothing finds it."""
        if (before := node.parent) is None:
            return None
        if before.parent is not None:
            parent = self._blocks.get(before)
            return None if parent is None else _Block(_hash(node.key, parent.hash), parent.hash, parent.salt)
        if before.salt is None:
            return None
        return _Block(_hash(node.key, xxhash.xxh3_64_intdigest(before.salt.encode())), None, before.salt)


def _hash(key: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(key, seed=seed)
