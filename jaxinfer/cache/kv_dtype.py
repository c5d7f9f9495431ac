"""What keys and values may be stored as, and the scales that a checkpoint may bring for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig

AUTO = "auto"
# By the name that users give; int8 has a float32 scale for each token and head, the others have none of their own.
STORED = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def check_kv_dtype(name: Any, option: str = "kv_dtype") -> str:
    """The name, where it is one. Raises ValueError with those that are."""
    if name != AUTO and name not in STORED:
        raise ValueError(f"{option}={name!r} is not one of {', '.join((AUTO, *STORED))}")
    return name


def stored_dtype(name: str, compute_dtype: Any) -> str:
    """The dtype of a cache, by JAX's name; "auto" is the one that the model computes in."""
    return jnp.dtype(compute_dtype).name if check_kv_dtype(name) == AUTO else STORED[name]


def kv_dtype_name(dtype: Any) -> str:
    """A stored dtype as users name it."""
    name = jnp.dtype(dtype).name
    return next((known for known, stored in STORED.items() if stored == name), name)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Static scales of an fp8 cache: what is stored, times its scale, is the key or value. Others have no use for them.

    Attributes:
      keys, values: float32 [layers, Hkv], a checkpoint's k_scale and v_scale.
    """

    keys: Any
    values: Any

    @classmethod
    def of_layers(cls, config: ModelConfig, keys: Sequence[Any], values: Sequence[Any]) -> "KVScales":
        """From each layer's scales: a number, [1] or [Hkv]. Raises ValueError with the layer of those that do not fit,
        or are not finite and positive."""
        return cls(_rows(config, keys, "k_scale"), _rows(config, values, "v_scale"))

    def first(self, num_layers: int) -> "KVScales":
        """Those of the first layers."""
        return KVScales(self.keys[:num_layers], self.values[:num_layers])


def is_scaled(dtype: Any) -> bool:
    """Whether static scales apply to a cache of this dtype."""
    return jnp.dtype(dtype).name.startswith("float8")


def applied_scales(scales: KVScales | None, dtype: Any, config: ModelConfig) -> KVScales | None:
    """The scales, where a cache of this dtype has a use for them. Raises ValueError for those of another model."""
    if scales is None or not is_scaled(dtype):
        return None
    if not config.caches_values:
        raise ValueError("kv_scales: latent attention caches one vector for keys and values, with no scale of its own")
    shape = (config.num_layers, config.num_kv_heads)
    if scales.keys.shape != shape or scales.values.shape != shape:
        raise ValueError(
            f"kv_scales are [layers, heads] = {list(shape)} for this model, got {list(scales.keys.shape)} and "
            f"{list(scales.values.shape)}"
        )
    return scales


def scaled(
    scales: KVScales | None, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [..., Hq, K], k and v [..., Hkv, K] for a cache that holds k / k_scale and v / v_scale: scores are the same."""
    if scales is None:
        return q, k, v
    keys, values = scales.keys[layer][:, None], scales.values[layer][:, None]
    repeated = jnp.repeat(keys, q.shape[-2] // keys.shape[0], axis=0)
    return (q * repeated).astype(q.dtype), (k / keys).astype(k.dtype), (v / values).astype(v.dtype)


def unscaled(scales: KVScales | None, layer: int, out: jax.Array) -> jax.Array:
    """Attention's output [..., Hq, K] over values that were stored divided by their scale."""
    if scales is None:
        return out
    values = scales.values[layer][:, None]
    return (out * jnp.repeat(values, out.shape[-2] // values.shape[0], axis=0)).astype(out.dtype)


def _rows(config: ModelConfig, layers: Sequence[Any], name: str) -> np.ndarray:
    if len(layers) != config.num_layers:
        raise ValueError(f"{len(layers)} layers have a {name}, and the model has {config.num_layers}")
    rows = np.empty((config.num_layers, config.num_kv_heads), np.float32)
    for index, layer in enumerate(layers):
        row = np.asarray(layer, np.float32).reshape(-1)
        if row.size not in (1, config.num_kv_heads):
            raise ValueError(f"{name} of layer {index} has {row.size} numbers, not 1 or {config.num_kv_heads}")
        if not (np.isfinite(row).all() and (row > 0).all()):
            raise ValueError(f"{name} of layer {index} must be finite and positive, got {row.tolist()}")
        rows[index] = row
    return rows
