"""Vectors that a request adds to the hidden states between layers. NumPy alone: no JAX here."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

FORM = "steering is a mapping from layers to vectors, such as {3: vector}"


class Steering:
    """One float32 vector [D] for each of some layers, added after the layer at every token of a request.

    Equal to another one with the same vectors; its `fingerprint` salts cached prefixes.

    Args:
      vectors: NumPy or JAX arrays, or lists, of floating-point numbers, by the layer's number, from 0.

    Raises TypeError for what is no such mapping, and for vectors that are not floating point, ValueError for vectors
    that have not one axis, or a NaN or infinity in float32.
    """

    def __init__(self, vectors: Mapping[int, Any]):
        if not isinstance(vectors, Mapping) or not vectors:
            raise TypeError(f"{FORM}, got {type(vectors).__name__} {vectors!r:.60}")
        self.vectors = {int(layer): _read(layer, vectors[layer]) for layer in _sorted(vectors)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the layers and the vectors' bits."""
        digest = hashlib.sha256()
        for layer, vector in self.vectors.items():
            digest.update(f"{layer} {len(vector)} ".encode() + vector.tobytes())
        return digest.hexdigest()

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The vectors by the layers' numbers as strings, as programs take them."""
        return {str(layer): vector for layer, vector in self.vectors.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steering) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Steering(layers {', '.join(map(str, self.vectors))}; {self.fingerprint[:12]})"

    def __add__(self, other: "Steering | None") -> "Steering":
        """The vectors of both, summed in float32 where both have a layer."""
        if other is None:
            return self
        summed = {layer: _sum(self.vectors.get(layer), vector) for layer, vector in other.vectors.items()}
        return Steering({**self.vectors, **summed})

    def check(self, width: int, num_layers: int, steered_layers: tuple[int, ...]) -> None:
        """Raises ValueError, with the numbers, for a layer that a model of `num_layers` layers has not or that is not
        one of `steered_layers`, and for a vector whose length is not the model's `width`."""
        for layer, vector in self.vectors.items():
            if layer >= num_layers:
                raise ValueError(f"steering of layer {layer}: the model has layers 0 to {num_layers - 1}")
            if layer not in steered_layers:
                declared = f"steered_layers={steered_layers}" if steered_layers else "there are no steered_layers"
                raise ValueError(f"steering of layer {layer}: {declared}; name it when the LLM is made")
            if len(vector) != width:
                raise ValueError(
                    f"steering of layer {layer}: the vector has {len(vector)} numbers, hidden states {width}"
                )


def _sorted(vectors: Mapping[int, Any]) -> list[int]:
    for layer in vectors:
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"{FORM}, got the key {layer!r:.60}")
        if layer < 0:
            raise ValueError(f"steering of layer {layer}: layers count from 0")
    return sorted(vectors)


def _read(layer: int, given: Any) -> np.ndarray:
    """A vector in float32."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise TypeError(f"steering of layer {layer}: no vector of numbers: {error}") from None
    if "float" not in array.dtype.name:  # bfloat16 has a kind of its own
        raise TypeError(f"steering of layer {layer}: the vector must be floating point, got {array.dtype.name}")
    if array.ndim != 1:
        raise ValueError(f"steering of layer {layer}: the vector must have one axis, got the shape {array.shape}")
    with np.errstate(over="ignore"):
        vector = array.astype(np.float32)
    if bad := int(np.sum(~np.isfinite(vector))):
        raise ValueError(f"steering of layer {layer}: {bad} of {len(vector)} numbers are NaN or infinite in float32")
    vector.setflags(write=False)
    return vector


def _sum(own: np.ndarray | None, other: np.ndarray) -> np.ndarray:
    return other if own is None else own + other
