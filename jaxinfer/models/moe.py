"""Mixture of experts: the router, and the layer around `experts.run_experts`. Shapes as in experts.py."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxinfer.models.config import MoEConfig
from jaxinfer.models.experts import Experts, run_experts


def route(moe: MoEConfig, logits: jax.Array, correction: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 [T, C], best first, and their weights, float32 [T, C].

    logits: float32 [T, E]. correction: float32 [E], see `MoEConfig.has_correction_bias`. Of equal scores, the expert
    with the lower index is chosen. A NaN logit makes weights NaN.
    """
    if moe.scoring == "softmax_of_chosen":
        best, chosen = lax.top_k(logits, moe.num_experts_per_token)
        return chosen, jax.nn.softmax(best, axis=-1) * moe.scale
    scores = jax.nn.sigmoid(logits) if moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if correction is None else scores + correction
    if moe.num_groups > 1:
        choice = _within_groups(moe, choice)
    _, chosen = lax.top_k(choice, moe.num_experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return chosen, weights * moe.scale


def _within_groups(moe: MoEConfig, choice: jax.Array) -> jax.Array:
    """The scores, with -inf for experts outside the best groups."""
    grouped = choice.reshape(*choice.shape[:-1], moe.num_groups, -1)
    if moe.group_score == "max":
        group_scores = grouped.max(-1)
    else:
        group_scores = lax.top_k(grouped, 2)[0].sum(-1)
    _, best = lax.top_k(group_scores, moe.num_chosen_groups)
    is_chosen = (jnp.arange(moe.num_groups) == best[..., None]).any(-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(choice.shape)


def clamped_swiglu(limit: float, slope: float, gate: jax.Array, up: jax.Array) -> jax.Array:
    """gpt-oss's activation (model card, section 2.2; Transformers' `GptOssExperts`)."""
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * (gate * jax.nn.sigmoid(gate * slope))


class ExpertStack(nnx.Module):
    """One projection of all experts: weight [E, inputs, outputs], which may be quantized, and bias [E, outputs]."""

    def __init__(self, count: int, inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool, dtype, rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (count, inputs, outputs), dtype), axes=("expert", *axes))
        self.bias = nnx.Param(jnp.zeros((count, outputs), dtype), axes=("expert", axes[1])) if bias else None


class ExpertStacks(nnx.Module):
    """The three projections of all experts."""

    def __init__(self, moe: MoEConfig, width: int, *, dtype, rngs: nnx.Rngs):
        kwargs = {"bias": moe.has_expert_bias, "dtype": dtype, "rngs": rngs}
        inward = (moe.num_experts, width, moe.expert_size, ("hidden", "expert_ffn"))
        self.gate_proj = ExpertStack(*inward, **kwargs)
        self.up_proj = ExpertStack(*inward, **kwargs)
        self.down_proj = ExpertStack(moe.num_experts, moe.expert_size, width, ("expert_ffn", "hidden"), **kwargs)

    def __call__(self) -> Experts:
        stacks = (self.gate_proj, self.up_proj, self.down_proj)
        biases = (None if stack.bias is None else stack.bias.get_value() for stack in stacks)
        return Experts(*(stack.weight.get_value() for stack in stacks), *biases)


class Router(nnx.Module):
    """Chooses experts from logits that are computed in float32 for any dtype of the weights."""

    def __init__(self, moe: MoEConfig, width: int, *, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (width, moe.num_experts), dtype), axes=("hidden", None))
        self.bias = nnx.Param(jnp.zeros((moe.num_experts,), dtype), axes=(None,)) if moe.has_router_bias else None
        self.correction = (
            nnx.Param(jnp.zeros((moe.num_experts,), jnp.float32), axes=(None,)) if moe.has_correction_bias else None
        )
        self.moe = moe

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`route` for hidden states [T, D]."""
        x, weight = x.astype(jnp.float32), self.weight[...].astype(jnp.float32)
        logits = jnp.matmul(x, weight, precision=lax.Precision.HIGHEST)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        return route(self.moe, logits, None if self.correction is None else self.correction[...])


class SparseMoE(nnx.Module):
    """Routed experts, and the shared MLP if there is one.

    `over` is a mesh and the axis over which the experts are sharded; `bind` sets it.
    """

    over: tuple[Mesh, str] | None = None

    def __init__(
        self,
        moe: MoEConfig,
        width: int,
        activation: Callable[[jax.Array], jax.Array],
        *,
        shared: Callable[[jax.Array], jax.Array] | None,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.router = Router(moe, width, dtype=dtype, rngs=rngs)
        self.experts = ExpertStacks(moe, width, dtype=dtype, rngs=rngs)
        self.shared = shared
        init = nnx.initializers.normal(0.02)
        gate = init(rngs.params(), (width, 1), dtype) if moe.has_shared_gate else None
        self.shared_gate = None if gate is None else nnx.Param(gate, axes=("hidden", None))
        self.activation = lambda gate, up: activation(gate) * up
        if moe.clamp is not None:
            self.activation = partial(clamped_swiglu, moe.clamp, moe.clamp_slope)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] of hidden states [..., D]."""
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(rows)
        out = run_experts(rows, chosen, weights, self.experts(), self.activation, over=self.over).reshape(x.shape)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            gate = jnp.matmul(x, self.shared_gate[...], precision=lax.Precision.HIGHEST)
            shared = jax.nn.sigmoid(gate) * shared
        return out + shared
