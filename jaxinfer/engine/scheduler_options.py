"""What a scheduler is made for: its pools and limits. Plain Python: no JAX here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.cache.policy.contract import CachePolicy, PromptEnd
from jaxinfer.cache.policy.kinds import KEEPS_ALL
from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.host_tier import HostPoolSize

if TYPE_CHECKING:
    from jaxinfer.engine.spec import EngineSpec


@dataclass(frozen=True)
class SchedulerOptions:
    """Attributes:
    num_pages, page_size: the pool, null page included, and tokens of a page. window: of the layers whose keys it has;
      None where they see all. num_sinks: its first pages of a sequence that are never given back. more_groups: further
      pools, of layers with other windows.
    max_seqs: sequences that run at once.
    prefill_chunk: prompt tokens of a step. steps_per_dispatch: decode steps of a dispatch with nothing else to do.
    max_waiting: sequences that may wait for a slot, None for any number. reuses_prefixes: whether pages of finished
      work are kept and found again. shuffle_seed: orders the pages at random (for tests). has_states: whether layers
      keep a state of each sequence. num_saved_states: places for states that are kept, without which a model with
      states reuses nothing; save_interval: they are of multiples of so many tokens, and of pages. host_pools: host
      pages of each group of layers, and of saved states; () for none. at_end: what a prompt loses at its end in the
      first group. policy: of the cache. max_step_tokens: tokens of a step in all; None for prefill_chunk beside
      decoding sequences.
    """

    num_pages: int
    page_size: int
    max_seqs: int
    prefill_chunk: int
    steps_per_dispatch: int = 1
    max_waiting: int | None = None
    reuses_prefixes: bool = True
    has_states: bool = False
    num_saved_states: int = 0
    save_interval: int = 0
    shuffle_seed: int | None = None
    window: int | None = None
    more_groups: tuple[CacheGroup, ...] = ()
    host_pools: tuple[HostPoolSize, ...] = ()
    num_sinks: int = 0
    at_end: PromptEnd | None = None
    policy: CachePolicy = KEEPS_ALL
    max_step_tokens: int | None = None

    @classmethod
    def of(cls, spec: "EngineSpec", host_pools: tuple[HostPoolSize, ...] = ()) -> "SchedulerOptions":
        """Those of an engine."""
        return cls(
            num_pages=spec.num_pages,
            page_size=spec.page_size,
            max_seqs=spec.max_seqs,
            prefill_chunk=spec.prefill_chunk,
            steps_per_dispatch=spec.steps_per_dispatch,
            max_waiting=spec.options.max_waiting,
            reuses_prefixes=spec.reuses_prefixes,
            has_states=spec.has_states,
            num_saved_states=spec.num_saved_states,
            save_interval=spec.save_interval,
            shuffle_seed=spec.options.shuffle_seed,
            window=spec.windows[0],
            num_sinks=spec.groups[0].num_sinks,
            at_end=spec.groups[0].at_end,
            more_groups=spec.groups[1:],
            host_pools=host_pools,
            policy=spec.policy,
            max_step_tokens=spec.token_buckets[-1],
        )

    @property
    def can_rewind(self) -> bool:
        """Whether tokens that are refused can be taken back."""
        return not self.has_states and self.policy.can_rewind

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """All groups of layers, each with a pool."""
        first = CacheGroup(self.num_pages, self.window, num_sinks=self.num_sinks, at_end=self.at_end)
        return (first, *self.more_groups)

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_seqs", "prefill_chunk", "steps_per_dispatch", "max_waiting"):
            value = getattr(self, name)
            if value is None and name == "max_waiting":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.has_states and self.reuses_prefixes and not self.num_saved_states:
            raise ValueError("prefixes of a model with states are reused from saved states: there are none")
        if self.reuses_prefixes and not self.policy.reuses_prefixes:
            raise ValueError("pages in which tokens are dropped cannot be those of a prefix")
        if self.num_saved_states and (self.save_interval < 1 or self.save_interval % self.page_size):
            raise ValueError(f"save_interval={self.save_interval} is no multiple of page_size={self.page_size}")
