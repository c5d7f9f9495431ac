"""One decoder layer at a time: its output, and statistics of what goes into each of its linear layers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models import ModelConfig, Params, abstract_params, bind
from jaxinfer.models.layers import DecoderLayer, Linear
from jaxinfer.models.rope import rotation
from pallas_kernels.flash_attention import flash_attention


class InputStatistics(NamedTuple):
    """Sums over the tokens that a linear layer saw; float32.

    Attributes:
      hessian: [K, K], the sum of x x^T. absolute: [K], the sum of |x|. largest: [K], the largest |x|.
      num_tokens: how many.
    """

    hessian: jax.Array
    absolute: jax.Array
    largest: jax.Array
    num_tokens: jax.Array

    def __add__(self, other: "InputStatistics") -> "InputStatistics":  # type: ignore[override]
        return InputStatistics(
            self.hessian + other.hessian,
            self.absolute + other.absolute,
            jnp.maximum(self.largest, other.largest),
            self.num_tokens + other.num_tokens,
        )

    @property
    def mean_absolute(self) -> jax.Array:
        return self.absolute / self.num_tokens


@dataclass(frozen=True)
class LayerProgram:
    """The programs of one decoder layer, shared by all layers of its kind.

    A linear layer is named by its path in the layer, such as "mlp.up_proj".

    Attributes:
      groups: names of the linear layers that read the same input, in the order of computation.
    """

    config: ModelConfig

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "LayerProgram":
        """The programs of layer number `layer`."""
        windows = (config.sliding_windows[layer],) if config.sliding_windows else ()
        # A model of that layer and one token, whose layer it is.
        return cls(replace(config, num_layers=1, sliding_windows=windows, vocab_size=1, tie_word_embeddings=True))

    def forward(self, params: Params, x: jax.Array | np.ndarray) -> jax.Array:
        """Hidden states [B, T, D] after the layer, of those before it."""
        return _programs(self.config).forward(params, x)

    def statistics(
        self, params: Params, chunks: Iterable[jax.Array | np.ndarray], names: tuple[str, ...]
    ) -> InputStatistics:
        """Of the input that the linear layers `names` share, over chunks [B, T, D] of hidden states."""
        collect = _programs(self.config).statistics
        total = None
        for chunk in chunks:
            total = collect(params, chunk, names[0], total)
        if total is None:
            raise ValueError("no hidden states to take statistics of")
        return total

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return _programs(self.config).groups


class _Programs(NamedTuple):
    groups: tuple[tuple[str, ...], ...]
    forward: Callable[..., jax.Array]
    statistics: Callable[..., InputStatistics]


class _Recorder(nnx.Module):
    """Stands for a linear layer and keeps what goes into it."""

    def __init__(self, linear: Linear, name: str, found: dict[str, jax.Array]):
        self._linear = linear
        self._record = lambda x: found.__setitem__(name, x)

    def __call__(self, x: jax.Array) -> jax.Array:
        self._record(x)
        return self._linear(x)


@lru_cache(maxsize=8)
def _programs(config: ModelConfig) -> _Programs:
    rest = abstract_params(config)

    def layer_of(params: Params) -> DecoderLayer:
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
        return bind(config, {**blank, "layers": {"0": params}}).layers[0]

    def attend(layer, q, k, v, window):
        return flash_attention(q, k, v, window=window)

    def rotations(x: jax.Array):
        return rotation(config.rope, jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))

    def run(layer: DecoderLayer, x: jax.Array) -> jax.Array:
        return layer(x, *rotations(x), attend, lambda name, value: None)

    def inputs(params: Params, x: jax.Array) -> dict[str, jax.Array]:
        layer, found = layer_of(params), {}
        for path, linear in list(nnx.iter_modules(layer)):
            if isinstance(linear, Linear):
                parent = layer
                for part in path[:-1]:
                    parent = getattr(parent, str(part))
                setattr(parent, str(path[-1]), _Recorder(linear, ".".join(map(str, path)), found))
        run(layer, x)
        return found

    def statistics(params: Params, x: jax.Array, name: str, total: InputStatistics | None) -> InputStatistics:
        rows = inputs(params, x)[name].astype(jnp.float32)
        rows = rows.reshape(-1, rows.shape[-1])
        sizes = jnp.abs(rows)
        hessian = jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST)
        found = InputStatistics(hessian, sizes.sum(0), sizes.max(0), jnp.float32(len(rows)))
        return found if total is None else total + found

    groups: dict[int, list[str]] = {}

    def find_groups(params: Params, x: jax.Array) -> None:
        found = inputs(params, x)  # all alive at once, so that no two share an identity by chance
        for name, value in found.items():
            groups.setdefault(id(value), []).append(name)

    width = jax.ShapeDtypeStruct((1, 2, config.hidden_size), jnp.float32)
    jax.eval_shape(find_groups, rest["layers"]["0"], width)
    return _Programs(
        tuple(map(tuple, groups.values())),
        jax.jit(lambda params, x: run(layer_of(params), x)),
        jax.jit(statistics, static_argnames="name", donate_argnames="total"),
    )
