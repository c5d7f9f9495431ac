"""Compaction of prompts, the host's side: whose cache is compacted, into which pages, and when the old ones are free.

A policy drops pages of a prompt at its end: the best tokens of each head move to fresh pages, which stand for the last
columns of the sequence's table, so that later tokens have the places that they would have without it. What a prompt
had before are ordinary pages: once they are confirmed they enter the prefix tree, and are given back. Fresh pages are
one sequence's own, and never do. Plain Python: no JAX here.
"""

from collections.abc import Sequence

from jaxinfer.engine.pages import NULL_PAGE
from jaxinfer.engine.plans import GroupMove
from jaxinfer.engine.pools import PagePools
from jaxinfer.engine.request import SequenceState


class PromptEnds:
    """Which prompts are compacted, and their pages."""

    def __init__(self, pools: PagePools):
        self._pools = pools
        self._ends = [group.at_end for group in pools.groups]
        self._num_observed = max((end.num_observed for end in self._ends if end is not None), default=0)

    def __bool__(self) -> bool:
        return self._num_observed > 0

    def num_dropped(self, sequence: SequenceState) -> list[int]:
        """By group, the pages that its prompt loses."""
        return [0 if end is None else end.num_dropped(sequence.num_prompt) for end in self._ends]

    def is_due(self, sequence: SequenceState) -> bool:
        """True if its prompt is compacted, and was not yet."""
        return not sequence.is_compacted and any(self.num_dropped(sequence))

    def num_shareable(self, sequence: SequenceState) -> int:
        """Leading tokens that it may take from the prefix tree: at least one is computed, whose output is needed; of a
        prompt that is compacted, the last ones, whose queries are."""
        if any(self.num_dropped(sequence)):
            return sequence.num_prompt - self._num_observed
        return len(sequence.tokens) - 1

    def num_known(self, sequence: SequenceState) -> int:
        """Tokens of which others may find pages, once they are confirmed."""
        if any(self.num_dropped(sequence)):
            return min(sequence.target, sequence.num_prompt)
        return sequence.target

    def next_stop(self, sequence: SequenceState) -> int:
        """Tokens after which its next piece ends, at most."""
        return sequence.num_prompt - self._num_observed if self.is_due(sequence) else sequence.target

    def is_next(self, sequence: SequenceState) -> bool:
        """True if the pass that compacts its prompt is what it waits for."""
        return self.is_due(sequence) and sequence.num_stored == self.next_stop(sequence)

    def num_fresh(self, sequence: SequenceState, group: int) -> int:
        """Pages of a group that compaction will take beside those of its prompt."""
        if not self.is_due(sequence) or not (num_dropped := self.num_dropped(sequence)[group]):
            return 0
        return self._pools.pages_for(sequence.num_prompt) - num_dropped

    def missing(self, sequence: SequenceState) -> list[int]:
        """By group, pages to allocate for the pass."""
        rest = self._pools.pages_for(sequence.num_prompt) - len(sequence.pages)
        return [rest + self.num_fresh(sequence, group) for group in range(len(self._ends))]

    def start(self, sequence: SequenceState) -> tuple[GroupMove, ...]:
        """Gives a sequence its fresh pages, which must be available; the old ones stay beside until `finish`."""
        num_dropped, num_pages = self.num_dropped(sequence), self._pools.pages_for(sequence.num_prompt)
        self._pools.extend(sequence, num_pages - len(sequence.pages))
        moves = []
        for group, (pool, lost) in enumerate(zip(self._pools.all, num_dropped, strict=True)):
            table, targets, old = sequence.tables[group], [], []
            if lost:
                targets, old = pool.allocate(num_pages - lost), table
                sequence.tables[group] = [NULL_PAGE] * lost + targets
                sequence.num_released[group] = lost
            moves.append(GroupMove(tuple(table), tuple(targets), lost))
            sequence.prompt_tables.append(old)
        sequence.is_compacted, sequence.num_listed = True, 0
        return tuple(moves)

    def known_tables(self, sequence: SequenceState) -> list[list[int]] | None:
        """Tables whose pages may enter the prefix tree; None for none: those of a compacted prompt never do."""
        if not sequence.is_compacted:
            return sequence.tables
        if not sequence.prompt_tables:
            return None
        return [old or table for old, table in zip(sequence.prompt_tables, sequence.tables, strict=True)]

    def finish(self, sequence: SequenceState) -> None:
        """Gives back the old pages, if there are any: the pass has run, or the sequence leaves."""
        self._pools.release_tables(sequence.prompt_tables or [[] for _ in self._ends])
        sequence.prompt_tables = []

    def check(self, sequences: Sequence[SequenceState]) -> None:
        """Raises RuntimeError where a page of a compacted prompt, or after it, is shared or known."""
        for sequence in sequences:
            if sequence.prompt_tables and (not sequence.is_compacted or sequence.num_confirmed >= sequence.num_prompt):
                raise RuntimeError(f"{len(sequence.prompt_tables[0])} pages of a compacted prompt are still owned")
            if not sequence.is_compacted:
                continue
            for pool, table, lost in zip(self._pools.all, sequence.tables, self.num_dropped(sequence), strict=True):
                for page in table[lost:] if lost else ():
                    if pool.num_owners(page) != 1 or pool.is_kept(page):
                        raise RuntimeError(f"page {page} of a compacted prompt is shared or known")
