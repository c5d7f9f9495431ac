"""Dtypes of stored keys and values, and the static scales of fp8 caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig
from pallas_kernels.paged_attention.layout import ROTATED, dtype_name
from pallas_kernels.paged_attention.rotation import unsupported_width

AUTO = "auto"
# Stored dtype by option name. int8 and int4 have a float32 scale for each token and head; the others have none.
# int8_int4 stores keys as int8 and values as int4.
KV_DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8",
    "int8_int4": "int8_int4",
    "int4": "int4",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def check_kv_dtype(name: Any, option: str = "kv_dtype") -> str:
    """Returns the name. Raises ValueError, with the known ones, for an unknown name."""
    if name != AUTO and name not in KV_DTYPES:
        raise ValueError(f"{option}={name!r} is not one of {', '.join((AUTO, *KV_DTYPES))}")
    return name


def stored_dtype(name: str, compute_dtype: Any) -> str:
    """JAX's name of the stored dtype; "auto" is `compute_dtype`."""
    return jnp.dtype(compute_dtype).name if check_kv_dtype(name) == AUTO else KV_DTYPES[name]


def kv_dtype_name(dtype: Any) -> str:
    """The option name of a stored dtype."""
    name = dtype_name(dtype)
    return next((known for known, stored in KV_DTYPES.items() if stored == name), name)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Static scales of an fp8 cache: a key or value is the stored number times its scale. A pytree.

    Attributes:
      keys, values: float32 [layers, Hkv], a checkpoint's k_scale and v_scale; of one layer [Hkv].
    """

    keys: Any
    values: Any

    @classmethod
    def of_layers(cls, config: ModelConfig, keys: Sequence[Any], values: Sequence[Any]) -> "KVScales":
        """From the scales of each layer: a number, [1] or [Hkv].

        Raises ValueError, with the layer, for another size or a scale that is not finite and positive.
        """
        return cls(_rows(config, keys, "k_scale"), _rows(config, values, "v_scale"))

    def first(self, num_layers: int) -> "KVScales":
        """The scales of the first layers."""
        return KVScales(self.keys[:num_layers], self.values[:num_layers])


def is_scaled(dtype: Any) -> bool:
    """True if a cache of this dtype uses static scales."""
    return dtype_name(dtype).startswith("float8")


def is_rotated(dtype: Any) -> bool:
    """True if a cache of this dtype stores values, or keys and values, rotated, in 4 bits."""
    return dtype_name(dtype) in ROTATED


def check_rotated(config: ModelConfig, dtype: Any) -> None:
    """Raises ValueError, with the head width, for a cache of 4 bits of a model that cannot have one."""
    if not is_rotated(dtype):
        return
    name = kv_dtype_name(dtype)
    if not config.caches_values:
        raise ValueError(
            f"kv_dtype={name!r}: {config.architecture} has latent attention, which caches one vector for keys and "
            "values"
        )
    for width in sorted({config.head_dim_of(layer) for layer in config.cached_layers}):
        if (reason := unsupported_width(width)) is not None:
            raise ValueError(f"kv_dtype={name!r}: {reason}")


def applied_scales(scales: KVScales | None, dtype: Any, config: ModelConfig) -> KVScales | None:
    """The scales if a cache of this dtype uses them, else None. Raises ValueError for scales of another model."""
    if scales is None or not is_scaled(dtype):
        return None
    if not config.caches_values:
        raise ValueError("kv_scales: latent attention caches one vector for keys and values, with no scale of its own")
    if config.num_global_kv_heads not in (None, config.num_kv_heads) or config.kv_sources:
        raise ValueError("kv_scales: not supported for layers that differ in their heads, or that share keys")
    shape = (config.num_layers, config.num_kv_heads)
    if scales.keys.shape != shape or scales.values.shape != shape:
        raise ValueError(
            f"kv_scales are [layers, heads] = {list(shape)} for this model, got {list(scales.keys.shape)} and "
            f"{list(scales.values.shape)}"
        )
    return scales


def scales_of_layer(scales: KVScales | None, layer: int) -> KVScales | None:
    """The scales of one layer, if there are any."""
    return None if scales is None else KVScales(scales.keys[layer], scales.values[layer])


def divide_by_scales(
    scales: KVScales | None, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [..., Hq, K] times k_scale, k and v [..., Hkv, K] divided by their scales: what an fp8 cache stores, and
    queries with the same scores. `scales` are a layer's."""
    if scales is None:
        return q, k, v
    keys, values = scales.keys[:, None], scales.values[:, None]
    repeated = jnp.repeat(keys, q.shape[-2] // keys.shape[0], axis=0)
    return (q * repeated).astype(q.dtype), (k / keys).astype(k.dtype), (v / values).astype(v.dtype)


def multiply_by_scales(scales: KVScales | None, out: jax.Array) -> jax.Array:
    """The output [..., Hq, K] of attention over values that are stored divided by their scale, times that scale."""
    if scales is None:
        return out
    values = scales.values[:, None]
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


def default_page_size(platform: str, kv_dtype: str) -> int:
    """Tokens of a page. The scales of a page and head, if any, must fill a copy of the GPU's kernel: 128 bytes."""
    if platform == "tpu":
        return 64
    return 32 if platform == "gpu" and (kv_dtype == "int8" or is_rotated(kv_dtype)) else 16
