"""Memory of a model and its pool of pages, and whether the device has enough."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.cache import deferred_bytes, state_bytes
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.tiers.host_tier import transit_bytes
from jaxinfer.models import compute_dtype

# Arrays of T tokens that are alive at once in a layer: residual, normed, query, key, value, attended and the two
# halves of the feed-forward layer with their product; and of S rows of logits in the sampler: logits, transformed,
# noise, scores, and two for comparison.
LIVE_HIDDEN, LIVE_INNER, LIVE_LOGITS = 6, 3, 6


class OutOfMemoryError(RuntimeError):
    """Model and cache do not fit; the message has needed and available bytes, and what would help."""


@dataclass(frozen=True)
class PoolPlan:
    """Bytes by part, and the number of pages that fit in the rest.

    Attributes:
      num_pages: the first group's pool, null page included. page_bytes: of one page in all layers of that group.
      pool_bytes: of all pools. weights, sampler, activations: bytes of the other parts. available: free bytes before
        the pools are allocated, None if the device does not report them.
      states: bytes of recurrent layers' states, of all slots, in the model and a draft model, and of those that are
        saved.
      is_reduced: whether fewer pages are planned than all slots could use.
    """

    num_pages: int
    page_bytes: int
    pool_bytes: int
    weights: int
    sampler: int
    activations: int
    available: int | None
    is_reduced: bool
    states: int = 0


def plan_pool(spec: EngineSpec, *, weights: int, available: int | None) -> PoolPlan:
    """The number of pages: `num_pages` if given, else what `memory_fraction` of the available bytes leaves.

    They are those of the first group of layers; the other groups' follow from it (`PoolSizes`), and the bytes are of
    all. On a CPU, and of a contiguous cache, that is at most what all slots at full length can use; elsewhere the rest
    serves as prefix cache. `weights` are loaded already; the fraction is of all memory, theirs included. Raises
    OutOfMemoryError where not even one sequence of max_model_len fits.
    """
    sizes, num_pages = spec.pool_sizes, spec.options.num_pages
    wanted, parts = sizes.default, fixed_parts(spec, weights)
    others = sum(parts.values()) - weights

    def plan(pages: int) -> PoolPlan:
        return PoolPlan(
            num_pages=pages,
            page_bytes=spec.page_bytes,
            pool_bytes=sizes.bytes_of(pages),
            available=available,
            is_reduced=pages < wanted,
            **parts,
        )

    if available is None:
        return plan(wanted if num_pages is None else num_pages)
    budget = int(spec.options.memory_fraction * (available + weights)) - sum(parts.values())
    fitting = sizes.fitting(budget)
    if num_pages is not None:
        if sizes.bytes_of(num_pages) > available - others:
            raise _does_not_fit(spec, parts, num_pages, available, f"num_pages={fitting}")
        return plan(num_pages)
    if fitting < sizes.smallest:
        if fitting > 1:
            helps = f"max_model_len={(fitting - 1) * spec.page_size}"
        elif parts["sampler"] + logits_bytes(spec) > sizes.bytes_of(sizes.smallest):
            helps = "a smaller max_seqs"
        else:
            helps = "a smaller dtype or a quantized checkpoint"
        raise _does_not_fit(spec, parts, sizes.smallest, available, helps)
    fills_memory = spec.platform != "cpu" and spec.options.cache == "paged"
    if not fills_memory and fitting < wanted:
        fitting = max(_step_below(fitting, wanted), sizes.smallest)
    return plan(fitting if fills_memory else min(fitting, wanted))


def fixed_parts(spec: EngineSpec, weights: int) -> dict[str, int]:
    """Bytes of one device that are not for keys and values, by part, as in `PoolPlan`."""
    # Of each slot and token: bias and counts of 4 bytes, a mask of 1. Beside them grammars.
    sampler = spec.max_seqs * spec.config.vocab_size * 9 + spec.table_sizes.num_bytes
    parts = {"weights": weights, "sampler": sampler, "activations": activation_bytes(spec)}
    return {**parts, "states": spec.state_bytes} if spec.state_bytes else parts


def logits_bytes(spec: EngineSpec) -> int:
    """Bytes of the sampler's rows of logits that are alive at once."""
    return LIVE_LOGITS * spec.max_seqs * spec.config.vocab_size * 4


def _step_below(fitting: int, wanted: int) -> int:
    """The most pages that fit of 3/4, 1/2, 3/8, 1/4 ... of those wanted: programs are compiled for a number of pages,
    and free memory differs at each start."""
    sizes = (wanted * quarters >> (2 + halvings) for halvings in itertools.count() for quarters in (4, 3))
    return next(size for size in sizes if size <= fitting)


def activation_bytes(spec: EngineSpec) -> int:
    """Estimated bytes of a step's activations and logits, and of layers from the host, on one device that holds all of
    them."""
    config = spec.config
    kv_heads = max(config.num_kv_heads, config.num_global_kv_heads or 0)
    heads = (config.num_heads + 2 * kv_heads) * max(config.head_dim, config.global_head_dim or 0)
    hidden = LIVE_HIDDEN * max(config.hidden_size, heads) + LIVE_INNER * config.intermediate_size
    # A speculative round keeps the inputs of its states until it is known which rows are confirmed.
    rows = spec.decode_slots[-1] * spec.most_nodes
    if rows and spec.is_deterministic:  # a pass of one shape, filled up
        rows = max(rows, spec.token_buckets[-1])
    deferred = rows * deferred_bytes(config, spec.params)
    # What is drafted goes into a copy of the draft's states, as it may be rejected.
    copied = spec.max_seqs * sum(
        state_bytes(draft_config, compute_dtype(params)) for draft_config, params in spec.draft_models
    )
    num_tokens = max(spec.token_buckets[-1], spec.policy.prompt_block)
    scored = spec.policy.working_bytes(config, spec.max_model_len, spec.max_seqs, spec.dtype.itemsize)
    moved = transit_bytes(max(spec.group_page_bytes)) if spec.options.host_cache_gib else 0
    own = num_tokens * hidden * spec.dtype.itemsize + spec.buffer_bytes
    return own + logits_bytes(spec) + deferred + copied + moved + scored


def available_bytes(device: Any) -> int | None:
    """Free bytes of a device; on a CPU the available memory of the system. None if unknown."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return system_memory() if device.platform == "cpu" else None


def system_memory() -> int | None:
    """Bytes of the host's memory that are available; None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _does_not_fit(spec: EngineSpec, parts: dict[str, int], pages: int, available: int, helps: str) -> OutOfMemoryError:
    lines = [f"  {name}: {_mib(size)}" for name, size in parts.items()]
    size = spec.pool_sizes.bytes_of(pages)
    others = f", and {len(spec.windows) - 1} smaller pools" if len(spec.windows) > 1 else ""
    return OutOfMemoryError(
        "the model and its cache do not fit:\n"
        + "\n".join(lines)
        + f"\n  cache: {_mib(size)} ({pages} pages of {spec.page_bytes:,} bytes{others})"
        + f"\n  needed in all {_mib(sum(parts.values()) + size)}, "
        + f"available {_mib(available + parts['weights'])} with the weights loaded"
        + f"\nTry {helps}."
    )


def _mib(size: int) -> str:
    return f"{size:,} bytes ({size / 2**20:,.1f} MiB)"
