"""Interfaces between decoder layers and the cache: `attend`, its form for each layer, hooks for hidden states. Shapes
use the legend of jaxinfer/README.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax

from jaxinfer.models.config import ModelConfig
from pallas_kernels.recurrence import RecurrentTokens, conv_of_sequences, recurrence_of_sequences

# attend(layer, q [..., Hq, K], k [..., Hkv, K], v [..., Hkv, K], window) -> [..., Hq, K]. Keyword arguments, if not the
# default: scale=float, soft_cap=float, sinks=float32 [Hq], as in `flash_attention`. A layer gets it with its number
# already bound.
Attend = Callable[..., jax.Array]
# A tap gets hidden states by name. For a token's experts it may return others, which then take their place.
Tap = Callable[[str, jax.Array], jax.Array | None]


class Taps:
    """Collects the named hidden states of a forward pass in `states`.

    Those between layers ("layers.N.residual") are taken outside of what is traced once for all layers.
    """

    def __init__(self, names: Iterable[str]):
        self._names = frozenset(names)
        self._split = {tuple(name.split(".")[1:]) for name in self._names if name.startswith("layers.")}
        self.states: dict[str, jax.Array] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __call__(self, name: str, value: jax.Array) -> jax.Array | None:
        if name in self:
            self.states[name] = value
        return None

    def inside(self, layer: int) -> Tap | None:
        """The tap of a layer, by the names of its parts; None where only states between layers are wanted."""
        if all(number != str(layer) or part == "residual" for number, part in self._split):
            return None
        return lambda name, value: self(f"layers.{layer}.{name}", value)


class Replay(Taps):
    """A tap that gives tokens the experts int32 [..., C] of another pass, by name ("layers.N.experts")."""

    def __init__(self, experts: dict[str, jax.Array]):
        super().__init__(experts)
        self._experts = experts

    def __call__(self, name: str, value: jax.Array) -> jax.Array | None:
        return self._experts.get(name)


class LayerAttend(Protocol):
    """`attend` of one layer: a pytree, so that it can be an argument of a jitted function, and be changed there.

    `state`: the layer's cache arrays; the returned ones go to `AttendByLayer.update`.
    """

    state: Any

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array: ...


def attention_options(config: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of `attend`, or of a kernel, in every layer: scale and soft cap, if not the default."""
    options = {"scale": config.attention_scale, "soft_cap": config.attention_softcap}
    return {name: value for name, value in options.items() if value is not None}


@runtime_checkable
class AttendByLayer(Protocol):
    """An `Attend` of which each layer's part is a pytree."""

    def of_layer(self, layer: int) -> LayerAttend: ...

    def update(self, layer: int, state: Any) -> None: ...


@jax.tree_util.register_pytree_node_class
class SharedKeys:
    """`attend` of a layer that reads the keys and values of an earlier one: that layer's `attend` and what it was
    called with. The call writes the same keys and values to the same pages again, so that a cache need not know of the
    layer."""

    def __init__(self, attend: Any, k: jax.Array, v: jax.Array):
        self._attend, self._k, self._v = attend, k, v

    def tree_flatten(self):
        return (self._attend, self._k, self._v), None

    @classmethod
    def tree_unflatten(cls, static, children) -> SharedKeys:
        return cls(*children)

    def __call__(self, q: jax.Array, k: None, v: None, *args: Any, **kwargs: Any) -> jax.Array:
        return self._attend(q, self._k, self._v, *args, **kwargs)

    @property
    def state(self) -> Any:
        return self._attend.state


class RecurrentStates(Protocol):
    """The states of one layer: each method reads and writes them, and is called at most once in a pass."""

    def convolve(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """A causal convolution of x [..., C] with weight [C, W]."""
        ...

    def recur(self, tokens: RecurrentTokens) -> jax.Array:
        """float32 outputs [..., H, V] of a linear recurrence."""
        ...


class LayerView:
    """`attend` of one layer of an `Attend` that takes the layer's number, with the layer's states.

    With a plain function or `partial` as `attend` there is no cache: x holds whole sequences, and the recurrence starts
    from zero states.
    """

    def __init__(self, attend: Any, layer: int):
        self._attend, self._layer = attend, layer

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self._attend(self._layer, *args, **kwargs)

    def convolve(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        if self._is_function():
            return conv_of_sequences(_as_batch(x, 1), weight, bias).reshape(x.shape)
        return self._attend.convolve(self._layer, x, weight, bias)

    def recur(self, tokens: RecurrentTokens) -> jax.Array:
        if self._is_function():
            q, k, v = _as_batch(tokens.q, 2), _as_batch(tokens.k, 2), _as_batch(tokens.v, 2)
            beta = None if tokens.beta is None else _as_batch(tokens.beta, 1)
            full = RecurrentTokens(q, k, v, _as_batch(tokens.g, 1), beta)
            return recurrence_of_sequences(full).reshape(tokens.v.shape)
        return self._attend.recur(self._layer, tokens)

    def _is_function(self) -> bool:
        attend = self._attend
        if inspect.isroutine(attend) or isinstance(attend, partial):
            return True
        if not hasattr(attend, "recur"):
            raise ValueError(f"{type(attend).__name__} has no states for recurrent layers")
        return False


def _as_batch(x: jax.Array, rank: int) -> jax.Array:
    """Merges all axes before T into one: [B, T, ...] of x [..., T, ...] with `rank` axes after T."""
    return x.reshape(-1, *x.shape[x.ndim - rank - 1 :])
