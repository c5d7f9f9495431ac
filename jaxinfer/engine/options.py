"""What an engine over a paged cache is told."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from jaxinfer.cache import check_kv_dtype
from jaxinfer.speculative import TokenTree, chain

MIN_STEP_TOKENS = 32
UNIFORM_STEP_TOKENS = 256  # of every step if deterministic: bits may depend on the shape, so there is one
DEFAULT_CHUNK = 512


@dataclass(frozen=True)
class SpeculationOptions:
    """How an engine with a draft speculates.

    Attributes:
      num_draft_tokens: tokens drafted in a round, 1 to 31; None adapts them to what is accepted and to what drafting
        and verifying cost at the load of the moment, down to none.
      tree: widths per depth of a token tree that is drafted instead of a chain, such as (3, 2, 1).
      acceptance: "exact", the answers of plain decoding; or "maximal", the same distribution with more accepted.
      lengths: numbers of drafted tokens that are chosen from where they adapt; each has programs of its own.
      kv_dtype: of a draft model's own cache; None is the target's option.
    """

    num_draft_tokens: int | None = None
    tree: tuple[int, ...] | None = None
    acceptance: str = "exact"
    lengths: tuple[int, ...] = (2, 4, 8)
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        count = self.num_draft_tokens
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 31):
            raise ValueError(f"num_draft_tokens must be 1 to 31 or 'auto', got {count!r}")
        if self.kv_dtype is not None:
            check_kv_dtype(self.kv_dtype, "draft_kv_dtype")
        if self.acceptance not in ("exact", "maximal"):
            raise ValueError(f"acceptance={self.acceptance!r} is neither 'exact' nor 'maximal'")
        if self.tree is not None:
            if count is not None:
                raise ValueError(f"draft_tree={self.tree} says what is drafted, so num_draft_tokens={count} cannot")
            if not self.tree:
                raise ValueError("draft_tree has no depth: give widths such as (3, 2, 1)")
            TokenTree(self.tree)

    @property
    def trees(self) -> tuple[TokenTree, ...]:
        """What rounds are compiled for, the smallest first."""
        if self.tree is not None:
            return (TokenTree(self.tree),)
        lengths = self.lengths if self.num_draft_tokens is None else (self.num_draft_tokens,)
        return tuple(chain(length) for length in lengths)

    @property
    def is_adaptive(self) -> bool:
        return self.num_draft_tokens is None and self.tree is None


@dataclass(frozen=True)
class EngineOptions:
    """Attributes:
    max_model_len: tokens of prompt and answer together. max_seqs: answers generated at once.
    page_size: tokens of a page; None is 64 on a TPU and 16 elsewhere. num_pages: pages of the pool; None fills
      memory_fraction of the device's memory (on a CPU no more than max_seqs answers of max_model_len can use).
    prefill_chunk: prompt tokens of a step; None is 512, or what max_seqs leaves of 256 if deterministic.
    steps_per_dispatch: decode steps of a dispatch when no prompt waits; one if deterministic.
    deterministic: every token goes through one program of one shape (256 tokens, unless prefill_chunk and max_seqs need
      more), so that log-probabilities keep every bit whatever else is in the batch and however a prompt is cut. Slower.
    prefix_cache: keep the pages of finished work and reuse them where a prompt begins alike.
    max_waiting: requests that may wait, None for any number. shuffle_seed: orders the pages at random (for tests).
    kv_dtype: what keys and values are stored as: "auto" is what the model computes in; "float32", "bfloat16",
      "float16", "int8" (with a scale for each token and head), "fp8_e4m3", "fp8_e5m2".
    speculation: for an engine with a draft.
    """

    max_model_len: int
    max_seqs: int
    page_size: int | None = None
    num_pages: int | None = None
    memory_fraction: float = 0.9
    prefill_chunk: int | None = None
    steps_per_dispatch: int = 8
    deterministic: bool = False
    prefix_cache: bool = True
    max_waiting: int | None = None
    shuffle_seed: int | None = None
    kv_dtype: str = "auto"
    speculation: SpeculationOptions | None = None

    def __post_init__(self) -> None:
        optional = ("page_size", "num_pages", "prefill_chunk", "max_waiting")
        for name in ("max_model_len", "max_seqs", "steps_per_dispatch", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        check_kv_dtype(self.kv_dtype)
        if self.num_pages == 1:
            raise ValueError("num_pages=1: a pool needs the null page and at least one more")
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ValueError(f"memory_fraction must be in (0, 1], got {fraction!r}")
        for name in ("deterministic", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.deterministic and self.speculation is not None and self.speculation.tree is not None:
            raise ValueError(
                f"deterministic=True keeps every bit, and draft_tree={self.speculation.tree} does not: the keys of a "
                f"tree are added up in another order; use a chain, num_draft_tokens"
            )

    @property
    def chunk(self) -> int:
        """Prompt tokens of a step."""
        default = DEFAULT_CHUNK
        if self.deterministic:  # what the decoding answers leave of a step
            default = UNIFORM_STEP_TOKENS - self.max_seqs % UNIFORM_STEP_TOKENS
        return min(self.prefill_chunk or default, self.max_model_len)

    @cached_property
    def decode_slots(self) -> tuple[int, ...]:
        """Numbers of slots that decode programs exist for: 1, 4, 8, 16, ... and max_seqs."""
        return _buckets((1, *(4 * 2**i for i in range(16))), self.max_seqs)

    @cached_property
    def step_slots(self) -> tuple[int, ...]:
        """Numbers of slots that steps exist for: there only the sampler's work depends on it."""
        return (self.max_seqs,) if self.deterministic else _buckets((1,), self.max_seqs)

    @cached_property
    def token_buckets(self) -> tuple[int, ...]:
        """Numbers of tokens that steps exist for: 32, 128, 256, ... and a whole chunk beside max_seqs slots."""
        if self.deterministic:
            most = self.chunk + self.max_seqs
            if self.speculation is not None:
                most = max(most, self.max_seqs * self.speculation.trees[-1].num_nodes)
            return (-(-most // UNIFORM_STEP_TOKENS) * UNIFORM_STEP_TOKENS,)
        largest = -(-(self.chunk + self.max_seqs) // 16) * 16
        return _buckets((MIN_STEP_TOKENS, *(4 * MIN_STEP_TOKENS * 2**i for i in range(16))), largest)


def _buckets(sizes: Iterable[int], largest: int) -> tuple[int, ...]:
    """The sizes below the largest one, and that."""
    return (*(size for size in sizes if size < largest), largest)
