"""The decoder, and the plain-dict form of its parameters that crosses `jax.jit`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.checks import did_you_mean
from jaxinfer.kept_files import KeptFiles, key_of, sources_key
from jaxinfer.models.attend import Attend, AttendByLayer, LayerAttend, LayerView, SharedKeys, Tap, Taps
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.hidden import Hidden, summed, with_added
from jaxinfer.models.host_layers import HostLayers, merged_names
from jaxinfer.models.rope import Positions
from jaxinfer.quantization.tree import for_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jaxinfer.models.draft_head import DraftHead
    from jaxinfer.models.layers import DecoderLayer

# Nested dict of arrays or `QuantizedArray`s, with the modules' names as keys; layers by their number as a string.
Params = dict[str, Any]
ExpertsOver = tuple[Mesh, str]
_NUM_NAMED = 5  # most missing, and most unexpected, parameters named in a message


class Decoder:
    """A decoder-only transformer for any leading shape: [B, T] in training and contiguous caches, [T] with pages.

    `bind` makes one, while tracing. Its parts are Flax modules over the parameters given.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        experts_over: ExpertsOver | None,
        adapters: jax.Array | None = None,
        added: Mapping[str, jax.Array] | None = None,
    ):
        self.config, self._kinds = config, config.kinds
        self._params, self._over, self._adapters = params, experts_over, adapters
        self.added = added or {}  # by layer, what is added to the hidden states after it
        self._embedding, self._head = _modules().bound_ends(config, self._for_rows(params))
        self.embed, self.final_norm = self._embedding.embed, self._head.final_norm

    def for_rows(self, adapters: Int[Array, "*rows"] | None, of: jax.Array | np.ndarray | None = None) -> Decoder:
        """The decoder for rows with the adapters int32 [T], or [], that of all rows; with `of` int32 [T] for rows with
        the adapters[of]. Itself where `adapters` is None."""
        if adapters is None:
            return self
        adapters = adapters if of is None else adapters[of]
        return Decoder(self.config, self._params, self._over, adapters, self.added)

    def steered(self, added: Mapping[str, jax.Array] | None, of: jax.Array | np.ndarray | None = None) -> Decoder:
        """The decoder that adds float32 vectors [T, D], or [D] for all rows, to the hidden states after layers, by
        their numbers as strings; with `of` int32 [T] the vectors [of]. Itself where `added` is None."""
        if not added:
            return self
        added = added if of is None else {layer: vectors[of] for layer, vectors in added.items()}
        return Decoder(self.config, self._params, self._over, self._adapters, added)

    def _for_rows(self, params: Params) -> Params:
        return params if self._adapters is None else for_rows(params, self._adapters)

    def __call__(
        self,
        tokens: Int[Array, "*rows"],
        positions: Int[Array, "*rows"],
        attend: Attend,
        tap: Taps | None = None,
        recomputes: bool = False,
    ) -> Float[Array, "*rows D"]:
        """Final hidden states [..., D] of int32 tokens [...] at int32 positions [...]; `tap` (`collect`) gets
        those that it names. With `recomputes`, for gradients and an `attend` without a cache, layers are computed once
        more backwards, so that the states between them are all that is kept."""
        with jax.named_scope("embed"):
            x = self._embedding(tokens, positions, self.final_norm.weight.get_value().dtype)
            layer_inputs = self._embedding.layer_inputs(tokens, positions, x)
        if tap is not None:
            tap("embed", x)
        shared, layers = _Pass(Positions(positions), layer_inputs), HostLayers(self._params)
        for number in range(self.config.num_layers):
            with jax.named_scope(f"layers.{number}"):
                own_tap = None if tap is None else tap.inside(number)
                params = self._for_rows(layers.take(number, jax.tree.leaves(x)[-1]))
                run = self._recomputed if recomputes else self._run_layer
                x = run(number, params, x, shared, attend, own_tap)
                if (vectors := self.added.get(str(number))) is not None:
                    x = with_added(x, vectors)
            if tap is not None and (name := f"layers.{number}.residual") in tap:
                x = summed(x)
                tap(name, x)
        with jax.named_scope("final_norm"):
            x = self._head.normed(x)
        if tap is not None:
            tap("final_norm", x)
        return x

    @jax.named_scope("logits")
    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """float32 logits [..., V] of hidden states [..., D]."""
        return self._head(hidden, self.embed.get_value())

    def _run_layer(
        self, number: int, params: Params, x: Hidden, shared: _Pass, attend: Attend, tap: Tap | None
    ) -> Hidden:
        """A layer like an earlier one is not traced again, if the cache can be passed layer by layer. The first of its
        kind is traced in place, since it computes what all of them share: rotations, and the schedule of a kernel."""
        config, first = self.config, self._kinds[number]
        source, kept = config.kv_source(number), shared.kept.get(config.kv_source(number))
        layer_input = shared.layer_input(config, number)
        if tap is None and number != first and isinstance(attend, AttendByLayer):
            own = attend.of_layer(source)
            own = own if kept is None else SharedKeys(own, *kept)
            x, state = _run_like(config, first, self._over, params, x, shared.positions, own, layer_input)
            attend.update(source, state)
            return x
        layer = bind_layer(config, first, params, self._over)
        if config.recurrent_of(number) is None:
            own = partial(attend, source)
            own = own if kept is None else SharedKeys(own, *kept)
            own = shared.keeping(number, own) if config.is_kv_source(number) else own
            return layer.run(x, shared.positions, own, tap, layer_input)
        if not isinstance(attend, AttendByLayer):
            return layer.run(x, shared.positions, LayerView(attend, number), tap)
        own = attend.of_layer(number)
        if not hasattr(own, "recur"):
            raise ValueError(f"{type(attend).__name__} has no states for recurrent layers")
        x = layer.run(x, shared.positions, own, tap)
        attend.update(number, own.state)
        return x

    def _recomputed(
        self, number: int, params: Params, x: Hidden, shared: _Pass, attend: Attend, tap: Tap | None
    ) -> Hidden:
        """As `_run_layer`, of an `attend` that is a function. The layer's inputs are all that is kept for gradients."""
        config, kept = self.config, shared.kept.get(self.config.kv_source(number))

        @jax.checkpoint
        def run(params: Params, x: Hidden, positions: Positions, layer_inputs: Any, kept: Any) -> Any:
            own = _Pass(positions, layer_inputs)
            if kept is not None:
                own.kept[config.kv_source(number)] = kept
            x = self._run_layer(number, params, x, own, attend, tap)
            return x, own.kept.get(number) if config.is_kv_source(number) else None

        x, made = run(params, x, Positions(shared.positions.positions), shared.layer_inputs, kept)
        if made is not None:
            shared.kept[number] = made
        return x


class _Pass:
    """Arrays that the layers of a forward pass share.

    Attributes:
      positions: of the tokens. layer_inputs: [..., L, P], or None.
      kept: keys and values of the layers whose later ones read them.
    """

    def __init__(self, positions: Positions, layer_inputs: jax.Array | None):
        self.positions, self.layer_inputs = positions, layer_inputs
        self.kept: dict[int, tuple[jax.Array, jax.Array]] = {}

    def layer_input(self, config: ModelConfig, layer: int) -> jax.Array | None:
        """A layer's part [..., P] of `layer_inputs`; None where there are none."""
        return None if self.layer_inputs is None else self.layer_inputs[..., config.layer_input_slots[layer], :]

    def keeping(self, layer: int, attend: Attend) -> Attend:
        """`attend` of a layer, which keeps the keys and values that it is called with."""

        def call(q: jax.Array, k: jax.Array, v: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            self.kept[layer] = (k, v)
            return attend(q, k, v, *args, **kwargs)

        return call


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run_like(
    config: ModelConfig,
    first: int,
    over: ExpertsOver | None,
    params: Params,
    x: Hidden,
    positions: Positions,
    attend: LayerAttend,
    layer_input: jax.Array | None,
) -> tuple[Hidden, Any]:
    """A layer of the kind of layer `first`, and the layer's part of the cache afterwards. One trace for all of them:
    the compiler gets one function and its calls."""
    x = bind_layer(config, first, params, over).run(x, positions, attend, None, layer_input)
    return x, attend.state


def bind(config: ModelConfig, params: Params, experts_over: ExpertsOver | None = None) -> Decoder:
    """A decoder with `params`; called while tracing, so that modules never cross a jit boundary.

    `experts_over` is the mesh, and its axis, over which experts are sharded. Raises ValueError, with names, for missing
    or unexpected parameters.
    """
    names, given = _names(config), frozenset(_leaf_names(merged_names(params)))
    if given != names:
        raise ValueError(_mismatch(config, names, given))
    return Decoder(config, params, experts_over)


def bind_draft_head(config: ModelConfig, params: Params) -> DraftHead:
    """A head that drafts, with `params`, as `bind`."""
    names, given = _names(config), frozenset(_leaf_names(params))
    if given != names:
        raise ValueError(_mismatch(config, names, given))
    return _modules().bound_draft_head(config, params)


def bind_layer(
    config: ModelConfig, number: int, params: Params, experts_over: ExpertsOver | None = None
) -> DecoderLayer:
    """One layer of a decoder, with its own `params`."""
    return _modules().bound_layer(config, number, params, experts_over)


def compute_dtype(params: Params) -> Any:
    """The dtype of hidden states: that of the norms, which are never quantized."""
    return params["final_norm"]["weight"].dtype


def keeps_float32(path: Sequence[str]) -> bool:
    """True if a parameter is float32 for any dtype of the model: the correction bias of a router, to which float32
    scores are added."""
    return tuple(path[-2:]) == ("router", "correction")


def init_params(config: ModelConfig, key: jax.Array, dtype=None) -> Params:
    """Random parameters: normal(0, 0.02) weights, unit norms, zero biases."""
    return _modules().init_params(config, key, dtype)


def abstract_params(config: ModelConfig, dtype=None) -> Params:
    """Shapes and dtypes of the parameters (`jax.ShapeDtypeStruct` leaves); allocates nothing.

    They are kept between processes, for starts without Flax.
    """
    if dtype is not None:
        config = replace(config, dtype=jnp.dtype(dtype).name)
    if "flax.nnx" in sys.modules or (files := KeptFiles.of("programs")) is None:
        return _modules().shapes(config)
    key = key_of("shapes", repr(config), sources_key(Path(__file__).parent))
    if (content := files.read(key)) is None:
        shapes = _modules().shapes(config)
        content = json.dumps(jax.tree.map(lambda leaf: [leaf.dtype.name, *leaf.shape], shapes)).encode()
        files.write(key, content)
    return _as_shapes(json.loads(content))


def logical_axes(config: ModelConfig) -> Params:
    """The logical name of every dimension of every parameter, for the sharding rules of `jaxinfer.parallel`."""
    return _modules().axes(config)


def tap_names(config: ModelConfig) -> list[str]:
    """Names of the hidden states that a forward pass can return, and of the tokens' experts."""
    layers = []
    for i in range(config.num_layers):
        parts = {"attention": config.layer_kind(i) != "none", "mlp": config.has_mlp(i), "residual": True}
        parts["experts"] = config.experts_of(i) is not None
        layers += [f"layers.{i}.{name}" for name, is_there in parts.items() if is_there]
    return ["embed", *layers, "final_norm"]


def check_taps(config: ModelConfig, taps: Sequence[str]) -> tuple[str, ...]:
    """The taps as a tuple. Raises ValueError for an unknown name, with the nearest known one."""
    known = tap_names(config)
    for tap in taps:
        if tap not in known:
            raise ValueError(f"no tap {tap!r}{did_you_mean(tap, known)}")
    return tuple(taps)


def collect(taps: Sequence[str]) -> tuple[dict[str, jax.Array], Taps]:
    """A dict, and the tap of a forward pass that stores the named hidden states in it."""
    tap = Taps(taps)
    return tap.states, tap


def _as_shapes(tree: Any) -> Any:
    """The parameters' shapes, of dicts and of lists that hold a dtype and the lengths of axes."""
    if isinstance(tree, list):
        return jax.ShapeDtypeStruct(tuple(tree[1:]), jnp.dtype(tree[0]))
    return {name: _as_shapes(part) for name, part in tree.items()}


def _modules() -> Any:
    """The module that needs Flax."""
    from jaxinfer.models import modules

    return modules


@lru_cache(maxsize=32)
def _names(config: ModelConfig) -> frozenset[str]:
    return frozenset(_leaf_names(abstract_params(config)))


def _leaf_names(tree: Params, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaf_names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _mismatch(config: ModelConfig, wanted: frozenset[str], given: frozenset[str]) -> str:
    missing, extra = sorted(wanted - given), sorted(given - wanted)
    parts = [f"parameter {name!r} is missing" for name in missing[:_NUM_NAMED]]
    parts += [f"parameter {name!r} is not of this model" for name in extra[:_NUM_NAMED]]
    left_out = len(missing) + len(extra) - len(parts)
    return f"{config.architecture}: {'; '.join(parts)}" + (f"; and {left_out} more" if left_out else "")
