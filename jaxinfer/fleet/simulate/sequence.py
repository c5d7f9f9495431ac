"""A sequence that has lengths and no tokens."""

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)


class SimulatedSequence(SequenceState):
    """An answer of a trace, which ends at its length. Its tokens are zeros, a byte each, and the keys of its pages are
    ids of blocks.

    Args:
      number: of its request in the trace. num_prompt, num_answer: tokens. blocks: ids of blocks of `block_size` tokens,
        each of which says all that is before it, too. num_keyed: tokens that these are of; later pages are like no
        others.

    Attributes:
      first_at: the time of its first token, None before.
      joined, last: ticks of its replica (`JumpingReplica`) before its first decode step, and at its last one. base:
        tokens that were stored before the first.
    """

    def __init__(
        self,
        number: int,
        num_prompt: int,
        num_answer: int,
        blocks: Sequence[int] = (),
        block_size: int = 1,
        num_keyed: int = 0,
        *,
        first_at: int | None = None,
    ):
        super().__init__(Request(range(num_prompt), PARAMS, num_answer), tokens=bytearray(num_prompt))  # type: ignore[arg-type]
        self.number, self.blocks, self.block_size, self.num_keyed = number, blocks, block_size, num_keyed
        self.first_at = first_at
        self.joined = self.last = self.base = 0

    def keys(self, page_size: int, num_tokens: int, num_ahead: int = 0) -> list[Any]:
        """Ids of the full pages of its first `num_tokens` tokens: that of the block in which a page ends."""
        known: list[Any] = self._keys
        count = max(num_tokens - num_ahead, 0) // page_size
        if len(known) < count:
            blocks, size = self.blocks, self.block_size
            for page in range(len(known), count):
                end = (page + 1) * page_size
                known.append(blocks[(end - 1) // size] if end <= self.num_keyed else (self.number, page))
        return known[:count]
