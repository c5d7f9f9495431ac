"""FLOPs and bytes counted from shapes: the least that a step needs, whatever the compiler does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.weight_work import weight_work
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization.tree import num_bytes


@dataclass(frozen=True)
class Counted:
    """FLOPs and bytes of a model on each device of one replica.

    Attributes:
      token_flops: matrix products of one token, by the type of the operands: "bf16", "int8" or "fp8".
      key_flops: attention of one token to one key, summed over the layers without a window.
      window_keys: (window, FLOPs per key) of the layers with sliding windows, and of attention to as many tokens as an
        indexer chooses.
      dense_bytes: weights that every step reads. expert_bytes: weights of all experts.
      num_experts, num_chosen: experts of a layer, and experts per token; 0 without experts.
      token_cache_bytes: of one token's keys and values, summed over the layers that read them: those of a layer that
        others share count once for each.
      window_bytes: (window, bytes of one token) of the layers with sliding windows, which `token_cache_bytes` includes.
      head: type and FLOPs per token of the output layer's product, which `token_flops` includes; a prompt needs it for
        its last token only.
    """

    token_flops: dict[str, float]
    key_flops: float
    window_keys: tuple[tuple[int, float], ...]
    dense_bytes: int
    expert_bytes: int
    num_experts: int
    num_chosen: int
    token_cache_bytes: int
    head: tuple[str, float] = ("bf16", 0.0)
    window_bytes: tuple[tuple[int, int], ...] = ()

    def read_weight_bytes(self, num_tokens: int) -> float:
        """Weights that a step of `num_tokens` tokens reads, if routers choose experts evenly and independently."""
        if not self.num_experts:
            return self.dense_bytes
        missed = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.dense_bytes + self.expert_bytes * (1 - missed)

    def span_flops(self, start: int, length: int) -> float:
        """FLOPs of the attention of `length` tokens after `start` others, each to those before it and itself."""

        def num_keys(window: int) -> int:
            fewer = min(max(window - start, 0), length)  # tokens that see less than the window
            return fewer * start + fewer * (fewer + 1) // 2 + (length - fewer) * window

        windowed = sum(flops * num_keys(window) for window, flops in self.window_keys)
        return self.key_flops * num_keys(start + length) + windowed

    def read_cache_bytes(self, num_tokens: int, num_queries: int = 1) -> int:
        """Bytes of keys and values that a pass over the last `num_queries` of `num_tokens` tokens reads: a token that
        several queries see counts once, one outside all their windows not at all."""
        unseen = sum(size * max(num_tokens - (window + num_queries - 1), 0) for window, size in self.window_bytes)
        return self.token_cache_bytes * num_tokens - unseen


def pass_flops(
    counted: Counted, spans: Sequence[tuple[int, int]], *, reads_all_logits: bool = False
) -> dict[str, float]:
    """FLOPs of a forward pass by the type of the operands, for spans (tokens before the span, tokens of the span). Each
    token attends to those before it and itself. Logits are computed for every token (`reads_all_logits`) or for the
    last one of each span."""
    num_tokens = sum(length for _, length in spans)
    flops = {kind: per_token * num_tokens for kind, per_token in counted.token_flops.items()}
    if not reads_all_logits:
        kind, head = counted.head
        flops[kind] -= head * (num_tokens - len(spans))
    attention = sum(counted.span_flops(start, length) for start, length in spans)
    return {**flops, "bf16": flops.get("bf16", 0.0) + attention}


def count(spec: EngineSpec, config: ModelConfig, params: Params, cache: Any) -> Counted:
    """Work of the spec's model or of its draft; `params` are sharded onto the spec's devices."""
    num_devices, moe = spec.num_devices, config.moe
    work = weight_work(config, params)
    keys: dict[int | None, float] = {}
    stored: dict[int | None, int] = {}
    mla, bare = config.mla, cache.bare
    for layer in config.attention_layers:
        head_dim, window = config.head_dim_of(layer), spec.policy.num_seen(layer, spec.layers[layer])
        of_key = 2 * config.num_heads * (head_dim + (head_dim if mla is None else mla.latent_size)) / num_devices
        if mla is not None and mla.has_indexer:
            # Attention reads the chosen tokens only, as a window of that many; the indexer scores all of them.
            of_chosen = 2 * config.num_heads * (2 * mla.latent_size + mla.rope_size)
            keys[mla.index_topk] = keys.get(mla.index_topk, 0.0) + of_chosen
            of_key = 2 * mla.index_heads * mla.index_size
        source = config.kv_source(layer)
        pages, leaves = bare.layers[source], cache.leaves[source]
        num_tokens = jax.tree.leaves(pages)[0].shape[0] * spec.page_size
        stored[window] = stored.get(window, 0) + num_bytes(pages) // num_tokens
        seen = window
        if leaves is not None:  # answers read those of all pages, and keys as in a window; FLOPs are those of prompts
            stored[None] = stored.get(None, 0) + num_bytes(leaves) // num_tokens
            seen = None
        keys[seen] = keys.get(seen, 0.0) + of_key
    return Counted(
        token_flops={kind: flops / num_devices for kind, flops in work.token_flops.items()},
        key_flops=keys.get(None, 0.0),
        window_keys=tuple((window, flops) for window, flops in keys.items() if window),
        dense_bytes=work.dense_bytes,
        expert_bytes=work.expert_bytes,
        num_experts=0 if moe is None else moe.num_experts,
        num_chosen=0 if moe is None else moe.num_experts_per_token,
        token_cache_bytes=sum(stored.values()),
        head=(work.head[0], work.head[1] / num_devices),
        window_bytes=tuple((window, size) for window, size in stored.items() if window),
    )
