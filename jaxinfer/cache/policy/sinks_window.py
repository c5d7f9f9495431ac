"""Sinks and a window: the first tokens of a sequence and its last ones. Its programs are in `kept_pages`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxinfer.cache.policy.contract import (
    CachePolicy,
    GroupKind,
    LayerPages,
    PolicyUse,
    SlotRows,
    StepRows,
    check_tokens,
    num_parts,
    own_pages,
    refuse_draft_in_cache,
    refuse_kinds,
)

if TYPE_CHECKING:
    import jax

    from jaxinfer.cache.paged import PagedCache, PageTables
    from jaxinfer.models import ModelConfig


@dataclass(frozen=True)
class SinksWindow(CachePolicy):
    """Keeps the first tokens of a sequence and its last ones (StreamingLLM, Xiao et al. 2023, section 3.2), in layers
    without a window of their own. A token attends to the pages of the sinks, to those of the window before its own
    page, and to its own page up to itself.

    Attributes:
      sinks, window: tokens, at least so many of each: the policy keeps whole pages.
      trained: the length, in tokens, that the model was trained for, if sequences may be longer. Tokens of pages that
        end beyond it see the sinks right before the window: positions are those in the cache.

    Raises ValueError for numbers below 1.
    """

    sinks: int
    window: int
    trained: int | None = None

    extends_length: ClassVar[bool] = True
    drops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("sinks", "window"):
            check_tokens(getattr(self, name), f"{name}({getattr(self, name)})")

    def __str__(self) -> str:
        return f"sinks({self.sinks})+window({self.window})"

    @property
    def num_sinks(self) -> int:
        """First pages that a token attends to."""
        return -(-self.sinks // self.page_size)

    @property
    def num_window(self) -> int:
        """Pages before its own that a token attends to."""
        return -(-self.window // self.page_size)

    @property
    def num_columns(self) -> int:
        """Pages that a token attends to, at most."""
        return self.num_sinks + self.num_window + 1

    @property
    def num_kept(self) -> int:
        """Tokens that a token attends to, at most."""
        return self.num_columns * self.page_size

    def describe(self, config: ModelConfig) -> str:
        text = f"{self}: pages of {self.page_size} tokens, {self.num_sinks} first, {self.num_window} before "
        text += f"a token's own; at most {self.num_kept:,} tokens attended to"
        if self.trained is not None:
            text += f"; beyond {self.trained:,} tokens, positions are those in the cache"
        return text

    def bound(self, page_size: int, trained: int | None) -> Self:
        return replace(self, page_size=page_size, trained=trained)

    def check(self, use: PolicyUse) -> None:
        """Raises ValueError for models with latent attention or states, without a layer to which it applies or with a
        window that is longer than its own, for several devices and drafts by the model's own layers; and for sequences
        longer than the model's where what a token attends to is longer too, or a key cannot be moved by a rotation."""
        refuse_kinds(use)
        refuse_draft_in_cache(use)
        refuse_windows_only(use)
        config, name, size = use.config, use.name, self.num_window * self.page_size
        longest = max(
            (window for window in map(config.window, config.attention_layers) if window is not None), default=0
        )
        if longest > size:
            raise ValueError(f"{name} keeps {size} tokens, fewer than the model's own window of {longest}")
        if self.trained is not None:
            self._check_positions(use, f"{name} with sequences of more than {self.trained} tokens", self.trained)

    def _check_positions(self, use: PolicyUse, name: str, trained: int) -> None:
        from jaxinfer.cache.kv_dtype import is_rotated, kv_dtype_name

        config = use.config
        if is_rotated(use.kv_dtype):
            raise ValueError(
                f"{name} moves keys, which would round those of kv_dtype={kv_dtype_name(use.kv_dtype)!r} once more"
            )
        if self.num_kept > trained:
            raise ValueError(f"{name}, for which {config.architecture} was trained, attends to {self.num_kept}")
        if config.has_position_embedding:
            raise ValueError(f"{name}: {config.architecture} has an embedding of each position, and no more of them")
        if config.attention_chunk is not None:
            raise ValueError(f"{name}: {config.architecture} attends within chunks of {config.attention_chunk}")
        if config.is_qk_norm_after_rotation:
            raise ValueError(f"{name}: {config.architecture} normalizes keys after their rotation")
        for rope in config.ropes:
            if rope.depends_on_length or rope.query_scale_beta is not None:
                raise ValueError(f"{name}: rotations of kind {rope.kind!r} depend on the length of a sequence")
        if config.query_temperature is not None:
            raise ValueError(f"{name}: {config.architecture} scales queries by their position")

    def layers(self, config: ModelConfig) -> tuple[LayerPages, ...]:
        # A group of layers must have all pages of the window of a page's first token: so many whole pages and itself.
        kept = LayerPages("kept", self.num_window * self.page_size + 1, self.num_sinks)
        own = (own_pages(config, layer) for layer in range(config.num_layers))
        return tuple(kept if pages.kind == "full" else pages for pages in own)

    def num_seen(self, layer: int, pages: LayerPages) -> int | None:
        return self.num_kept if pages.kind == "kept" else pages.window

    def num_scratch(self, pages: GroupKind, num_tokens: int, num_slots: int) -> int:
        """Pages for moved sinks; none where no position is relative."""
        _, num_sinks, _ = pages
        if self.trained is None:
            return 0
        return num_sinks * max(num_parts(self.page_size, num_tokens, num_slots), num_slots)

    def limit_rows(self, positions: jax.Array, counts: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        # All rows of a pass attend to the same pages.
        return jnp.minimum(counts, self.page_size - positions % self.page_size)

    def attend_step(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: StepRows) -> Any:
        from jaxinfer.cache.policy.kept_pages import attend_to_pieces, pieces

        return attend_to_pieces(cache, self, pieces(self, config, cache, page_tables, rows), rows)

    def attend_slots(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: SlotRows) -> Any:
        from jaxinfer.cache.policy.kept_pages import kept_view
        from jaxinfer.cache.ragged import attend_ragged

        view = kept_view(self, config, cache, page_tables, rows.positions, rows.lengths)
        ragged = view.page_tables, rows.starts, rows.lengths, view.kv_lengths
        return attend_ragged(cache, *ragged, moved=view.moved, **rows.options)


def refuse_windows_only(use: PolicyUse) -> None:
    """Raises ValueError for a model whose layers all have a window."""
    config = use.config
    windows = [window for window in map(config.window, config.attention_layers) if window is not None]
    if len(windows) == len(config.attention_layers):
        raise ValueError(
            f"{use.name}: all layers of {config.architecture} have a window already, of {max(windows)} tokens"
        )
