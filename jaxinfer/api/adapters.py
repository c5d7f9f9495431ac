"""Adapters that `LLM` is given: read, checked against the base model, and the room that they need."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.api.options import LLMOptions
from jaxinfer.models import MeshFit, ModelConfig
from jaxinfer.models.adapter import Adapter, TokenRows

DEFAULT_RANK_STEP = 8  # the room for ranks is a multiple of it
NO_ROWS = TokenRows((), np.zeros((0, 0), np.float32))


def as_adapter(given: Any, config: ModelConfig, base_names: Sequence[str], what: str) -> tuple[Adapter, str]:
    """An adapter, and the folder that it is from; "" for one of arrays.

    Raises CheckpointError, a ValueError, as `read_adapter`, and for the adapter of another base model; TypeError for
    what is none.
    """
    if isinstance(given, Adapter):
        return given, ""
    if not isinstance(given, (str, Path)) or not str(given):
        shown = f"{type(given).__name__} {given!r:.60}"
        raise TypeError(f"adapter {what}: a folder or a jaxinfer.models.adapter.Adapter is wanted, got {shown}")
    from checkpoints_convert.adapters import read_adapter

    return read_adapter(given, config, base_model=base_names), str(given)


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


def with_room(options: LLMOptions, adapters: Sequence[Adapter]) -> LLMOptions:
    """The options with room for the adapters that are given at the start, in what is not set."""
    if options.max_adapters is None:
        options = replace(options, max_adapters=len(adapters))
    if not adapters or not options.max_adapters:
        return options
    changes: dict[str, Any] = {}
    if options.max_adapter_rank is None:
        rank = max(adapter.max_rank for adapter in adapters)
        changes["max_adapter_rank"] = max(-(-rank // DEFAULT_RANK_STEP), 1) * DEFAULT_RANK_STEP
    if options.adapter_parts is None:
        parts = set().union(*map(parts_of, adapters))
        num_tokens = max(len(rows.tokens) for adapter in adapters for rows in (*adapter.token_rows.values(), NO_ROWS))
        changes["adapter_parts"] = (*sorted(parts), *([f"tokens:{num_tokens}"] if num_tokens else []))
    return replace(options, **changes) if changes else options


def parts_of(adapter: Adapter) -> set[str]:
    """What an adapter has beside pairs for linear layers and trained tokens, by names of `adapter_parts`."""
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
