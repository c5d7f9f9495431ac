"""FLOPs and bytes of the products with a model's weights, counted from shapes."""

import math
from dataclasses import dataclass

import jax

from jaxinfer.models import ModelConfig, Params
from jaxinfer.models.host_layers import all_layers
from jaxinfer.quantization.tree import is_weight, num_bytes, scheme_of


@dataclass(frozen=True)
class WeightWork:
    """FLOPs of a token, on all devices together, and bytes, as many as the parameters say.

    Attributes:
      token_flops: by the type of the operands: "bf16", "int8" or "fp8". Of experts those that a token goes to.
      dense_bytes: weights that every step reads. expert_bytes: weights of all experts.
      head: type and FLOPs of the output layer's product, and its bytes; the others include them.
    """

    token_flops: dict[str, float]
    dense_bytes: int
    expert_bytes: int
    head: tuple[str, float, int]


def weight_work(config: ModelConfig, params: Params) -> WeightWork:
    """Counts a model; with sharded parameters bytes are those of one device."""
    flops: dict[str, float] = {}
    dense = experts = 0
    moe, head = config.moe, ("bf16", 0.0, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(all_layers(params), is_leaf=is_weight):
        names = [getattr(key, "key", None) for key in path]
        is_head = names == ["embed"] and config.tie_word_embeddings
        size = num_bytes(leaf)
        if names[0] in ("embed", "position_embed", "layer_embed", "token_pieces") and not is_head:
            continue  # only single rows are read
        is_stack = leaf.ndim > 2 and "experts" in names
        experts, dense = (experts + size, dense) if is_stack else (experts, dense + size)
        if leaf.ndim < 2:
            continue
        scheme = scheme_of(leaf)
        activations = None if scheme is None else scheme.activations
        share = moe.num_experts_per_token / moe.num_experts if is_stack and moe is not None else 1.0
        kind, count = activations or "bf16", 2 * math.prod(leaf.shape) * share
        flops[kind] = flops.get(kind, 0.0) + count
        if is_head or names == ["lm_head"]:
            head = (kind, count, size)
    return WeightWork(flops, dense, experts, head)
