"""Adapters that `LLM` is given: read, checked against the base model, and the room that they need."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxinfer.api.options import LLMOptions
from jaxinfer.engine.adapter_stacks import AdapterStacks
from jaxinfer.models import MeshFit, ModelConfig, abstract_params
from jaxinfer.models.adapter import Adapter


def check_adapters(options: LLMOptions, fit: MeshFit | None, has_hosts: bool) -> None:
    """Raises ValueError for a mesh on which the options' adapters cannot be."""
    if (sizes := options.adapter_sizes) is None:
        return
    if has_hosts:
        raise ValueError("adapters are for one process, and this model runs on several hosts")
    changes = {} if fit is None else dict(fit.changes)
    if not sizes.has_tables:
        changes.pop("vocab_size", None)
    if changes:
        told = "; ".join(f"{name} {change}" for name, change in changes.items())
        raise ValueError(f"adapters have the model's own shapes, which this mesh changes: {told}")


def with_room(options: LLMOptions, adapters: Sequence[Adapter], vocab_size: int) -> LLMOptions:
    """The options with room for the adapters that are given at the start, in what is not set. `vocab_size`: of the
    model."""
    if options.max_adapters is None and adapters:
        options = replace(options, max_adapters=len(adapters))
    if not adapters or not options.max_adapters:
        return options
    changes: dict[str, Any] = {}
    if options.max_adapter_rank is None:
        rank = max(adapter.max_rank for adapter in adapters)
        changes["max_adapter_rank"] = max(rank, 1)
    if options.adapter_parts is None:
        parts = set().union(*map(parts_of, adapters))
        all_rows = [rows for adapter in adapters for rows in adapter.token_rows.values()]
        num_tokens = max((sum(token < vocab_size for token in rows.tokens) for rows in all_rows), default=0)
        changes["adapter_parts"] = (*sorted(parts), *([f"tokens:{num_tokens}"] if num_tokens else []))
    if options.max_adapter_tokens is None:
        num_added = max(adapter.num_added("embed", vocab_size) for adapter in adapters)
        changes["max_adapter_tokens"] = num_added or None
    return replace(options, **changes) if changes else options


def check_served(adapter: Adapter, config: ModelConfig) -> None:
    """Raises ValueError, as `LLM.load_adapter` with as much room as the adapter needs.

    No weights of the base are read: they count as ones.
    """
    options = with_room(LLMOptions(), [adapter], config.vocab_size)
    sizes, shapes = options.adapter_sizes, abstract_params(config)
    assert sizes is not None
    ones = jax.tree.map(lambda leaf: np.broadcast_to(np.ones((), leaf.dtype), leaf.shape), shapes)
    AdapterStacks(config, shapes, sizes).prepared(adapter, ones, what="to check")


def parts_of(adapter: Adapter) -> set[str]:
    """Names of `adapter_parts` that an adapter needs, but for trained tokens."""
    pairs, replaced = adapter.low_rank, adapter.replaced
    has = {
        "dora": any(pair.magnitude is not None for pair in pairs.values()),
        "bias": any(pair.bias is not None for pair in pairs.values())
        or any(name.endswith(".bias") for name in replaced),
        "experts": any(".experts." in name for name in pairs),
        "embed": "embed" in pairs,
        "lm_head": "lm_head" in pairs,
        "saved_embed": "embed" in replaced,
        "saved_lm_head": "lm_head" in replaced,
    }
    return {part for part, is_there in has.items() if is_there}
