"""Groups of layers that share a page table and a pool of pages, and how large the pools are. Plain Python: no JAX here.

A group are the layers with the same window, or all those without one. A sequence has one list of pages for each group,
in which page i holds tokens i * page_size and on. With a window, the pages behind it are given back, so that a sequence
holds at most the window and what is still to be confirmed, however long it is.

A policy that keeps the first tokens of a sequence beside a window makes a group with `num_sinks` pages, which stay.

A group that keeps something else than pages of tokens (a state of fixed size) differs in one rule: what must be there
before a sequence can go on after `num_stored` tokens, `first_needed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.cache.policy.contract import CachePolicy, GroupKind, PromptEnd
from jaxinfer.cache.policy.kinds import KEEPS_ALL

MAX_IN_FLIGHT = 2  # dispatches: one computes while the other's results are read


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose keys lie in one pool.

    Attributes:
      num_pages: the pool, null page included.
      window: tokens that a query of these layers sees, its own included; None for all.
      layers: their numbers. page_bytes: of one page in all of them, on a device.
      num_sinks: first pages of a sequence that are read beside the window, and so never given back.
      num_scratch: pages after those of the pool, which programs use within a pass.
      at_end: what a prompt loses at its end; None for nothing.
    """

    num_pages: int
    window: int | None = None
    layers: tuple[int, ...] = ()
    page_bytes: int = 0
    num_sinks: int = 0
    num_scratch: int = 0
    at_end: PromptEnd | None = None

    @property
    def num_allocated(self) -> int:
        """Pages of the arrays."""
        return self.num_pages + self.num_scratch

    @property
    def name(self) -> str:
        """Name in reports: "full", "window of 128", "sinks and window of 1,025", or that of `at_end`."""
        if self.at_end is not None:
            return self.at_end.name
        return "full" if self.window is None else f"{'sinks and ' * bool(self.num_sinks)}window of {self.window:,}"

    @property
    def pool_bytes(self) -> int:
        return self.num_allocated * self.page_bytes

    def first_needed(self, num_stored: int, page_size: int) -> int:
        """The first page, sinks apart, that is read by a token after `num_stored` others, or by any later one."""
        return 0 if self.window is None else max(num_stored + 1 - self.window, 0) // page_size

    def sinks_before(self, first: int) -> int:
        """Sinks among the pages before page `first`."""
        return min(self.num_sinks, first)

    def least_pages(self, num_tokens: int, page_size: int, num_prompt: int = 0, num_ahead: int = 1) -> int:
        """Pages that a sequence with room for so many tokens, whose prompt has `num_prompt`, holds at once, at least,
        if `num_ahead` of its tokens are computed together. While a prompt is compacted it has pages twice."""
        most = most_pages(self.window, num_tokens, num_ahead, page_size, self.num_sinks)
        if self.at_end is None or not (num_dropped := self.at_end.num_dropped(num_prompt)):
            return most
        return max(2 * -(-num_prompt // page_size), most) - num_dropped


def most_pages(window: int | None, num_tokens: int, num_ahead: int, page_size: int, num_sinks: int = 0) -> int:
    """Pages that a sequence of `num_tokens` tokens holds at once, of which `num_ahead` are stored or planned, but not
    confirmed: those, and the window before the first of them, wherever they begin in a page, and the sinks."""
    every = -(-num_tokens // page_size)
    if window is None:
        return every
    return min(every, num_sinks + (window - 1 + num_ahead + page_size - 2) // page_size + 1)


@dataclass(frozen=True)
class PoolSizes:
    """How many pages each group has.

    The first group has as many as are requested or fit, by default room for `max_seqs` sequences of `max_model_len`
    tokens. Another one has at least room for the windows of `max_seqs` sequences, for the tokens that they decode in
    the dispatches in flight, and for the prompt tokens of these; where the first has more than its default, for prefix
    reuse, in proportion more; where it has fewer, never more pages than the first.

    Attributes:
      kinds: of the groups, those without a window first, else the largest first. page_bytes: of a page of each on a
        device, in all of its layers and the draft's. scratch: pages of each that programs use within a pass.
      page_size: tokens of a page.
      max_seqs, max_model_len, prefill_chunk: of the engine. dispatch_tokens: that a dispatch may store of a decoding
        sequence.
      policy: how many tokens a sequence has room for.
    """

    kinds: Sequence[GroupKind]
    page_bytes: Sequence[int]
    scratch: Sequence[int]
    page_size: int
    max_seqs: int
    max_model_len: int
    prefill_chunk: int
    dispatch_tokens: int
    policy: CachePolicy = KEEPS_ALL

    @property
    def default(self) -> int:
        """Pages of the first group by default, the null page included."""
        return self.base(self.kinds[0])

    def base(self, kind: GroupKind) -> int:
        """Pages of a group in which `max_seqs` sequences find room at any time, the null page included; and room for
        the prompts that move at their ends in the dispatches in flight."""
        window, _, at_end = kind
        count = self.max_seqs * -(-self.max_model_len // self.page_size)
        if window is not None:
            chunks = -(-MAX_IN_FLIGHT * self.prefill_chunk // self.page_size)
            count = min(count, self.max_seqs * self.of_sequence(kind) + chunks)
        return count + MAX_IN_FLIGHT * _fresh(at_end) + 1

    def of_sequence(self, kind: GroupKind) -> int:
        """Pages of a group that a decoding sequence of `max_model_len` tokens holds, at most."""
        window, num_first, _ = kind
        ahead = MAX_IN_FLIGHT * self.dispatch_tokens
        return most_pages(window, self.policy.num_held(0, self.max_model_len), ahead, self.page_size, num_first)

    @property
    def smallest(self) -> int:
        """Pages of the first group without which no sequence of `max_model_len` fits, the null page included."""
        ahead = max(self.prefill_chunk, self.dispatch_tokens)
        window, num_first, at_end = self.kinds[0]
        most = most_pages(window, self.max_model_len, ahead, self.page_size, num_first)
        return most + _fresh(at_end) + 1

    def pages(self, first: int) -> tuple[int, ...]:
        """Pages of each group where the first has so many, null pages included."""
        counts = [first]
        for base in map(self.base, self.kinds[1:]):
            counts.append(min(base, first) if first <= self.default else base * first // self.default)
        return tuple(counts)

    # Bytes on a device, of all groups.

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in all layers, while it is in their windows."""
        return sum(self.page_bytes) / self.page_size

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a decoding sequence of `max_model_len` tokens, at most."""
        counts = map(self.of_sequence, self.kinds)
        return sum(count * size for count, size in zip(counts, self.page_bytes, strict=True))

    def bytes_of(self, first: int) -> int:
        """Bytes of all pools where the first has so many pages."""
        counts = (count + extra for count, extra in zip(self.pages(first), self.scratch, strict=True))
        return sum(count * size for count, size in zip(counts, self.page_bytes, strict=True))

    def fitting(self, num_bytes: int) -> int:
        """The most pages of the first group with which all groups fit; 0 if none do."""
        least, most = 0, max(num_bytes // max(self.page_bytes[0], 1), 0)
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.bytes_of(middle) <= num_bytes else (least, middle - 1)
        return least


def _fresh(at_end: PromptEnd | None) -> int:
    """Pages to which a prompt moves at its end, at most."""
    return 0 if at_end is None else at_end.most_pages
