"""The contract of a cache policy. Its host half is plain Python: no JAX is loaded before a program is traced.

A policy says which keys and values stay when a sequence grows, or are read. It is a property of an engine. What it
drops, it drops at positions (where a page fills, or where a prompt ends), so that an answer is still a function of its
request: a token attends to the same keys alone or in a batch, however its prompt is cut.

`CachePolicy` itself keeps everything. A policy is a subclass in one file, and a line in `kinds.py` or a call of
`kinds.register`; scheduler, programs, memory, plan and reports ask these methods and know none by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxinfer.cache.paged import PagedCache, PageTables, PromptPages
    from jaxinfer.models import Decoder, ModelConfig


class SequenceLengths(Protocol):
    """Lengths of a sequence, in tokens.

    Attributes:
      num_prompt: of its prompt. num_stored: planned to be in the cache. num_confirmed: known to be there. target: that
        it has, all of which are stored before its next one is chosen.
    """

    @property
    def num_prompt(self) -> int: ...
    @property
    def num_stored(self) -> int: ...
    @property
    def num_confirmed(self) -> int: ...
    @property
    def target(self) -> int: ...


class PromptEnd(Protocol):
    """Rule of what a group of layers loses of a prompt at its end: whole pages, so that later tokens keep their places
    within pages; hashable. The prompt's last `num_observed` tokens are computed in a pass of their own, which moves
    what stays to fresh pages (`CachePolicy.attend_end`).
    """

    @property
    def name(self) -> str:
        """Name of the group in reports."""
        ...

    @property
    def num_observed(self) -> int: ...

    @property
    def order(self) -> int:
        """Groups of layers without a window come in this order."""
        ...

    @property
    def most_pages(self) -> int:
        """Fresh pages that a prompt takes, at most."""
        ...

    def num_dropped(self, num_prompt: int) -> int:
        """Pages that a prompt of so many tokens loses."""
        ...


GroupKind = tuple[int | None, int, "PromptEnd | None"]


@dataclass(frozen=True)
class LayerPages:
    """Pages of keys and values of one layer.

    Attributes:
      kind: "full", "window" (only the last `window` tokens are read), "latent" (keys that hold the values),
        "contiguous" (one page per slot), or a policy's word.
      window: tokens that a query of the layer sees; None for all. Pages behind it are given back.
      num_sinks: first pages of a sequence that are read beside the window. at_end: what a prompt loses at its end.
    """

    kind: str
    window: int | None = None
    num_sinks: int = 0
    at_end: PromptEnd | None = None

    @property
    def group(self) -> GroupKind:
        """Properties that layers of one group have in common."""
        return self.window, self.num_sinks, self.at_end


@dataclass(frozen=True)
class PolicyUse:
    """Model and options that a policy runs with, some of which it may refuse.

    Attributes:
      name: the option as it was given, "kv_policy='h2o(64)'".
      max_model_len: in tokens. num_devices: of one replica. kv_dtype: what keys are stored as.
      draft: the draft as people give it, "" for none. draft_in_cache: whether it stores keys in the target's cache.
      host_cache_gib: as the engine's option.
    """

    name: str
    config: ModelConfig
    max_model_len: int
    num_devices: int = 1
    kv_dtype: Any = None
    draft: str = ""
    draft_in_cache: bool = False
    host_cache_gib: Any = None


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, which has prompts and decoding slots: T rows of S slots, arrays while tracing.

    Attributes:
      token_slots: int32 [T], the slot of each row, S for padding. query_starts, lengths, ends: int32 [S], each slot's
        first row, its rows, and the tokens that were ever stored of it after the step.
      is_decoding: bool [S], whether the row is an answer's newest token. prompt_lengths: int32 [S], for a policy that
        asks (`needs_prompt_lengths`).
      is_uniform: static, whether every row gets the same arithmetic. mesh: as `PagedAttention`.
    """

    token_slots: jax.Array
    query_starts: jax.Array
    lengths: jax.Array
    ends: jax.Array
    is_decoding: jax.Array
    prompt_lengths: jax.Array | None
    is_uniform: bool = False
    mesh: Mesh | None = None


@dataclass(frozen=True)
class SlotRows:
    """The rows of a pass in which each of S slots has as many: the newest token of each, or what was drafted for it.

    Attributes:
      starts: int32 [S], each slot's first row. positions: int32 [S], of that row's token. lengths: int32 [S], of its
        `count` (static) rows those that take part; a policy has bounded them (`limit_rows`).
      ancestors: uint32 [T] of a tree of drafts. max_deferred: static; with it the states of recurrent layers are
        committed later. is_uniform, mesh: as `StepRows`.
    """

    starts: jax.Array
    positions: jax.Array
    lengths: jax.Array
    count: int
    ancestors: jax.Array | None = None
    max_deferred: int | None = None
    is_uniform: bool = False
    mesh: Mesh | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those of `attend_ragged`."""
        longest = None if self.is_uniform else self.count
        options: dict[str, Any] = {"max_query_length": longest, "ancestors": self.ancestors, "mesh": self.mesh}
        return {**options, "is_uniform": self.is_uniform, "max_deferred": self.max_deferred}


@dataclass(frozen=True)
class EndWork:
    """The pass over the last tokens of one prompt, while tracing.

    Attributes:
      decoder, cache: of the model. prompts: by group of layers, where the prompt lies and goes (`PromptPages`).
      positions: int32 [W], of the last tokens. end: int32 scalar, the prompt's length.
      before: int32 [n], the tokens before them with padding, for a policy with a `prompt_block`.
      is_uniform: as `StepRows`.
    """

    decoder: Decoder
    cache: PagedCache
    prompts: tuple[PromptPages, ...]
    positions: jax.Array
    end: jax.Array
    before: jax.Array | None
    is_uniform: bool = False

    def attend(self, cache: PagedCache) -> Any:
        """`attend` over all of the prompt, which moves nothing."""
        import jax.numpy as jnp

        from jaxinfer.cache.ragged import attend_ragged

        nothing, tables = jnp.zeros(1, jnp.int32), tuple(prompt.page_table[None] for prompt in self.prompts)
        lengths = nothing + self.positions.shape[0]
        return attend_ragged(cache, tables, nothing, lengths, self.end[None], is_uniform=self.is_uniform)


@dataclass(frozen=True)
class CachePolicy:
    """Keeps and reads everything: the contract, with what holds where a policy says nothing else.

    Attributes:
      page_size: tokens of a page of the engine's cache, 0 before `bound`, and where everything is kept.
    """

    page_size: int = field(default=0, kw_only=True)

    # What it is, for people and for choices between policies.

    extends_length: ClassVar[bool] = False  # sequences may be longer than what the model was trained for
    drops: ClassVar[bool] = False  # some tokens cannot be read any more
    is_same_in_prompts: ClassVar[bool] = True  # a token of a prompt sees what one of an answer would see in its place

    def describe(self, config: ModelConfig) -> str | None:
        """Sentence for reports, in whole pages; None where everything is kept."""
        del config

    @property
    def num_kept(self) -> int | None:
        """Tokens that a sequence keeps or reads, about; None for all."""

    # What it is made for.

    def bound(self, page_size: int, trained: int | None) -> Self:
        """The policy of a cache with pages of so many tokens. `trained` is the length that the model was trained for,
        if sequences may be longer."""
        del trained
        return self if type(self) is CachePolicy else replace(self, page_size=page_size)

    def of_layers(self, layers: Sequence[int]) -> Self:
        """The policy of a model that has only these layers of the one that it is for."""
        del layers
        return self

    def check(self, use: PolicyUse) -> None:
        """Raises ValueError, with the policy and what it cannot be combined with."""

    # Pages, by layer and by sequence. The tables of all groups are equally long.

    def layers(self, config: ModelConfig) -> tuple[LayerPages, ...]:
        """Pages of each layer."""
        return tuple(own_pages(config, layer) for layer in range(config.num_layers))

    def num_seen(self, layer: int, pages: LayerPages) -> int | None:
        """Tokens that a query of a layer sees, at most; None for all. Of an answer, where that differs."""
        del layer
        return pages.window

    def num_scratch(self, pages: GroupKind, num_tokens: int, num_slots: int) -> int:
        """Pages of a group beside the pool's that a step of so many tokens uses within its pass."""
        del pages, num_tokens, num_slots
        return 0

    moves_in_place: ClassVar[bool] = False  # tokens are moved together in a sequence's own pages, where room is then

    def num_held(self, num_prompt: int, num_tokens: int) -> int:
        """Tokens for which a sequence of `num_tokens` tokens needs room, of which `num_prompt` are the prompt's."""
        del num_prompt
        return num_tokens

    def most_held(self, num_prompt: int, num_tokens: int) -> int:
        """The most of `num_held` while it grows to `num_tokens` tokens."""
        del num_prompt
        return num_tokens

    def write_offset(self, sequence: SequenceLengths) -> int:
        """Place of the next token of a sequence: the number of tokens before it in its pages."""
        return sequence.num_stored

    # Steps.

    reuses_prefixes: ClassVar[bool] = True  # a page of its tokens is that of any text that begins alike
    can_rewind: ClassVar[bool] = True  # tokens that are refused can be taken back
    needs_prompt_lengths: ClassVar[bool] = False  # steps must know where prompts end
    # Tokens of answers that are computed again after a preemption, which one step takes; None where they are as those
    # of a prompt. Where they are not, only pages of prompts enter the prefix tree.
    num_replayed: ClassVar[int | None] = None

    def next_stop(self, sequence: SequenceLengths) -> int:
        """Tokens up to which the next piece of a sequence goes, at most."""
        return sequence.target

    # Programs; called while tracing.

    def page_leaves(self, config: ModelConfig, layer: int, pages: Any, dtype: str, layout: str) -> Any:
        """Further arrays of each page in a layer, as `jax.ShapeDtypeStruct`s whose first axis is the pages: they lie
        beside them (`LeafedPages`), and are copied, moved to host memory and back, and freed with them. None for none.
        """
        del config, layer, pages, dtype, layout

    leaves_name: ClassVar[str] = "leaves"  # what people read of `page_leaves`

    packs_slots: ClassVar[bool] = True  # whether `attend_slots` takes slots with different numbers of rows side by side

    def limit_rows(self, positions: jax.Array, counts: jax.Array) -> jax.Array:
        """int32 [S]: of `counts` int32 [S] rows from `positions` int32 [S] on, those that one pass may have."""
        del positions
        return counts

    def attend_step(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: StepRows) -> Any:
        """`attend` of a step, as `attend_ragged`."""
        from jaxinfer.cache.paged import visible_tables
        from jaxinfer.cache.ragged import attend_ragged

        del config
        tables, ends = visible_tables(cache, page_tables, rows.ends, rows.lengths)
        options: Any = {"is_uniform": rows.is_uniform, "mesh": rows.mesh}
        return attend_ragged(cache, tables, rows.query_starts, rows.lengths, ends, **options)

    def attend_slots(self, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: SlotRows) -> Any:
        """`attend` of a pass over newest tokens, or over drafts that are verified; its `commit` says which stay."""
        from jaxinfer.cache.paged import visible_tables
        from jaxinfer.cache.ragged import attend_ragged

        del config
        tables, ends = visible_tables(cache, page_tables, rows.positions + rows.lengths, rows.lengths)
        return attend_ragged(cache, tables, rows.starts, rows.lengths, ends, **rows.options)

    # The pass over a prompt's last tokens, of a policy whose layers lose some of it there (`LayerPages.at_end`).

    @property
    def prompt_block(self) -> int:
        """Tokens of the blocks in which the pass computes all of the prompt once more; 0 where it does not."""
        return 0

    def attend_end(self, work: EndWork) -> Any:
        """`attend` of the prompt's last tokens, which attend to all of it, and which leaves what stays in its targets:
        an `AttentionByLayer` whose `cache` is the updated one."""
        raise NotImplementedError(f"{self} has no pass at a prompt's end")

    # What it takes beside pages, and what kernels see.

    def working_bytes(self, config: ModelConfig, max_model_len: int, max_seqs: int, itemsize: int) -> int:
        """Bytes of arrays that a pass needs beside the model's activations."""
        del config, max_model_len, max_seqs, itemsize
        return 0

    def ragged_shape(self, num_tokens: int, num_slots: int, num_columns: int, is_step: bool) -> tuple[int, int]:
        """Rows and columns of the page table that kernels get in a step, or in a decode step."""
        del num_tokens, is_step
        return num_slots, num_columns


def own_pages(config: ModelConfig, layer: int) -> LayerPages:
    """Pages of a layer without a policy."""
    if config.mla is not None:
        return LayerPages("latent")
    window = config.window(layer)
    return LayerPages("full") if window is None else LayerPages("window", window)


def refuse_kinds(use: PolicyUse) -> None:
    """Raises ValueError for models whose cache is not one of keys and values of each token, and for several devices."""
    architecture = use.config.architecture
    if use.config.mla is not None:
        raise ValueError(f"{use.name}: {architecture} has latent attention, whose cache is kept whole")
    if use.config.recurrent_layers:
        raise ValueError(f"{use.name}: {architecture} has recurrent layers, whose states are of all tokens")
    if use.num_devices > 1:
        raise ValueError(f"{use.name} runs on one device, not {use.num_devices}")


def refuse_draft_in_cache(use: PolicyUse) -> None:
    """Raises ValueError for a draft that stores keys in the target's cache."""
    if use.draft_in_cache:
        raise ValueError(f"{use.name} cannot be combined with draft={use.draft!r}: use a model or 'ngram'")


def check_tokens(value: Any, text: str, least: int = 1) -> None:
    """Raises ValueError for what is no number of tokens, or fewer than `least`; `text` is what was given."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive number of tokens" if least == 1 else f"at least {least} tokens"
        raise ValueError(f"{text} of a kv_policy must be {wanted}")


def num_parts(page_size: int, num_tokens: int, num_slots: int) -> int:
    """Parts within a page of a step of so many tokens, at most: n tokens of a sequence lie in n / page_size pages and
    two more."""
    return min(num_tokens, num_tokens // page_size + 2 * num_slots)
