"""H2O: the last tokens and the heavy hitters before them. Its programs are in `heavy_hitters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxinfer.cache.policy.contract import (
    CachePolicy,
    PolicyUse,
    SequenceLengths,
    SlotRows,
    StepRows,
    check_tokens,
    refuse_kinds,
)

if TYPE_CHECKING:
    from jaxinfer.cache.paged import PagedCache, PageTables
    from jaxinfer.models import ModelConfig


@dataclass(frozen=True)
class H2O(CachePolicy):
    """Keeps the last tokens of a sequence, and of the older ones those that queries attended to most, each key head for
    itself (Zhang et al. 2023, section 4).

    How many stay is a function of a sequence's length: when page `num_pages` + 1 is full, a page of tokens is dropped,
    and at a prompt's end as many whole pages as leave less than that. Tokens that stay are moved together, in the
    sequence's first pages.

    Attributes:
      budget: tokens, at least so many are kept: whole pages are dropped. Half of them are the last ones.

    Raises ValueError for a budget below 2.
    """

    budget: int

    drops: ClassVar[bool] = True
    is_same_in_prompts: ClassVar[bool] = False
    moves_in_place: ClassVar[bool] = True
    reuses_prefixes: ClassVar[bool] = False  # sums are of all queries of a sequence
    can_rewind: ClassVar[bool] = False
    needs_prompt_lengths: ClassVar[bool] = True
    leaves_name: ClassVar[str] = "sums"

    def __post_init__(self) -> None:
        check_tokens(self.budget, f"h2o({self.budget})", least=2)

    def __str__(self) -> str:
        return f"h2o({self.budget})"

    @property
    def num_pages(self) -> int:
        """Pages that stay when a page is dropped."""
        return -(-self.budget // self.page_size)

    @property
    def num_recent(self) -> int:
        """Last tokens, which always stay."""
        return self.budget // 2

    @property
    def num_columns(self) -> int:
        """Pages that an answer needs, at most."""
        return self.num_pages + 1

    @property
    def num_tokens(self) -> int:
        """Tokens that a token of an answer attends to, at most."""
        return self.num_columns * self.page_size

    @property
    def num_kept(self) -> int:
        return self.budget

    def describe(self, config: ModelConfig) -> str:
        return (
            f"{self}: each key head keeps at most {self.num_tokens:,} tokens of a prompt that has ended and its "
            f"answer, the last {self.num_recent:,} and those that were attended to most; pages of {self.page_size} "
            f"tokens; no prefix is reused"
        )

    def check(self, use: PolicyUse) -> None:
        """Raises ValueError for models with latent attention or states, with windows, or with layers that read another
        one's keys, for several devices, drafts, caches of beginnings in host memory, and sequences longer than the
        model's."""
        refuse_kinds(use)
        config, name = use.config, use.name
        if use.draft:
            raise ValueError(f"{name} cannot be combined with a draft: rejected tokens would count among the queries")
        if windows := [window for window in map(config.window, config.attention_layers) if window is not None]:
            raise ValueError(f"{name}: layers of {config.architecture} have a window of {max(windows)} tokens")
        if any(config.kv_source(layer) != layer for layer in config.attention_layers):
            raise ValueError(f"{name}: layers of {config.architecture} read the keys of other layers")
        if use.host_cache_gib is not None:
            raise ValueError(
                f"{name} reuses no prefixes, as it adds up what all queries attend to: it cannot be combined with "
                f"host_cache_gib={use.host_cache_gib}"
            )
        if use.max_model_len > config.max_length:
            raise ValueError(
                f"{name}: {config.architecture} was trained for {config.max_length} tokens, and positions are those of "
                f"the whole sequence: max_model_len={use.max_model_len} is more"
            )

    def num_dropped(self, num_stored: int) -> int:
        """Tokens that are dropped of an answer with its prompt, of which so many tokens were stored."""
        return max(num_stored // self.page_size - self.num_pages, 0) * self.page_size

    def num_held(self, num_prompt: int, num_tokens: int) -> int:
        return num_tokens if num_tokens <= num_prompt else min(num_tokens, self.num_tokens)

    def most_held(self, num_prompt: int, num_tokens: int) -> int:
        return max(min(num_prompt, num_tokens), self.num_held(num_prompt, num_tokens))

    def write_offset(self, sequence: SequenceLengths) -> int:
        count = sequence.num_stored
        return count if count < sequence.num_prompt else count - self.num_dropped(count)

    def next_stop(self, sequence: SequenceLengths) -> int:
        """Pieces end where tokens are dropped, at a prompt's end and where pages of an answer are full: each attends
        to what was kept then."""
        count = sequence.num_stored
        if count < sequence.num_prompt:
            return min(sequence.num_prompt, sequence.target)
        return min((count // self.page_size + 1) * self.page_size, sequence.target)

    def page_leaves(self, config: ModelConfig, layer: int, pages: Any, dtype: str, layout: str) -> Any:
        from jaxinfer.cache.policy.heavy_hitters import abstract_sums

        return abstract_sums(pages, config.num_kv_heads_of(layer))

    def attend_step(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: StepRows) -> Any:
        from jaxinfer.cache.policy.heavy_hitters import attend_step

        return attend_step(self, config, cache, page_tables, rows)

    def attend_slots(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: SlotRows) -> Any:
        from jaxinfer.cache.policy.heavy_hitters import attend_decoding

        if rows.count != 1:
            raise NotImplementedError("sums of what queries attend to count no drafts, which may be rejected")
        return attend_decoding(self, config, cache, page_tables, rows.positions, rows.lengths)

    def working_bytes(self, config: ModelConfig, max_model_len: int, max_seqs: int, itemsize: int) -> int:
        """Bytes of the second pass over the keys of decoding slots, in one layer: as compilers make it, keys, values
        with them, and the same in another order; and scores."""
        num_keys = max_seqs * self.num_tokens
        return num_keys * (4 * config.num_kv_heads * config.head_dim * itemsize + 8 * config.num_heads)
