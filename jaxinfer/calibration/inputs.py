"""Inputs of a calibration: the float model, one unit at a time, and rows of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params
from jaxinfer.models.modules import scale_embedding
from jaxinfer.quantization.on_device import unpack_params
from jaxinfer.quantization.tree import check_plain

CHUNK_TOKENS = 4096  # of hidden states on the device at once
ReadUnit = Callable[[str], Params]


@dataclass(frozen=True)
class FloatModel:
    """A model to quantize, which is read one unit at a time.

    Attributes:
      read: returns the parameters of a unit ("layers.3", or a name in `rest`) as a nested dict.
      rest: names of the parameters outside the layers: embed, final_norm, lm_head.
      fingerprint: a digest that changes when the weights do.
    """

    config: ModelConfig
    read: ReadUnit
    rest: tuple[str, ...]
    fingerprint: str = ""

    @classmethod
    def of(cls, config: ModelConfig, params: Params) -> "FloatModel":
        """A model with parameters in memory. Raises ValueError if they are quantized."""
        params = unpack_params(params)
        check_plain(params, "calibration")

        def read(name: str) -> Params:
            return params["layers"][name.removeprefix("layers.")] if name.startswith("layers.") else params[name]

        return cls(config, read, tuple(name for name in params if name != "layers"))

    def layer(self, number: int) -> Params:
        """float32 parameters of a layer. Raises ValueError if they are quantized."""
        return jax.tree.map(partial(rounded, dtype="float32"), self._plain(f"layers.{number}"))

    def without_layers(self) -> Params:
        """float32 parameters outside the layers."""
        return {name: jax.tree.map(partial(rounded, dtype="float32"), self._plain(name)) for name in self.rest}

    def embedded(self, tokens: np.ndarray | None, dtype: str = "float32") -> list[np.ndarray]:
        """float32 hidden states before the first layer, in chunks, with embeddings rounded to `dtype`; [] without
        tokens."""
        if tokens is None:
            return []
        names = ("embed", "position_embed") if self.config.has_position_embedding else ("embed",)
        tables = {name: np.asarray(self._plain(name)) for name in names}

        def rows(name: str, index: np.ndarray) -> jax.Array:
            return rounded(tables[name][index], dtype).astype(jnp.float32)

        states = []
        for chunk in in_chunks(tokens):
            positions = rows("position_embed", np.arange(chunk.shape[1])) if len(names) > 1 else None
            states.append(np.asarray(scale_embedding(self.config, rows("embed", chunk), positions)))
        return states

    def _plain(self, name: str) -> Params:
        params = self.read(name)
        check_plain({name: params}, "calibration")
        return params


def in_chunks(rows: np.ndarray) -> list[np.ndarray]:
    """Rows [rows, T] in chunks of about `CHUNK_TOKENS` tokens."""
    count = max(CHUNK_TOKENS // rows.shape[1], 1)
    return [rows[first : first + count] for first in range(0, len(rows), count)]


def rounded(leaf: Any, dtype: str) -> jax.Array:
    """float32 values, rounded to `dtype`."""
    return jnp.asarray(leaf).astype(dtype).astype(jnp.float32)


_HELD_OUT_IN = 8  # one row in so many
_NUM_RANDOM = 128


@dataclass(frozen=True)
class CalibrationRows:
    """Rows of tokens to calibrate on, and held-out rows: int32 [rows, T] each, disjoint."""

    calibration: np.ndarray
    held_out: np.ndarray


def split_rows(
    documents: Sequence[Sequence[int]], separator: int | None, *, num_rows: int, length: int, seed: int
) -> CalibrationRows:
    """`num_rows` random pieces of `length` tokens of the documents, joined by `separator`; one in eight is held out.

    Raises ValueError for less text than two pieces.
    """
    end = [] if separator is None else [separator]
    stream = np.concatenate([np.asarray([*document, *end], np.int32) for document in documents])
    pieces = stream[: len(stream) // length * length].reshape(-1, length)
    if len(pieces) < 2:
        raise ValueError(f"{len(stream)} tokens of text are fewer than two pieces of {length}")
    chosen = np.random.default_rng(seed).permutation(len(pieces))[:num_rows]
    num_held_out = max(len(chosen) // _HELD_OUT_IN, 1)
    return CalibrationRows(pieces[np.sort(chosen[num_held_out:])], pieces[np.sort(chosen[:num_held_out])])


def random_rows(vocab_size: int) -> np.ndarray:
    """A row of random tokens [1, 128], always the same."""
    return np.random.default_rng(0).integers(0, vocab_size, (1, _NUM_RANDOM), dtype=np.int32)
