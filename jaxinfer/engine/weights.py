"""The weights of a model: one tree, and every form of it that something reads, which are replaced together."""

import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, compute_dtype
from jaxinfer.models.disk_layers import DISK_LAYERS
from jaxinfer.models.host_layers import HOST_LAYERS, disk_layers, host_rows, move_layers_to_host
from jaxinfer.param_dict import plain
from jaxinfer.quantization import Selection
from jaxinfer.quantization.on_device import Copies, Packing, float32_copies, why_not_packing
from jaxinfer.quantization.packed import pack_weight
from jaxinfer.quantization.side_by_side import has_groups, join, separate
from jaxinfer.quantization.tree import is_packed, is_quantized, is_weight, weights

T = TypeVar("T")
U = TypeVar("U")


class WeightsUser(Protocol):
    """An object that answers requests with weights."""

    @property
    def has_work(self) -> bool: ...

    def drop_prefixes(self) -> None:
        """Gives up what was computed with the weights before."""

    def check_replaced(self) -> None:
        """Raises ValueError if it cannot go on with other weights."""


class WeightsView(Generic[T]):
    """A form of a model's weights, made by `make` from that of `source`.

    `value` is to be read wherever it is used: it changes when the weights are replaced. A view lives for as long as
    there is a reference to it, or to a view of it.
    """

    def __init__(self, make: Callable[[Any], T], source: "WeightsView[Any]", remake: Callable[[Any], T] | None = None):
        self._make, self._source, self._make_again = make, source, remake or make
        self.value = make(source.value)
        self._views: weakref.WeakSet[WeightsView[Any]] = weakref.WeakSet()
        source._views.add(self)

    @property
    def root(self) -> "ModelWeights":
        """The weights that it is a form of."""
        return self._source.root

    def view(self, make: Callable[[T], U], remake: Callable[[T], U] | None = None) -> "WeightsView[U]":
        """A form of this form. `make` gives trees of equal structure for equal structures; `remake` does for arrays
        that are like those before, without checks that they are."""
        return WeightsView(make, self, remake)

    def remake(self) -> None:
        """Makes this form, and those of it, anew from a source that is the same: `make` reads what else has changed,
        to arrays that are like those before."""
        self.value = self._make_again(self._source.value)
        for view in list(self._views):
            view.remake()

    def _staged(self, value: T) -> list[tuple["WeightsView[Any]", Any]]:
        """This view and those of it, with what their values would be."""
        staged: list[tuple[WeightsView[Any], Any]] = [(self, value)]
        for view in list(self._views):
            staged += view._staged(view._make(value))
        return staged


class ModelWeights(WeightsView["StoredWeights"]):
    """The weights that one model holds. What was loaded from files it may share with other models (`shared`) until it
    is given other weights.

    Attributes:
      version: how often the weights were replaced.
    """

    def __init__(self, params: Params, stored: "StoredWeights | None" = None):
        self.value = stored or StoredWeights(params)
        self.version = 0
        self._views = weakref.WeakSet()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def shared(cls, key: Hashable, load: Callable[[], Params]) -> "ModelWeights":
        """The weights of that key, loaded unless a model of this process has them."""
        stored = StoredWeights.shared(key, load)
        return cls(stored.params, stored)

    @property
    def params(self) -> Params:
        """The tree, as it was loaded."""
        return self.value.params

    @property
    def root(self) -> "ModelWeights":
        return self

    def add_user(self, user: WeightsUser) -> None:
        """Weights are not replaced while `user` has work, and it drops its prefixes when they are."""
        self._users.add(user)

    def replace(self, params: Params) -> None:
        """Gives every view other weights: a tree like `params`, whose arrays may be NumPy's. It stays the caller's.

        Of weights that a CPU packed as it read them, and of layers in the host's memory, plain ones are taken too; for
        a mesh that pads, what `llm.fit.place(params)` makes of them. No program is compiled again, cached prefixes are
        dropped, and models that shared the old weights keep them. Old and new weights are in memory at once. On several
        hosts all have to call it. Call it where no other thread steps an engine.

        Raises RuntimeError while requests are unfinished, and ValueError, with the name of the leaf, for a tree that
        differs in names, shapes, dtypes or kinds of weights, and for layers that are read from files. Nothing has
        changed then.
        """
        if any(user.has_work for user in self._users):
            raise RuntimeError("weights are replaced while requests are unfinished")
        for user in self._users:
            user.check_replaced()
        old = self.value
        staged = self._staged(StoredWeights(_formed_like(plain(params), old.params)))
        for view, value in staged:
            view.value = value
        self.version += 1
        for user in self._users:
            user.drop_prefixes()
        old.leave()  # arrays of it may be in the new tree, or come back

    def release(self) -> None:
        """As `StoredWeights.release`."""
        self.value.release()


def as_weights(params: Params | WeightsView[Params]) -> WeightsView[Params]:
    """A tree of parameters as weights of its own; a view as it is."""
    return params if isinstance(params, WeightsView) else ModelWeights(params).view(attrgetter("params"))


def leaves_of(weights: WeightsView[Params]) -> WeightsView[tuple[jax.Array, ...]]:
    """The arrays, as programs take them. Weights for which programs would be compiled again are refused: ValueError."""
    wanted = _signature(weights.value)

    def leaves(params: Params) -> tuple[jax.Array, ...]:
        signature = _signature(params)
        if signature != wanted:
            name = next(name for name in [*wanted, *signature] if wanted.get(name) != signature.get(name))
            raise ValueError(
                f"{name}: programs would be compiled again for {signature.get(name)}, they are for {wanted.get(name)}"
            )
        return tuple(jax.tree.leaves(params))

    return weights.view(leaves, lambda params: tuple(jax.tree.leaves(params)))


class StoredWeights:
    """Parameters as they were loaded, and the forms in which a CPU runs them. Those that were loaded from files are
    shared by all models of this process that were loaded from the same ones alike, and freed with the last of them.

    `key` says what they were loaded from, None for live parameters, which stay the caller's.
    """

    def __init__(self, params: Params, key: Hashable = None):
        self.params, self.key = params, key
        self._num_users = 1
        self._for_cpu: dict[str, tuple[Params, Copies | None]] = {}

    def for_cpu(self, config: ModelConfig, activations: str) -> tuple[Params, Copies | None]:
        """The parameters that a CPU runs, which are shared too, and the float32 copies in them, if any weight needs
        one."""
        if activations not in self._for_cpu:
            params = self.params
            if why_not_packing(compute_dtype(params)) is None:
                params = packing_of(config, activations).params(params)
            is_copied = any(is_quantized(leaf) for leaf in weights(params))
            self._for_cpu[activations] = float32_copies(params) if is_copied else (params, None)
        return self._for_cpu[activations]

    def leave(self) -> bool:
        """One user less; returns True if it was the last one, after which the weights are shared no more."""
        with _STORED_LOCK:
            self._num_users -= 1
            if self._num_users or self.key is None:
                return False
            _STORED.pop(self.key, None)
        return True

    def release(self) -> None:
        """One user less. After the last one the device memory of the weights is free, even if references to the
        arrays are left."""
        if not self.leave():
            return
        if disk := disk_layers(self.params):
            disk.reader.close()
        for leaf in jax.tree.leaves((self.params, [params for params, _ in self._for_cpu.values()])):
            if isinstance(leaf, jax.Array):
                leaf.delete()

    @classmethod
    def shared(cls, key: Hashable, load: Callable[[], Params]) -> "StoredWeights":
        """The weights of that key, loaded unless a model has them; the caller becomes a user."""
        with _STORED_LOCK:
            if (stored := _STORED.get(key)) is not None:
                stored._num_users += 1
                return stored
        made = cls(load(), key)
        with _STORED_LOCK:
            _STORED[key] = made
        return made


# Of the models of this process. A model that is dropped without `close` leaves nothing here.
_STORED: weakref.WeakValueDictionary[Hashable, StoredWeights] = weakref.WeakValueDictionary()
_STORED_LOCK = Lock()


def packing_of(config: ModelConfig, activations: str, chosen: Selection | None = None) -> Packing:
    """How a CPU packs the weights of a model."""
    rounded = None if activations == "float32" else activations
    return Packing(is_tied=config.tie_word_embeddings, activations=rounded, select=chosen)


def _named(params: Params) -> dict[str, Any]:
    """The leaves by name, a weight of several arrays as one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _signature(params: Params) -> dict[str, tuple[Any, ...]]:
    """By name, what a program is compiled for."""

    def of_array(array: Any) -> tuple[Any, ...]:
        return array.aval, array.format, array.committed

    leaves = {name: jax.tree.flatten(leaf) for name, leaf in _named(params).items()}
    return {name: (structure, *map(of_array, arrays)) for name, (arrays, structure) in leaves.items()}


def _formed_like(params: Params, wanted: Params) -> Params:
    """The parameters in the places, layouts and packed forms of those that they replace. Raises ValueError, with its
    name, for a leaf of another kind, shape or dtype."""
    if DISK_LAYERS in wanted:
        raise ValueError("layers that are read from files (offload='disk') cannot be replaced")
    if HOST_LAYERS in wanted and HOST_LAYERS not in params:
        params = move_layers_to_host(params, sorted(host_rows(wanted)), jax.default_backend())
    if has_groups(wanted):
        params = join(separate(params))
    given, own = _named(params), _named(wanted)
    if other := next((name for name in [*own, *given] if name not in given or name not in own), None):
        reason = "is missing" if other in own else "is none of the model's"
        raise ValueError(f"the weights cannot be replaced: {other} {reason}")
    formed = [_formed(name, given[name], leaf) for name, leaf in own.items()]
    return jax.tree.unflatten(
        jax.tree.structure(wanted, is_leaf=is_weight),
        [jax.tree.map(_placed, leaf, its) for leaf, its in zip(formed, own.values(), strict=True)],
    )


def _formed(name: str, leaf: Any, own: Any) -> Any:
    if is_packed(own) and not is_packed(leaf) and np.shape(leaf) == own.shape:
        leaf = pack_weight(leaf, is_transposed=own.is_transposed, activations=own.form.activations)
    (arrays, structure), (wanted, its) = jax.tree.flatten(leaf), jax.tree.flatten(own)
    if structure != its or list(map(_kind, arrays)) != list(map(_kind, wanted)):
        raise ValueError(f"the weights cannot be replaced: {name} is {_described(leaf)}, not {_described(own)}")
    return leaf


def _kind(array: Any) -> tuple[Any, ...]:
    return np.shape(array), jnp.result_type(array)


def _described(leaf: Any) -> str:
    arrays = ", ".join(f"{jnp.result_type(array)}{list(np.shape(array))}" for array in jax.tree.leaves(leaf))
    how = (getattr(leaf, "form", None) or getattr(leaf, "scheme", "")) if is_weight(leaf) else ""
    return f"{type(leaf).__name__} {how} of {arrays}" if is_weight(leaf) else arrays


def _placed(array: Any, own: Any) -> jax.Array:
    """The array where its predecessor lies. Programs differ by layouts too, and by whether an array is committed."""
    if not own.committed:
        is_alike = isinstance(array, jax.Array) and (array.aval, array.committed) == (own.aval, False)
        return array if is_alike else jax.device_put(np.asarray(array))
    placed: Any = jax.device_put(array, own.sharding)
    return placed if placed.format == own.format else jax.device_put(placed, own.format)
