"""The pages of sequences in all groups of layers: allocated together, given back by each group's rule.

Plain Python: no JAX here.
"""

from collections.abc import Iterable, Sequence

from jaxinfer.cache.policy.contract import CachePolicy
from jaxinfer.cache.policy.kinds import KEEPS_ALL
from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.pages import NULL_PAGE, PagePool
from jaxinfer.engine.prefix import PrefixTree
from jaxinfer.engine.request import SequenceState


class PagePools:
    """A pool for each group. The tables of a sequence are equally long: page i of each holds the same tokens.

    In a table, NULL_PAGE stands for the pages behind the window: the first `num_released` of the group, but for the
    sinks.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        shuffle_seed: int | None = None,
        policy: CachePolicy = KEEPS_ALL,
    ):
        self.groups, self.page_size, self.policy = tuple(groups), page_size, policy
        self.all = tuple(PagePool(group.num_pages, shuffle_seed) for group in groups)
        self._num_held, self._most_held, self.write_offset = policy.num_held, policy.most_held, policy.write_offset
        self._holds_all = policy == KEEPS_ALL
        if self._holds_all:  # a request then makes no call into the policies
            self._num_held, self._most_held, self.write_offset = _num_tokens, _num_tokens, _num_stored
        self._ends = [group.at_end for group in groups if group.at_end is not None]
        self._windows = [index for index, group in enumerate(groups) if group.window is not None]
        self.gives_back = bool(self._windows) or policy.moves_in_place  # pages of sequences that still run

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def pages_of(self, sequence: SequenceState, num_tokens: int) -> int:
        """Pages that a sequence needs when so many of its tokens are stored."""
        held = num_tokens if self._holds_all else self._num_held(sequence.num_prompt, num_tokens)
        return -(-held // self.page_size)

    def num_missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Pages that a decoding sequence does not have yet for so many more tokens."""
        end = min(sequence.num_reserved + num_tokens, sequence.num_storable)
        return max(0, self.pages_of(sequence, end) - len(sequence.pages))

    @property
    def num_available(self) -> int:
        """Pages that `extend` can give: those of the shortest pool."""
        return min(pool.num_available for pool in self.all)

    @property
    def num_owned(self) -> int:
        """Pages with an owner, of all groups."""
        return sum(pool.num_owned for pool in self.all)

    def first_needed(self, num_stored: int) -> list[int]:
        """By group, the first page that is read after `num_stored` tokens."""
        return [group.first_needed(num_stored, self.page_size) for group in self.groups]

    def least_pages(self, num_tokens: int, num_prompt: int = 0) -> list[int]:
        """By group, as `CacheGroup.least_pages`, of a sequence of so many tokens that is computed token by token; the
        last tokens of a prompt that is compacted are computed together, in all groups."""
        num_tokens = self._most_held(num_prompt, num_tokens)
        ends = (end for end in self._ends if end.num_dropped(num_prompt))
        num_ahead = max((end.num_observed for end in ends), default=1)
        return [group.least_pages(num_tokens, self.page_size, num_prompt, num_ahead) for group in self.groups]

    def num_missing_at_start(self, num_tokens: int, num_known: int, num_prompt: int = 0) -> list[int]:
        """By group, the pages that a sequence of `num_tokens` tokens needs, at least, if it shares the whole pages of
        the first `num_known`."""
        num_whole = num_known // self.page_size
        least = self.least_pages(num_tokens, num_prompt)
        shared = (
            max(num_whole - first, 0) + group.sinks_before(min(first, num_whole))
            for group, first in zip(self.groups, self.first_needed(num_known), strict=True)
        )
        return [max(count - known, 0) for count, known in zip(least, shared, strict=True)]

    def num_spare(self, running: Sequence[SequenceState]) -> list[int]:
        """By group, pages that sequences which run will need soon: the rest of their prompts, and one for the next
        tokens of each; of a window, what they do not have of it yet."""
        prompts = (sequence for sequence in running if not sequence.is_decoding)
        full = len(running) + sum(self._most_pages(sequence) - len(sequence.tables[0]) for sequence in prompts)
        spare = [full] * len(self.all)
        for index in self._windows:
            group = self.groups[index]
            spare[index] = sum(
                max(group.least_pages(sequence.num_storable, self.page_size) - self.num_held(sequence, index), 0)
                for sequence in running
            )
        return spare

    def _most_pages(self, sequence: SequenceState) -> int:
        """Pages of a group without a window that a sequence holds at once until its prompt is stored."""
        return self.pages_for(self._most_held(sequence.num_prompt, sequence.target))

    def has_room(self, needed: Sequence[int], spare: Sequence[int]) -> bool:
        """True if each pool has what is needed and spared."""
        return all(a + b <= pool.num_available for a, b, pool in zip(needed, spare, self.all, strict=True))

    def num_held(self, sequence: SequenceState, group: int) -> int:
        """Pages of a group that a sequence owns."""
        num_released = sequence.num_released[group]
        return len(sequence.tables[group]) - num_released + self.groups[group].sinks_before(num_released)

    def share_beginning(self, sequence: SequenceState, num_tokens: int) -> list[list[int]] | None:
        """Tables of a sequence's pages, shared now, that hold its first tokens; None where its windows are beyond."""
        first_needed, end = self.first_needed(num_tokens), self.pages_for(num_tokens)
        if any(released > first for released, first in zip(sequence.num_released, first_needed, strict=True)):
            return None
        tables = []
        for group, pool, table, first in zip(self.groups, self.all, sequence.tables, first_needed, strict=True):
            sinks = table[: min(group.sinks_before(first), end)]
            pool.share(sinks + table[first:end])
            tables.append(sinks + [NULL_PAGE] * (first - len(sinks)) + table[first:end])
        return tables

    def extend(self, sequence: SequenceState, count: int) -> None:
        """Gives a sequence so many more pages of each group; there must be as many available."""
        for pool, table in zip(self.all, sequence.tables, strict=True):
            table += pool.allocate(count)

    def release_evicted(self, sequence: SequenceState) -> None:
        """Gives back the pages of a prompt whose tokens were moved together at its end."""
        if not self.policy.moves_in_place or sequence.num_confirmed < sequence.num_prompt:
            return
        count = self.pages_of(sequence, max(sequence.num_reserved, sequence.num_prompt + 1))
        for pool, table in zip(self.all, sequence.tables, strict=True):
            pool.release(table[count:])
            del table[count:]

    def has_behind(self, sequence: SequenceState) -> bool:
        """True if pages of a sequence are behind the window of everything that is still to be computed."""
        return any(
            self.groups[index].first_needed(sequence.num_confirmed, self.page_size) > sequence.num_released[index]
            for index in self._windows
        )

    def release_behind(self, sequence: SequenceState, prefixes: PrefixTree) -> None:
        """Gives back the pages behind the windows. What is confirmed decides: dispatches in flight begin there, and
        drafts that are rejected are stored after it.

        Most of these pages are in the middle of a text, where no other sequence goes on, and there is one for every few
        tokens: they are reused before pages at the end of a window that one may go on from.
        """
        prompt_end = (sequence.num_prompt - 1) // self.page_size
        for index in self._windows:
            group, pool, table = self.groups[index], self.all[index], sequence.tables[index]
            first = sequence.num_released[index]
            end = group.first_needed(sequence.num_confirmed, self.page_size)
            num_pages = -(-((group.window or 0) - 1) // self.page_size)
            for number in range(max(first, group.num_sinks), end):
                is_useful = prefixes.is_before_an_end(sequence.place, number, num_pages, prompt_end)
                pool.release([table[number]], evict_first=not is_useful)
                table[number] = NULL_PAGE
            sequence.num_released[index] = max(first, end)

    def release_all(self, sequence: SequenceState) -> None:
        """Gives back all pages of a sequence."""
        self.release_tables(sequence.tables)
        sequence.tables, sequence.num_released = [[] for _ in self.groups], [0] * len(self.groups)

    def release_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """Gives back the pages of tables."""
        for pool, table in zip(self.all, tables, strict=True):
            pool.release([page for page in table if page != NULL_PAGE])

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Raises RuntimeError unless the sequences' tables are the owners there are, and have all pages they need."""
        sequences = list(sequences)
        for index, pool in enumerate(self.all):
            tables = (
                [*sequence.tables[index], *(sequence.prompt_tables[index] if sequence.prompt_tables else ())]
                for sequence in sequences
            )
            pool.check([page for page in table if page != NULL_PAGE] for table in tables)
        for sequence in sequences:
            if len({len(table) for table in sequence.tables}) != 1:
                raise RuntimeError(f"tables of different lengths: {[len(table) for table in sequence.tables]}")
            needed = self.first_needed(sequence.num_confirmed)
            for group, table, released, first in zip(
                self.groups, sequence.tables, sequence.num_released, needed, strict=True
            ):
                if group.at_end is not None:
                    first = group.at_end.num_dropped(sequence.num_prompt) if sequence.is_compacted else 0
                count = group.sinks_before(released)
                held = table[:count] + table[released:]
                if released > first or any(table[count:released]) or not all(held):
                    raise RuntimeError(
                        f"{released} pages are given back, {first} may be after {sequence.num_confirmed} tokens: "
                        f"{table}"
                    )


def _num_tokens(num_prompt: int, num_tokens: int) -> int:
    """As `CachePolicy.num_held` and `most_held` where everything is kept."""
    del num_prompt
    return num_tokens


def _num_stored(sequence: SequenceState) -> int:
    """As `CachePolicy.write_offset` where everything is kept."""
    return sequence.num_stored
