"""The modules of a mixture of experts; `experts` has what they compute."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxinfer.models.attend import Tap
from jaxinfer.models.basic import Norm, normal
from jaxinfer.models.config import MoEConfig
from jaxinfer.models.experts import Activation, Experts, route, run_experts
from jaxinfer.quantization.adapted import base_of, with_adapters


def clamped_swiglu(limit: float, slope: float, gate: jax.Array, up: jax.Array) -> jax.Array:
    """gpt-oss's activation (model card, section 2.2; Transformers' `GptOssExperts`)."""
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * (gate * jax.nn.sigmoid(gate * slope))


class ExpertStack(nnx.Module):
    """One projection of all experts: weight [E, inputs, outputs], which may be quantized, and bias [E, outputs]."""

    def __init__(self, count: int, inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool, dtype, rngs):
        self.weight = nnx.Param(normal(rngs, (count, inputs, outputs), dtype), axes=("expert", *axes))
        self.bias = nnx.Param(np.zeros((count, outputs), dtype), axes=("expert", axes[1])) if bias else None


class ExpertStacks(nnx.Module):
    """The projections of all experts, three or, without a gate, two."""

    def __init__(self, moe: MoEConfig, width: int, *, is_gated: bool, dtype, rngs: nnx.Rngs | None):
        kwargs = {"bias": moe.has_expert_bias, "dtype": dtype, "rngs": rngs}
        inward = (moe.num_experts, width, moe.expert_size, ("hidden", "expert_ffn"))
        self.gate_proj = ExpertStack(*inward, **kwargs) if is_gated else None
        self.up_proj = ExpertStack(*inward, **kwargs)
        self.down_proj = ExpertStack(moe.num_experts, moe.expert_size, width, ("expert_ffn", "hidden"), **kwargs)

    def __call__(self) -> Experts:
        stacks = (self.gate_proj, self.up_proj, self.down_proj)
        biases = (None if stack is None or stack.bias is None else stack.bias.get_value() for stack in stacks)
        gate = None if self.gate_proj is None else self.gate_proj.weight.get_value()
        return Experts(gate, self.up_proj.weight.get_value(), self.down_proj.weight.get_value(), *biases)


class Router(nnx.Module):
    """Chooses experts from logits that are computed in float32 for any dtype of the weights."""

    def __init__(self, moe: MoEConfig, width: int, *, norm_eps: float = 1e-6, dtype, rngs: nnx.Rngs | None):
        self.weight = nnx.Param(normal(rngs, (width, moe.num_experts), dtype), axes=("hidden", None))
        self.bias = nnx.Param(np.zeros((moe.num_experts,), dtype), axes=(None,)) if moe.has_router_bias else None
        self.correction = (
            nnx.Param(np.zeros((moe.num_experts,), np.float32), axes=(None,)) if moe.has_correction_bias else None
        )
        has_scales, no_weight = moe.is_beside_mlp, {"bias": False, "dtype": dtype, "has_weight": False}
        self.norm = Norm((width,), ("hidden",), "rms", eps=norm_eps, **no_weight) if has_scales else None
        self.input_scale = nnx.Param(np.ones((width,), dtype), axes=("hidden",)) if has_scales else None
        self.expert_scale = nnx.Param(np.ones((moe.num_experts,), dtype), axes=(None,)) if has_scales else None
        self.moe = moe

    def __call__(self, x: jax.Array, tap: Tap | None = None) -> tuple[jax.Array, jax.Array]:
        """`route` for hidden states [T, D]. The tap "experts" gets the chosen ones, and may return others for them."""
        if self.norm is not None and self.input_scale is not None:
            x = self.norm(x) * self.input_scale[...] * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        weight = self.weight.get_value()
        operands = x.astype(jnp.float32), base_of(weight).astype(jnp.float32)
        (logits,) = with_adapters(x, [jnp.matmul(*operands, precision=lax.Precision.HIGHEST)], [weight])
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        correction = None if self.correction is None else self.correction[...]
        chosen, weights = route(self.moe, logits, correction)
        if tap is not None and (replayed := tap("experts", chosen)) is not None:
            chosen, weights = route(self.moe, logits, correction, replayed)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[...].astype(jnp.float32)[chosen]
        return chosen, weights


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
        norm_eps: float = 1e-6,
        is_gated: bool = True,
        dtype,
        rngs: nnx.Rngs | None,
    ):
        self.router = Router(moe, width, norm_eps=norm_eps, dtype=dtype, rngs=rngs)
        self.experts = ExpertStacks(moe, width, is_gated=is_gated, dtype=dtype, rngs=rngs)
        self.shared, self.scales_input = shared, moe.scales_input
        gate = normal(rngs, (width, 1), dtype) if moe.has_shared_gate else None
        self.shared_gate = None if gate is None else nnx.Param(gate, axes=("hidden", None))
        self.activation: Activation = lambda gate, up: activation(gate) * up if is_gated else activation(up)
        if moe.clamp is not None:
            self.activation = partial(clamped_swiglu, moe.clamp, moe.clamp_slope)

    def __call__(self, x: jax.Array, routed: jax.Array | None = None, tap: Tap | None = None) -> jax.Array:
        """[..., D] of hidden states [..., D]; the router reads `routed` [..., D], if given. The tap is as of `Router`,
        with experts int32 [..., C]."""
        rows = x.reshape(-1, x.shape[-1])
        own = None if tap is None else partial(_tap_rows, tap, x.shape[:-1])
        chosen, weights = self.router(rows if routed is None else routed.reshape(rows.shape), own)
        run = partial(run_experts, experts=self.experts(), activation=self.activation, over=self.over)
        if self.scales_input:
            out = _run_scaled(run, rows, chosen, weights).reshape(x.shape)
        else:
            out = run(rows, chosen, weights).reshape(x.shape)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            gate = jnp.matmul(x, self.shared_gate[...], precision=lax.Precision.HIGHEST)
            shared = jax.nn.sigmoid(gate) * shared
        return out + shared


def _tap_rows(tap: Tap, lead: tuple[int, ...], name: str, chosen: jax.Array) -> jax.Array | None:
    """The tap of experts [T, C] as those [*lead, C] of tokens with these leading axes."""
    replayed = tap(name, chosen.reshape(*lead, -1))
    return None if replayed is None else replayed.reshape(chosen.shape)


def _run_scaled(run: Callable[..., jax.Array], x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    """`run_experts` with weights [T, C] on the inputs [T, D]: each of a token's experts has a row of its own."""
    num_tokens, num_choices = chosen.shape
    scaled = (x[:, None, :] * weights[..., None].astype(x.dtype)).reshape(-1, x.shape[-1])
    one_each = chosen.reshape(-1, 1), jnp.ones((num_tokens * num_choices, 1), jnp.float32)
    out = run(scaled, *one_each, rows_of_token=num_choices)
    return out.reshape(num_tokens, num_choices, -1).astype(jnp.float32).sum(1).astype(x.dtype)
