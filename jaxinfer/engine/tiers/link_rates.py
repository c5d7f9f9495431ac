"""The rule that tells whether bytes of a host tier are cheaper than computing again, and the rates that it needs."""

import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache import state_bytes
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models.host_layers import all_layers
from jaxinfer.quantization.tree import is_weight

LINK_BYTES = {"cpu": 8 * 2**20}  # copied to measure the link
MATRIX_WIDTH = {"cpu": 1024}  # of the product that is timed
ROUNDS = 3


@dataclass(frozen=True)
class TransferRule:
    """A page comes back cheaper than it is computed if token_bytes / link_rate < token_flops / flop_rate.

    Attributes:
      token_bytes: of a token in all layers of a device, with its share of a saved state.
      link_rate: bytes a second from the host to a device.
      token_flops: 2 x parameters that a token meets, on a device. flop_rate: FLOP a second of a device.
    """

    token_bytes: float
    link_rate: float
    token_flops: float
    flop_rate: float

    @property
    def read_seconds(self) -> float:
        """Time of a token that comes back."""
        return self.token_bytes / self.link_rate

    @property
    def compute_seconds(self) -> float:
        """Time of a token that is computed."""
        return self.token_flops / self.flop_rate

    @property
    def pays(self) -> bool:
        return self.read_seconds < self.compute_seconds

    def __str__(self) -> str:
        read = f"{self.token_bytes:,.0f} bytes at {self.link_rate / 1e9:,.1f} GB/s"
        made = f"{self.token_flops / 1e9:,.3g} GFLOP at {self.flop_rate / 1e12:,.3g} TFLOP/s"
        verdict = "pays" if self.pays else "does not pay"
        return (
            f"{verdict}: a token is read in {1e6 * self.read_seconds:,.3g} us ({read}), "
            f"computed in {1e6 * self.compute_seconds:,.3g} us ({made})"
        )


def transfer_rule(spec: EngineSpec, device: Any) -> TransferRule:
    """The rule for a model on a device, with rates that are measured once in a process: some milliseconds."""
    link_rate, flop_rate = measured_rates(device, "float32" if device.platform == "cpu" else str(spec.dtype))
    flops = 2 * met_parameters(spec) / spec.num_devices
    # A prompt that goes on from a saved state has at least the tokens of an interval before it.
    state = state_bytes(spec.config, spec.dtype) / spec.save_interval if spec.num_saved_states else 0.0
    return TransferRule(spec.pool_sizes.token_bytes + state, link_rate, flops, flop_rate)


def decide_host_cache(spec: EngineSpec, device: Any) -> tuple[EngineSpec, TransferRule | None]:
    """With `host_cache_gib="auto"`, the spec, without host memory where that does not pay, and the rule that decided.
    A number is not questioned: the spec as it is, and None."""
    if spec.options.host_cache_gib != "auto":
        return spec, None
    rule = transfer_rule(spec, device)
    return (spec if rule.pays else replace(spec, options=replace(spec.options, host_cache_gib=None))), rule


def met_parameters(spec: EngineSpec) -> float:
    """Parameters of matrices that a token of a prompt is multiplied by: of the experts, those that it goes to."""
    moe, count = spec.config.moe, 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(all_layers(spec.params), is_leaf=is_weight):
        names = [getattr(key, "key", None) for key in path]
        if leaf.ndim < 2 or names[0] in ("embed", "position_embed", "layer_embed", "lm_head"):
            continue
        is_stack = moe is not None and leaf.ndim > 2 and "experts" in names
        share = moe.num_experts_per_token / moe.num_experts if is_stack and moe is not None else 1.0
        count += share * int(np.prod(leaf.shape))
    return count


@cache
def measured_rates(device: Any, dtype: str) -> tuple[float, float]:
    """Bytes a second from the host to a device, and FLOP a second of a product of square matrices: the best of a few
    rounds."""
    data = np.ones(LINK_BYTES.get(device.platform, 64 * 2**20), np.uint8)
    width = MATRIX_WIDTH.get(device.platform, 4096)
    matrix = jax.device_put(jnp.ones((width, width), dtype), device)
    product = jax.jit(jnp.dot)
    product(matrix, matrix).block_until_ready()
    copied, computed = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        # On a CPU the device may otherwise read the host's memory in place.
        jax.device_put(data.copy(), device).block_until_ready()
        copied.append(time.perf_counter() - start)
        start = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        computed.append(time.perf_counter() - start)
    return len(data) / min(copied), 2 * width**3 / min(computed)
