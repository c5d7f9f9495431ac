"""The jitted program that computes the last tokens of a prompt and compacts the prompt's cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache import PagedCache
from jaxinfer.cache.paged import PromptPages
from jaxinfer.cache.policy.contract import CachePolicy, EndWork
from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.compiling import LargeProgram
from jaxinfer.engine.plans import GroupMove
from jaxinfer.engine.programs import MIN_HEAD_ROWS, ProgramModel, Weights, padded
from jaxinfer.engine.programs.paged import all_taps, returned_taps
from jaxinfer.models import collect
from jaxinfer.speculative import ObservedRows, ObservingDraft


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CompactionWork:
    """One prompt to compact. `tokens`: its last tokens, int32 [W]. `prompts`: for each group of layers, the pages that
    hold the prompt and those that the kept entries are copied to. `before`: the earlier tokens, int32 [n] with padding,
    if the policy scores keys by the queries of all tokens; else None. `observed`: int32 [2], the slot and
    `ObservedRows.num_found`, for a draft that reads hidden states; else None. `adapter`: an int32 scalar, None for a
    model whose weights hold none. `steering`: by layer, float32 [D] to add to hidden states, None in an engine without
    `steered_layers`."""

    tokens: jax.Array
    prompts: tuple[PromptPages, ...]
    before: jax.Array | None
    observed: jax.Array | None = None
    adapter: jax.Array | None = None
    steering: dict[str, jax.Array] | None = None


def compaction_work(
    prompt: list[int],
    window: int,
    moves: tuple[GroupMove, ...],
    groups: tuple[CacheGroup, ...],
    num_columns: int,
    policy: CachePolicy,
    observed: Sequence[int] | None = None,
    adapter: int | None = None,
    steering: dict[str, np.ndarray] | None = None,
) -> CompactionWork:
    """The work as NumPy arrays, for the last `window` tokens of a prompt. `num_columns`: pages in a row of a page
    table. `adapter` and `steering` are None where `CompactionWork` has None."""

    def ids(values: tuple[int, ...], size: int, filler: int) -> Any:
        return np.array([*values, *[filler] * (size - len(values))], np.int32)

    prompts = []
    for group, (sources, targets, num_dropped) in zip(groups, moves, strict=True):
        most = 0 if group.at_end is None else min(group.at_end.most_pages, num_columns)
        pages: Any = ids(sources, num_columns, 0), np.int32(len(prompt)), np.int32(num_dropped)
        pages = *pages, ids(targets, most, group.num_allocated)
        prompts.append(PromptPages(*pages))
    last, before, block = np.array(prompt[-window:], np.int32), None, policy.prompt_block
    if block:
        before = padded(prompt[:-window], -(-num_columns * policy.page_size // block) * block)
    seen: Any = None if observed is None else np.array(observed, np.int32)
    own: Any = None if adapter is None else np.int32(adapter)
    return CompactionWork(last, tuple(prompts), before, seen, own, steering)  # pyright: ignore[reportArgumentType]


@partial(
    LargeProgram,
    static_argnums=(0, 4, 5, 6),
    donate_argnums=(2, 8),
)
def compact_prompt(
    model: ProgramModel,
    weights: Weights,
    cache: PagedCache,
    work: CompactionWork,
    num_slots: int,
    is_uniform: bool = False,
    num_hidden: int | None = None,
    observer: ObservingDraft | None = None,
    own: PagedCache | None = None,
) -> tuple[PagedCache, jax.Array, jax.Array, PagedCache | None, dict[str, jax.Array]]:
    """Stores the last tokens of a prompt and attends to all of it, as `step` does, and in each layer copies what stays
    of the prompt to other pages. Donates the caches. If the policy needs the queries of all tokens, those before the
    last W run through the model once more, because queries are not stored.

    Returns the cache, the logits float32 [num_slots, V] of the last token in every row, for `sample_step`, the final
    hidden states, the observer's cache and the tapped states as `step` does.
    """
    window, end = work.tokens.shape[0], work.prompts[0].num_tokens
    decoder = model.bind(weights).for_rows(work.adapter).steered(work.steering)
    positions = end - window + jnp.arange(window)
    attend = model.policy.attend_end(EndWork(decoder, cache, work.prompts, positions, end, work.before, is_uniform))
    taps, tap = collect(all_taps(model, observer))
    hidden = decoder(work.tokens, positions, attend, tap)
    if observer is not None and work.observed is not None:
        rows = work.tokens, positions, jnp.zeros(1, jnp.int32), jnp.full(1, window)
        place = work.observed[:1], work.observed[1:], work.prompts[0].page_table[None]
        seen = ObservedRows(*rows, *place, taps)
        own = observer.bind(model.config.vocab_size).observe(own, seen)
    num_rows = max(num_slots, MIN_HEAD_ROWS) if is_uniform else num_slots
    logits = decoder.logits(jnp.broadcast_to(hidden[-1], (num_rows, hidden.shape[-1])))[:num_slots]
    if num_hidden is not None and num_hidden > window:
        hidden = jnp.pad(hidden, ((0, num_hidden - window), (0, 0)))
    return attend.cache, logits, hidden, own, returned_taps(model, taps)
