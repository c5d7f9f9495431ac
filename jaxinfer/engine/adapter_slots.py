"""Which adapter is in which slot of the device. Plain Python: no JAX here."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.checks import did_you_mean

RANK_UNIT = 8


@dataclass(frozen=True)
class AdapterSizes:
    """Room for the adapters of a model.

    Attributes:
      num_slots: adapters at once. max_rank: of each.
      modules: last parts of the names of the linear layers that have room, such as "q_proj"; None for all of them.
      parts: what else has room (`engine.options.ADAPTER_PARTS`). num_tokens: trained tokens of an adapter.
      num_added: tokens that an adapter adds to the vocabulary.
    """

    num_slots: int
    max_rank: int
    modules: tuple[str, ...] | None = None
    parts: frozenset[str] = frozenset()
    num_tokens: int = 0
    num_added: int = 0

    def has(self, part: str) -> bool:
        """True for a part that has room."""
        return part in self.parts

    @property
    def rank_room(self) -> int:
        """Ranks of each slot: a multiple, so that sums over the columns of all slots do not depend on which slot an
        adapter is in."""
        return -(-self.max_rank // RANK_UNIT) * RANK_UNIT

    @property
    def has_tables(self) -> bool:
        """True if the embedding or the head has room."""
        return (
            self.num_tokens > 0 or self.num_added > 0 or any(part.endswith(("embed", "lm_head")) for part in self.parts)
        )


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that requests can name.

    Attributes:
      name: by which it was loaded. fingerprint: a hash of its tensors, scales and invocation tokens, which
        salts prefixes.
      host: its arrays in the host's memory. source: the folder that it was read from; "" for arrays.
      owner: the registry that loaded it.
      invocation_tokens: it changes only what comes from their last occurrence on (aLoRA); () where it changes all.
      num_added: tokens that it adds to the vocabulary. tokenizer: of texts for it; None for the base's.
      is_pinned: whether it keeps its slot once it has one, unless all slots have pinned ones.
      is_unloaded: whether no request can name it any more; those that did go on.
    """

    name: str
    fingerprint: str
    host: Any = field(repr=False)
    source: str = ""
    invocation_tokens: tuple[int, ...] = ()
    is_pinned: bool = False
    num_added: int = 0
    tokenizer: Any = field(default=None, repr=False)
    is_unloaded: bool = False
    owner: Any = field(default=None, repr=False)

    @property
    def identity(self) -> str:
        """A hash of all that its answers depend on beside the model: the fingerprint, unless it has a tokenizer."""
        if self.tokenizer is None:
            return self.fingerprint
        parts = [self.fingerprint, self.tokenizer.digest, dict(self.tokenizer.chat_templates)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """The index from which it changes the model, for a prompt; None if the prompt does not invoke it."""
        wanted, length = list(self.invocation_tokens), len(self.invocation_tokens)
        if not wanted:
            return 0
        starts = range(len(token_ids) - length, -1, -1)
        return next((start for start in starts if list(token_ids[start : start + length]) == wanted), None)


def not_loaded(name: str, loaded: Collection[str]) -> str:
    """The sentence about a name that is none of those that are loaded."""
    known = f": {', '.join(loaded)} are" if loaded else ": none is"
    return f"no adapter {name!r:.80} is loaded{did_you_mean(name, list(loaded)) or known}"


class AdapterSlots:
    """The slots of one engine: the least recently used adapter that no running sequence needs makes room.

    Slots are numbered from 1; 0 is none. Any thread may call `forget` and read; the others are the scheduler's.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._slot: dict[str, int] = {}  # by fingerprint, the least recently used one first
        self._adapters: dict[int, LoadedAdapter] = {}
        self._num_running: dict[int, int] = {}  # by slot
        self._free = list(range(num_slots, 0, -1))
        self._unwritten: set[int] = set()
        self.num_moved = 0
        self._lock = threading.RLock()

    def slot_of(self, adapter: LoadedAdapter) -> int | None:
        """The slot where an adapter is; None if it is in none."""
        return self._slot.get(adapter.fingerprint)

    @property
    def resident(self) -> Sequence[LoadedAdapter]:
        """Adapters in slots, the least recently used one first."""
        with self._lock:
            return [self._adapters[slot] for slot in self._slot.values()]

    @property
    def running(self) -> Sequence[LoadedAdapter]:
        """Adapters of running sequences."""
        with self._lock:
            return [self._adapters[slot] for slot in self._slot.values() if self._num_running.get(slot)]

    def can_take(self, adapter: LoadedAdapter) -> bool:
        """True if `take` has a slot for it."""
        with self._lock:
            return self.slot_of(adapter) is not None or self._victim() is not None

    def take(self, adapter: LoadedAdapter, *, is_promised: bool = False) -> tuple[int, bool] | None:
        """A slot for one more running sequence with the adapter, and whether the adapter has to be written into it.
        None if all slots are in use. `is_promised`: `can_take` said that there is one; what it saw may have been
        unloaded since."""
        with self._lock:
            is_new = (slot := self.slot_of(adapter)) is None or slot in self._unwritten
            if slot is None:
                slot = self._victim()
                slot = self._idle() if slot is None and is_promised else slot
                if slot is None:
                    return None
                self._place(adapter, slot)
            elif self._adapters[slot].is_unloaded or adapter.is_pinned:  # the same tensors, loaded again or twice
                self._adapters[slot] = adapter
            self._slot[adapter.fingerprint] = self._slot.pop(adapter.fingerprint)  # now the most recently used
            self._unwritten.discard(slot)
            self._num_running[slot] = self._num_running.get(slot, 0) + 1
            return slot, is_new

    def prefetch(self, adapter: LoadedAdapter, needed: Sequence[LoadedAdapter]) -> int | None:
        """The slot into which an adapter that will be needed is to be written now; None if it is in one, or if all have
        adapters that run, or are needed before."""
        with self._lock:
            if self.slot_of(adapter) is not None or (slot := self._victim(needed)) is None:
                return None
            self._place(adapter, slot)
            return slot

    def lost(self, slot: int) -> None:
        """The adapter of a slot could not be written: it is, when a sequence takes it next."""
        with self._lock:
            if slot in self._adapters:
                self._unwritten.add(slot)

    def written(self, slot: int) -> None:
        """The adapter of a slot that was `lost` is there."""
        self._unwritten.discard(slot)

    def give_back(self, slot: int) -> None:
        """A running sequence left its slot."""
        with self._lock:
            self._num_running[slot] -= 1
            self.forget(self._adapters[slot])

    def forget(self, adapter: LoadedAdapter) -> None:
        """Frees the slot of an adapter that was unloaded, once no running sequence has it."""
        with self._lock:
            slot = self.slot_of(adapter)
            # Where the same tensors are loaded under another name too, the slot may be that one's.
            is_own = slot is not None and self._adapters[slot] is adapter
            if slot is not None and is_own and adapter.is_unloaded and not self._num_running.get(slot):
                self._remove(slot)
                self._free.append(slot)

    def check(self, running: Sequence[tuple[int, LoadedAdapter]]) -> None:
        """Raises RuntimeError where the adapters of running sequences, with the slots that they have, do not agree with
        what is in the slots."""
        with self._lock:
            counts = {slot: count for slot, count in self._num_running.items() if count}
            own = Counter(slot for slot, _ in running)
            if counts != own:
                raise RuntimeError(f"adapters of running sequences are counted as {counts}, and are {dict(own)}")
            for slot, adapter in running:
                if (place := self.slot_of(adapter)) != slot:
                    raise RuntimeError(f"adapter {adapter.name!r} runs in slot {slot}, and is in {place}")
            listed = {adapter.fingerprint: slot for slot, adapter in self._adapters.items()}
            if listed != self._slot or len(listed) != len(self._adapters):
                raise RuntimeError(f"adapters are in slots {self._slot}, and the slots have {listed}")
            used = sorted([*self._free, *self._adapters])
            if used != list(range(1, self.num_slots + 1)):
                raise RuntimeError(f"adapter slots {sorted(self._adapters)} are taken, {sorted(self._free)} are free")

    def _victim(self, needed: Sequence[LoadedAdapter] = ()) -> int | None:
        """A slot to write to: a free one, or that of the least recently used adapter that can go."""
        if self._free:
            return self._free[-1]
        kept = {adapter.fingerprint for adapter in needed}
        can_go = {slot: fingerprint not in kept for fingerprint, slot in self._slot.items()}
        idle = [slot for slot in can_go if can_go[slot] and not self._num_running.get(slot)]
        if needed or not all(map(self._is_pinned, self._adapters)):
            idle = [slot for slot in idle if not self._is_pinned(slot)]
        return idle[0] if idle else None  # a pinned one where all are: others would wait for ever

    def _idle(self) -> int | None:
        """The slot of the least recently used adapter that does not run, if there is one."""
        return next((slot for slot in self._slot.values() if not self._num_running.get(slot)), None)

    def _is_pinned(self, slot: int) -> bool:
        return self._adapters[slot].is_pinned and not self._adapters[slot].is_unloaded

    def _place(self, adapter: LoadedAdapter, slot: int) -> None:
        if slot in self._adapters:
            self._remove(slot)
        else:
            self._free.remove(slot)
        self._slot[adapter.fingerprint], self._adapters[slot] = slot, adapter
        self.num_moved += 1

    def _remove(self, slot: int) -> None:
        del self._slot[self._adapters.pop(slot).fingerprint]
        self._unwritten.discard(slot)
