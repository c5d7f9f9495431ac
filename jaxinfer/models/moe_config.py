"""Configuration of mixtures of experts."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparsemixer"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: a router sends each token to a few of many feed-forward networks. No token is dropped.

    Attributes:
      num_experts, num_experts_per_token: experts of a layer, and experts of a token.
      expert_size: inner width of an expert.
      layers: layers with experts; the others have an MLP of the model's `intermediate_size`.
      scoring: "softmax" over all logits (Mixtral, Qwen, DeepSeek-V2), "sigmoid" of each (DeepSeek-V3),
        "softmax_of_chosen" or "sigmoid_of_chosen", of the logits of the chosen only (gpt-oss; Llama 4), or
        "sparsemixer": for each of two experts, the softmax over those whose logits are near its own (Phi-3.5-MoE).
      normalize: whether the scores of a token's experts are divided by their sum.
      scale: multiplies the scores (DeepSeek's routed_scaling_factor).
      num_groups, num_chosen_groups: experts form groups of equal size, and a token's experts are taken from the groups
        with the best scores (DeepSeek-V2 section 2.2.2, V3 section 2.1.2); 1 and 1 for no groups.
      group_score: score of a group: that of its best expert (V2), or the sum of its best two (V3).
      has_correction_bias: a float32 bias per expert, added to the scores for the choice of experts but not to their
        weights (DeepSeek-V3 section 2.1.2).
      has_router_bias, has_expert_bias: biases of the router's logits, and of each expert's projections (gpt-oss).
      shared_size: inner width of the shared expert, an MLP that every token passes through; 0 for none.
      has_shared_gate: whether a sigmoid gate multiplies the output of the shared expert (Qwen2-MoE).
      scales_input: whether the scores multiply what the experts read, rather than what they return (Llama 4).
      is_beside_mlp: the experts stand beside an MLP, not in its place: each has a norm of its own before and after it,
        and their results are added. The router normalizes what enters the MLP's block, scales it by a trained vector,
        and multiplies each expert's weight by a trained number (Gemma 4).
      jitter: half the relative distance of logits that "sparsemixer" takes as near.
      clamp: gpt-oss's SwiGLU: gate is clipped to at most this, up to +-this, and the product is
        (up + 1) * gate * sigmoid(clamp_slope * gate). None for silu(gate) * up.
    """

    num_experts: int
    num_experts_per_token: int
    expert_size: int
    layers: tuple[int, ...]
    scoring: Scoring = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: GroupScore = "max"
    has_correction_bias: bool = False
    has_router_bias: bool = False
    has_expert_bias: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    clamp: float | None = None
    clamp_slope: float = 1.702
    scales_input: bool = False
    is_beside_mlp: bool = False
    jitter: float = 0.01

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_experts_per_token", "expert_size", "num_groups", "num_chosen_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts cannot form {self.num_groups} groups of equal size")
        if self.num_chosen_groups > self.num_groups:
            raise ValueError(f"num_chosen_groups={self.num_chosen_groups} of only {self.num_groups} groups")
        choice = self.num_experts // self.num_groups * self.num_chosen_groups
        if self.num_experts_per_token > choice:
            raise ValueError(f"num_experts_per_token={self.num_experts_per_token} of only {choice} experts")
        if self.group_score == "top2_sum" and self.num_groups > 1 and self.num_experts < 2 * self.num_groups:
            raise ValueError(f"groups of {self.num_experts // self.num_groups} have no best two")
        for name, kind in (("scoring", Scoring), ("group_score", GroupScore)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(kind))}")
        if self.scoring == "sparsemixer" and self.num_experts_per_token != 2:
            raise ValueError(f"sparsemixer chooses 2 experts, not num_experts_per_token={self.num_experts_per_token}")
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(f"jitter must not be negative, got {self.jitter!r}")
        if self.has_shared_gate and not self.shared_size:
            raise ValueError("has_shared_gate without a shared expert: shared_size is 0")
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"clamp must be positive, got {self.clamp!r}")
