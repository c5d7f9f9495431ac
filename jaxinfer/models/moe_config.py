"""What a mixture-of-experts layer is, apart from its weights."""

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True)
class MoEConfig:
    """A router that sends each token to a few of many feed-forward experts, and what comes with it.

    Attributes:
      num_experts, num_experts_per_token: how many there are, and how many a token goes to. No token is dropped.
      expert_size: inner width of an expert.
      layers: which layers have experts; the others have one MLP of the model's `intermediate_size`.
      scoring: "softmax" over all logits (Mixtral, Qwen, DeepSeek-V2), "sigmoid" of each (DeepSeek-V3), or
        "softmax_of_chosen", over the logits of the chosen only (gpt-oss).
      normalize: whether the scores of a token's experts are divided by their sum.
      scale: multiplies the scores (DeepSeek's routed_scaling_factor).
      num_groups, num_chosen_groups: experts stand in groups of equal size, and a token's come from the best groups
        (DeepSeek-V2 section 2.2.2, V3 section 2.1.2); 1 and 1 for no groups.
      group_score: what makes a group good: its best expert (V2), or the sum of its best two (V3).
      has_correction_bias: a float32 number per expert that is added to scores where experts are chosen, and only
        there (DeepSeek-V3 section 2.1.2).
      has_router_bias, has_expert_bias: biases of the logits, and of each expert's projections (gpt-oss).
      shared_size: inner width of the MLP that every token goes through beside its experts; 0 for none.
      has_shared_gate: whether a sigmoid gate multiplies what that MLP gives (Qwen2-MoE).
      clamp: gpt-oss's SwiGLU: gates are at most this, ups between -this and this, and the product is
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

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_experts_per_token", "expert_size", "num_groups", "num_chosen_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts cannot stand in {self.num_groups} groups of equal size")
        if self.num_chosen_groups > self.num_groups:
            raise ValueError(f"num_chosen_groups={self.num_chosen_groups} of only {self.num_groups} groups")
        choice = self.num_experts // self.num_groups * self.num_chosen_groups
        if self.num_experts_per_token > choice:
            raise ValueError(f"num_experts_per_token={self.num_experts_per_token} of only {choice} experts")
        if self.group_score == "top2_sum" and self.num_groups > 1 and self.num_experts < 2 * self.num_groups:
            raise ValueError(f"groups of {self.num_experts // self.num_groups} have no best two")
        if self.scoring not in ("softmax", "sigmoid", "softmax_of_chosen"):
            raise ValueError(f"scoring={self.scoring!r} is neither 'softmax', 'sigmoid' nor 'softmax_of_chosen'")
        if self.group_score not in ("max", "top2_sum"):
            raise ValueError(f"group_score={self.group_score!r} is neither 'max' nor 'top2_sum'")
        if self.has_shared_gate and not self.shared_size:
            raise ValueError("has_shared_gate without a shared expert: shared_size is 0")
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"clamp must be positive, got {self.clamp!r}")
