"""Quest: everything is kept, answers read the best pages. Its programs are in `best_pages`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxinfer.cache.policy.contract import (
    CachePolicy,
    LayerPages,
    PolicyUse,
    SlotRows,
    StepRows,
    check_tokens,
    own_pages,
    refuse_draft_in_cache,
    refuse_kinds,
)
from jaxinfer.cache.policy.sinks_window import refuse_windows_only

if TYPE_CHECKING:
    from jaxinfer.cache.paged import PagedCache, PageTables
    from jaxinfer.models import ModelConfig


@dataclass(frozen=True)
class Quest(CachePolicy):
    """Keeps everything; a token of an answer attends to the best pages only (Quest, Tang et al. 2024, section 3): in a
    layer without a window, to the `num_pages` full pages with the greatest bounds of its scores, and its own. Prompts,
    and the first layers, attend to everything.

    Attributes:
      budget: tokens, at least so many: whole pages are read, beside the token's own page.
      num_dense_layers: the first layers, whose answers read all pages.

    Raises ValueError for a number below 1.
    """

    budget: int
    num_dense_layers: int = 2

    is_same_in_prompts: ClassVar[bool] = False
    needs_prompt_lengths: ClassVar[bool] = True
    num_replayed: ClassVar[int] = 32  # each has a choice of its own
    leaves_name: ClassVar[str] = "bounds"
    packs_slots: ClassVar[bool] = False  # parts of a pass are rows of slots that all have as many

    def __post_init__(self) -> None:
        check_tokens(self.budget, f"quest({self.budget})")

    def __str__(self) -> str:
        return f"quest({self.budget})"

    @property
    def num_pages(self) -> int:
        """Pages that are chosen."""
        return -(-self.budget // self.page_size)

    @property
    def num_kept(self) -> int:
        """Tokens that a token of an answer attends to, at most."""
        return (self.num_pages + 1) * self.page_size

    def describe(self, config: ModelConfig) -> str:
        count = sum(self._chooses(config, layer) for layer in range(config.num_layers))
        text = (
            f"{self}: all kept; in {count} of {config.num_layers} layers a token of an answer reads the bounds of all "
        )
        text += f"full pages, the best {self.num_pages} pages of {self.page_size} tokens and its own, at most "
        return text + f"{self.num_kept:,} tokens; a prompt reads everything"

    def of_layers(self, layers: Sequence[int]) -> Self:
        return replace(self, num_dense_layers=sum(layer < self.num_dense_layers for layer in layers))

    def check(self, use: PolicyUse) -> None:
        """Raises ValueError for models with latent attention or states, or without a layer to which it applies, for
        several devices and for drafts by the model's own layers."""
        refuse_kinds(use)
        refuse_draft_in_cache(use)
        refuse_windows_only(use)
        if not any(self._chooses(use.config, layer) for layer in range(use.config.num_layers)):
            raise ValueError(
                f"{use.name} is for layers after the first {self.num_dense_layers}: {use.config.architecture} has none "
                f"without a window"
            )

    def layers(self, config: ModelConfig) -> tuple[LayerPages, ...]:
        layers = range(config.num_layers)
        return tuple(
            LayerPages("best") if self._chooses(config, layer) else own_pages(config, layer) for layer in layers
        )

    def _chooses(self, config: ModelConfig, layer: int) -> bool:
        return layer >= self.num_dense_layers and own_pages(config, layer).kind == "full"

    def num_seen(self, layer: int, pages: LayerPages) -> int | None:
        return self.num_kept if pages.kind == "best" else pages.window

    def page_leaves(self, config: ModelConfig, layer: int, pages: Any, dtype: str, layout: str) -> Any:
        from jaxinfer.cache.policy.best_pages import abstract_bounds

        if not self._chooses(config, layer):
            return None
        heads = config.num_kv_heads_of(layer), config.head_dim_of(layer)
        return abstract_bounds(pages, heads, dtype, layout)

    def attend_step(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: StepRows) -> Any:
        from jaxinfer.cache.policy.best_pages import BestAttention, query_parts_of_step

        _refuse(rows)
        # The layers that choose are in the first group, of those without a window.
        parts = query_parts_of_step(self, page_tables[0], rows)
        return BestAttention(super().attend_step(config, cache.bare, page_tables, rows), cache, parts)

    def attend_slots(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: SlotRows) -> Any:
        from jaxinfer.cache.policy.best_pages import BestAttention, query_parts_of_slots

        _refuse(rows, has_tree=rows.ancestors is not None)
        parts = query_parts_of_slots(self, page_tables[0], rows)
        return BestAttention(super().attend_slots(config, cache.bare, page_tables, rows), cache, parts)

    def ragged_shape(self, num_tokens: int, num_slots: int, num_columns: int, is_step: bool) -> tuple[int, int]:
        if is_step:
            return min(num_tokens, num_slots + self.num_replayed), num_columns
        return num_slots, min(num_columns, self.num_pages + 1)


def _refuse(rows: StepRows | SlotRows, *, has_tree: bool = False) -> None:
    if rows.mesh is not None or has_tree:
        raise NotImplementedError("attention to the best pages has no mesh and no trees of drafts")
