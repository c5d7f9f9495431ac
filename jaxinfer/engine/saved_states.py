"""States of sequences, kept at borders of their tokens for prefix reuse by models with recurrent layers.

A state is of all tokens so far and cannot be cut, so a prompt goes on from a cached beginning only where the state
after it was saved: after a whole number of pages and of blocks of the recurrence. A place for one is a page of a pool
of its own, which the prefix tree finds, keeps and gives away as it does pages of tokens. Plain Python: no JAX here.
"""

from collections.abc import Iterable, Sequence

from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.pages import NULL_PAGE, PagePool
from jaxinfer.engine.request import SequenceState


class SavedStates:
    """Decides where states are saved, and has the places.

    The tokens between two saved states of a prompt are computed by steps of their own, so there are few: one at its
    last border, from which the same prompt and the next turn of a conversation go on; and one at the last border of
    what it shares with others, from which any that begins alike goes on.

    Args:
      num_places: for states. interval: states are saved after multiples of so many tokens, a multiple of `page_size`.
      shuffle_seed: as of `PagePool`. holds_restored: whether a place that is restored keeps an owner until
        `release_restored`, as other states may otherwise be brought back into it first.
    """

    def __init__(
        self,
        num_places: int,
        interval: int,
        page_size: int,
        shuffle_seed: int | None = None,
        holds_restored: bool = False,
    ):
        self.interval, self._page_size = interval, page_size
        self._holds_restored, self._restored = holds_restored, list[int]()
        # What must be there before a sequence can go on after whole pages is the last of these only, as of a window of
        # the newest token and the one before.
        self.groups = (CacheGroup(num_places + 1, window=2),) if num_places else ()
        self._most_new = num_places // 2  # the others are not given away, however many prompts are computed at once
        self.pools = tuple(PagePool(group.num_pages, shuffle_seed) for group in self.groups)

    def __bool__(self) -> bool:
        return bool(self.pools)

    def border(self, num_tokens: int) -> int:
        """The last border within so many tokens; 0 where there is none."""
        return num_tokens // self.interval * self.interval

    def plan(self, sequence: SequenceState, num_shared: int) -> None:
        """Decides where the state of a sequence is saved on the way to its target, of which it shares the first
        `num_shared` tokens with others. At least one token is left over, from which the next is chosen."""
        if not self:
            return
        wanted = {self.border(min(num_tokens, sequence.target - 1)) for num_tokens in (sequence.target, num_shared)}
        sequence.save_at = sorted(border for border in wanted if border > sequence.num_stored)

    def next_stop(self, sequence: SequenceState) -> int:
        """Tokens after which the next piece of a prompt ends, at most."""
        return min(sequence.save_at, default=sequence.target)

    def save(self, sequence: SequenceState, num_tokens: int) -> int:
        """The place for the state after a piece of a prompt that ends there; NULL_PAGE if it is not saved."""
        if num_tokens not in sequence.save_at:
            return NULL_PAGE
        sequence.save_at.remove(num_tokens)
        (pool,) = self.pools
        if not pool.num_available or pool.num_owned - len(self._restored) >= max(self._most_new, 1):
            return NULL_PAGE
        (place,) = pool.allocate(1)
        sequence.saved[num_tokens] = place
        return place

    def request_from(self, running: SequenceState, num_known: int, num_shared: int) -> bool:
        """Has a running sequence save a state that another one, which shares its first `num_shared` tokens, can go on
        from, with more tokens than the `num_known` that are cached; returns whether there will be one."""
        border = self.border(num_shared)
        if any(num_known < place <= border for place in (*running.save_at, *running.saved)):
            return True
        if max(num_known, running.num_stored) < border < running.target:
            running.save_at = sorted([*running.save_at, border])
            return True
        return False

    def take(self, tables: list[list[int]]) -> int:
        """Removes the table of states from those of a prefix hit; returns the place of the hit's last state, NULL_PAGE
        for none. It has no owner from then on, or from `release_restored` on: it is copied before anything that is
        planned later is written to it."""
        places = [place for place in tables.pop() if place != NULL_PAGE]
        if self._holds_restored:
            self._restored += places
        else:
            self.pools[0].release(places)
        return places[-1] if places else NULL_PAGE

    def release_restored(self) -> None:
        """Ends the ownership of the places that the dispatch just planned restores."""
        for pool in self.pools if self._restored else ():
            for place in self._restored:  # one may be restored for several sequences
                pool.release([place])
        self._restored = []

    def tables(self, sequence: SequenceState, num_pages: int) -> list[list[int]]:
        """A table like those of pages, with the places of the states that only this sequence has."""
        table = [NULL_PAGE] * num_pages
        for num_tokens, place in sequence.saved.items():
            if num_tokens <= num_pages * self._page_size:
                table[num_tokens // self._page_size - 1] = place
        return [table]

    def release_known(self, sequence: SequenceState, tables: Sequence[Sequence[int]]) -> bool:
        """Gives up a sequence's ownership of what `tables` had, which the prefix tree now keeps; returns whether there
        was any."""
        known = [place for table in tables for place in table if place != NULL_PAGE]
        for pool in self.pools if known else ():
            pool.release(known)
            num_tokens = len(tables[0]) * self._page_size
            sequence.saved = {border: place for border, place in sequence.saved.items() if border > num_tokens}
        return bool(known)

    def release_all(self, sequence: SequenceState) -> None:
        """Gives back the places of states that are not known to be sound."""
        for pool in self.pools:
            pool.release(list(sequence.saved.values()))
        sequence.saved, sequence.save_at = {}, []

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Raises RuntimeError unless the sequences' places are the owners there are, each at a border ahead of what is
        confirmed."""
        sequences = list(sequences)
        for pool in self.pools:
            pool.check([list(sequence.saved.values()) for sequence in sequences])
        for sequence in sequences if self else ():
            if any(border % self.interval for border in (*sequence.saved, *sequence.save_at)):
                raise RuntimeError(f"states are saved within a block: {sequence.saved}, {sequence.save_at}")
            if any(border <= sequence.num_stored for border in sequence.save_at) or any(
                border > sequence.num_stored or border <= sequence.num_confirmed for border in sequence.saved
            ):
                raise RuntimeError(
                    f"{sequence.num_stored} tokens are stored, {sequence.num_confirmed} confirmed: "
                    f"{sequence.saved}, {sequence.save_at}"
                )


def num_common(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Number of equal keys at the beginning of both."""
    count = 0
    for key, other_key in zip(keys, others, strict=False):
        if key != other_key:
            break
        count += 1
    return count
