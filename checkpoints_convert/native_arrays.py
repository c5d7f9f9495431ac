"""A `QuantizedArray` as named arrays that Orbax stores, and a description that JSON holds."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxinfer.quantization import NestedScales, QuantizedArray, Scheme

Description = dict[str, Any]
_PARTS = ("values", "scales", "zeros", "codebook", "permutation", "minima")
_NESTED = ("codes", "table", "outer", "offset")


def flatten(array: QuantizedArray) -> dict[str, np.ndarray]:
    """Its arrays by part: values, scales (or scales.codes, ...), zeros, codebook, permutation, minima."""
    parts: dict[str, np.ndarray] = {}
    for part in _PARTS:
        value = getattr(array, part)
        if isinstance(value, NestedScales):
            parts |= {f"{part}.{name}": np.asarray(getattr(value, name)) for name in _NESTED}
        elif value is not None:
            parts[part] = np.asarray(value)
    return parts


def describe(array: QuantizedArray) -> Description:
    """What `rebuild` and a reader need to know before they read: the scheme, and dtype and shape of every part."""
    return {
        "scheme": asdict(array.scheme),
        "inner": array.scales.inner if isinstance(array.scales, NestedScales) else None,
        "parts": {part: [value.dtype.name, list(value.shape)] for part, value in flatten(array).items()},
    }


def parts_of(description: Description) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype by part. Raises ValueError, KeyError or TypeError for what `describe` never wrote."""
    parts = {str(part): (tuple(map(int, shape)), str(dtype)) for part, (dtype, shape) in description["parts"].items()}
    unknown = set(parts) - {*_PARTS, *(f"scales.{name}" for name in _NESTED)}
    if unknown or "values" not in parts or not {"scales", "scales.codes"} & set(parts):
        raise ValueError(f"parts {sorted(parts)} are not of a quantized array")
    _scheme(description)
    return parts


def rebuild(description: Description, parts: Mapping[str, np.ndarray]) -> QuantizedArray:
    """The inverse of `flatten`."""
    fields: dict[str, Any] = {part: parts[part] for part in _PARTS if part in parts}
    if description["inner"] is not None:
        nested: dict[str, Any] = {name: parts[f"scales.{name}"] for name in _NESTED}
        fields["scales"] = NestedScales(**nested, inner=int(description["inner"]))
    return QuantizedArray(**fields, scheme=_scheme(description))


def _scheme(description: Description) -> Scheme:
    fields = description["scheme"]
    return Scheme(fields["kind"], fields["bits"], tuple(fields["block"]), fields["activations"])
