"""Scales of an 8-bit key-value cache in a checkpoint: the key is stored_key * k_scale."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from checkpoints_convert.formats.module import FLOATS, FormatError, Headers
from checkpoints_convert.safetensors_files import TensorHeader
from jaxinfer.models import ModelConfig

_LOG = logging.getLogger(__name__)
# compressed-tensors, ModelOpt, vLLM's own layout, the single scale of older files; attention of Nemotron-H is a mixer.
_NAME = re.compile(
    r"(?:\w+\.)*(?:layers|h)\.(\d+)\.(?:self_attn|self_attention|attention|attn|mixer)\.(?:attn\.|[qkv]_proj\.)?(k_scale|v_scale|kv_scale|q_scale|k_proj\.output_scale"
    r"|v_proj\.output_scale)"
)
_KEY = ("k_scale", "k_proj.output_scale")
_VALUE = ("v_scale", "v_proj.output_scale")


@dataclass(frozen=True)
class LayerKVScales:
    """Scales of one layer: one number for all heads, or one per key-value head."""

    k: tuple[float, ...]
    v: tuple[float, ...]


def kv_scale_names(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """(layer, kind) of the tensors that are scales of the cache, by name."""
    return {name: (int(match[1]), match[2]) for name in names if (match := _NAME.fullmatch(name))}


def check_kv_scale(header: TensorHeader, layer: int, config: ModelConfig) -> None:
    """Raises FormatError unless a tensor can have the scales of that layer's cache."""
    dtype, shape = header
    if layer >= config.num_layers:
        raise FormatError(f"is of layer {layer}, the model has {config.num_layers}")
    if dtype not in FLOATS or int(np.prod(shape, dtype=np.int64)) not in (1, config.num_kv_heads):
        raise FormatError(f"is {dtype}{list(shape)}, not one number or one for each of {config.num_kv_heads} heads")


def read_kv_scales(
    headers: Headers,
    num_layers: int,
    read: Callable[[str], np.ndarray],
    attention_layers: Collection[int] | None = None,
) -> tuple[LayerKVScales, ...]:
    """The scales of every layer, () where there are none; of a layer without attention they are 1.

    A scale that is 0 or less, or absent, was never calibrated: it becomes 1, or the layer's other scale, with a
    warning. Scales of queries, which are never quantized here, are named in a warning too. `attention_layers` None is
    all layers.
    """
    by_layer: list[dict[str, tuple[float, ...]]] = [{} for _ in range(num_layers)]
    for name, (layer, kind) in kv_scale_names(headers).items():
        if kind == "q_scale":
            _LOG.warning("%s: queries are not quantized, the scale is not applied", name)
            continue
        values = tuple(float(value) for value in read(name).astype(np.float32).reshape(-1))
        sides = "kv" if kind == "kv_scale" else "k" if kind in _KEY else "v"
        for side in sides:
            by_layer[layer].setdefault(side, values)
    if not any(by_layer):
        return ()
    cached = range(num_layers) if attention_layers is None else attention_layers
    none = LayerKVScales((1.0,), (1.0,))
    return tuple(_layer(number, scales) if number in cached else none for number, scales in enumerate(by_layer))


def _layer(number: int, scales: Mapping[str, tuple[float, ...]]) -> LayerKVScales:
    good = {side: values for side, values in scales.items() if min(values) > 0}
    if len(good) < 2:
        _LOG.warning("layer %d: scales of the key-value cache are missing or not positive: %s", number, dict(scales))
    other = (max(max(values) for values in good.values()),) if good else (1.0,)
    return LayerKVScales(good.get("k", other), good.get("v", other))
