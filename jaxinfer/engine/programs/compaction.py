"""The jitted program that computes the last tokens of a prompt and compacts the prompt's cache."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache import PagedCache, attend_ragged
from jaxinfer.cache.compaction import CompactingAttention, PromptPages
from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.compiling import LargeProgram
from jaxinfer.engine.plans import GroupMove
from jaxinfer.engine.programs import ProgramModel, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CompactionWork:
    """The end of one prompt: its last tokens int32 [W], and by group where it lies and goes."""

    tokens: jax.Array
    prompts: tuple[PromptPages, ...]


def compaction_work(
    tokens: list[int], num_prompt: int, moves: tuple[GroupMove, ...], groups: tuple[CacheGroup, ...], num_columns: int
) -> CompactionWork:
    """The work as NumPy arrays, with page tables of `num_columns`."""

    def ids(values: tuple[int, ...], size: int, filler: int) -> Any:
        return np.array([*values, *[filler] * (size - len(values))], np.int32)

    prompts = []
    for group, (sources, targets, num_dropped) in zip(groups, moves, strict=True):
        most = 0 if group.budget is None else min(group.budget.most_pages, num_columns)
        pages: Any = ids(sources, num_columns, 0), np.int32(num_prompt), np.int32(num_dropped)
        pages = *pages, ids(targets, most, group.num_allocated)
        prompts.append(PromptPages(*pages))
    return CompactionWork(np.array(tokens, np.int32), tuple(prompts))  # pyright: ignore[reportArgumentType]


@partial(LargeProgram, static_argnums=(0, 4, 5, 6), donate_argnums=2)
def compact_prompt(
    model: ProgramModel,
    weights: Weights,
    cache: PagedCache,
    work: CompactionWork,
    num_slots: int,
    is_uniform: bool = False,
    num_hidden: int | None = None,
) -> tuple[PagedCache, jax.Array, jax.Array]:
    """Stores the last tokens of a prompt and attends to all of it, as `step` does, and in each layer copies what stays
    of the prompt to other pages. Donates the cache.

    Returns it, the logits float32 [num_slots, V] of the last token in every row, for `sample_step`, and the final
    hidden states as `step` does.
    """
    if model.budgets is None:
        raise ValueError("a model without a policy that compacts prompts")
    window, nothing = work.tokens.shape[0], jnp.zeros(1, jnp.int32)
    end = work.prompts[0].num_tokens
    tables = tuple(prompt.page_table[None] for prompt in work.prompts)
    attend: Any = attend_ragged(cache, tables, nothing, nothing + window, end[None], is_uniform=is_uniform)
    attend = CompactingAttention(attend, cache, model.budgets, work.prompts)
    decoder = model.bind(weights)
    hidden = decoder(work.tokens, end - window + jnp.arange(window), attend)
    logits = decoder.logits(jnp.broadcast_to(hidden[-1], (num_slots, hidden.shape[-1])))
    if num_hidden is not None and num_hidden > window:
        hidden = jnp.pad(hidden, ((0, num_hidden - window), (0, 0)))
    return attend.cache, logits, hidden
