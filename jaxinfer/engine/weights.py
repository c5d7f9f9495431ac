"""The weights of a model: one tree, and every form of it that something reads, which are replaced together."""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np

from jaxinfer.engine.weight_forms import Origin, Path, WeightForms, by_path, given_by_path, single
from jaxinfer.models import ModelConfig, Params, compute_dtype
from jaxinfer.models.disk_layers import DISK_LAYERS
from jaxinfer.models.host_layers import HOST_LAYERS, disk_layers, host_rows, move_layers_to_host
from jaxinfer.param_dict import plain
from jaxinfer.quantization import Selection
from jaxinfer.quantization.on_device import Copies, Packing, float32_copies, why_not_packing
from jaxinfer.quantization.side_by_side import separate
from jaxinfer.quantization.tree import is_quantized, is_weight, weights

T = TypeVar("T")
U = TypeVar("U")


class WeightsUser(Protocol):
    """An object that answers requests with weights."""

    @property
    def has_begun(self) -> bool:
        """True while requests are computed, or results of the weights are on their way."""
        ...

    def drop_prefixes(self) -> None:
        """Gives up what was computed with the weights before."""

    def check_replaced(self) -> None:
        """Raises ValueError if it cannot go on with other weights."""


class WeightsError(RuntimeError):
    """Weights cannot be used now: an update of them has begun and has not ended."""


class WeightsView(Generic[T]):
    """A form of a model's weights, made by `make` from that of `source`.

    `value` is to be read wherever it is used: it changes when the weights are replaced, and is None in between. A view
    lives for as long as there is a reference to it, or to a view of it.
    """

    _on_drop: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        make: Callable[[Any], T],
        source: "WeightsView[Any]",
        remake: Callable[[Any], T] | None = None,
        on_drop: Callable[[], None] | None = None,
    ):
        self._make, self._source, self._make_again = make, source, remake or make
        self._on_drop = on_drop or self._on_drop
        self.value: T = make(source.value)
        self._views: weakref.WeakSet[WeightsView[Any]] = weakref.WeakSet()
        source._views.add(self)

    @property
    def root(self) -> "ModelWeights":
        """The weights that it is a form of."""
        return self._source.root

    def view(
        self, make: Callable[[T], U], remake: Callable[[T], U] | None = None, on_drop: Callable[[], None] | None = None
    ) -> "WeightsView[U]":
        """A form of this form. `make` gives trees of equal structure for equal structures; `remake` does for arrays
        that are like those before, without checks that they are. `on_drop` frees what else holds arrays of the form,
        when it is freed."""
        return WeightsView(make, self, remake, on_drop)

    def remake(self) -> None:
        """Makes this form, and those of it, anew from a source that is the same: `make` reads what else has changed,
        to arrays that are like those before."""
        self.value = self._make_again(self._source.value)
        for view in list(self._views):
            view.remake()

    def drop(self) -> None:
        """Frees this form and those of it, until they are made again."""
        self.value = None  # pyright: ignore[reportAttributeAccessIssue]
        self._on_drop()
        for view in list(self._views):
            view.drop()

    def _make_views(self) -> None:
        """Makes the forms of this form from what it is now; there are none of a form that was dropped otherwise."""
        for view in list(self._views):
            view.value = None if self.value is None else view._make(self.value)
            view._make_views()


class ModelWeights(WeightsView["StoredWeights"]):
    """The weights that one model holds. What was loaded from files it may share with other models (`shared`) until it
    is given other weights.

    Attributes:
      version: how often the weights were replaced. label: what the caller calls them, by default the version.
      origin: how they came to their form.
    """

    def __init__(self, params: Params, stored: "StoredWeights | None" = None, origin: Origin | None = None):
        self.value = stored or StoredWeights(params)
        self.version, self.label = 0, "0"
        self.origin = origin or Origin()
        self._forms: WeightForms | None = None
        self._leaves: dict[Path, Any] | None = None  # while an update writes
        self._lender: StoredWeights | None = None
        self._is_updating = self._is_asleep = self._is_dropped = False
        self._torn: set[Path] = set()  # written, or lost, by an update that has not ended
        self._written: set[Path] = set()  # by the one that has begun
        self._views = weakref.WeakSet()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def shared(cls, key: Hashable, load: Callable[[], Params], origin: Origin | None = None) -> "ModelWeights":
        """The weights of that key, loaded unless a model of this process has them."""
        stored = StoredWeights.shared(key, load)
        return cls(stored.params, stored, origin)

    @property
    def params(self) -> Params:
        """The tree, as it was loaded. Raises WeightsError in an update."""
        self.check_whole()
        return self.value.params

    @property
    def root(self) -> "ModelWeights":
        return self

    def add_user(self, user: WeightsUser) -> None:
        """Weights are not replaced while `user` has begun something, and it drops its prefixes when they are."""
        self._users.add(user)

    # Replacing.

    @property
    def why_not_whole(self) -> str | None:
        """The reason why nothing can be computed with the weights; None where it can."""
        if self.is_whole:
            return None
        num_all = len(self.forms.forms)
        if self._is_updating:
            return f"an update of the weights is under way: {len(self._written)} of {num_all} were written"
        if self._is_dropped:
            return f"the weights {'are asleep and ' * self._is_asleep}were dropped: an update has to give all {num_all}"
        if self._is_asleep:
            return "the weights are asleep: wake_up brings them back"
        return f"an update of the weights has failed: {len(self._torn)} of {num_all} have to be given again"

    @property
    def is_whole(self) -> bool:
        """True if all weights are there, and no update is under way."""
        return self._leaves is None and not self._is_updating

    def check_whole(self) -> None:
        """Raises WeightsError while an update is under way, or after one that wrote only some of the weights."""
        if (reason := self.why_not_whole) is not None:
            raise WeightsError(reason)

    @property
    def has_host_layers(self) -> bool:
        """True if layers lie in the host's memory."""
        return any(path[0] == HOST_LAYERS for path in self.forms.forms)

    @property
    def forms(self) -> WeightForms:
        """Names, shapes and places of the weights."""
        if self._forms is None:
            self._forms = WeightForms(self.value.params, self.origin, self.value.run)
        return self._forms

    def replace(
        self, params: Params, *, label: str | None = None, is_partial: bool = False, copies: bool = False
    ) -> None:
        """Gives every view other weights: a tree like `params`, whose arrays may be NumPy's. It stays the caller's, and
        its arrays are used where they are as they have to be, unless `copies`.

        Plain weights are taken in place of packed ones, of rounded ones (which rounds them likewise), of layers in the
        host's memory and of those that a mesh pads; numbers are rounded to the dtype that is there. All are checked
        before the first is written. Each is freed when the new one is there, so that besides the weights one more is in
        memory, unless another model shares them. No program is compiled again, cached prefixes are dropped. On several
        hosts all have to call it. Call it where no other thread steps an engine.

        Args:
          label: what these weights are called; by default how often they were replaced.
          is_partial: whether weights that the tree lacks stay.

        Raises RuntimeError while requests are computed, and ValueError, with the name of the leaf, for a tree that
        differs in names, shapes or kinds of weights, and for layers that are read from files. Nothing has changed then.
        """
        self.begin()
        try:
            self.write(params, is_partial=is_partial, copies=copies)
        except BaseException:
            self.cancel()
            raise
        self.finish(label)

    def begin(self) -> None:
        """Begins an update, in place of one that has not ended. Nothing is computed until `finish`, or `cancel` of one
        that has written nothing.

        Raises RuntimeError while requests are computed, and as `check_replaceable`.
        """
        self._check_rest()
        self.check_replaceable()
        self._is_updating, self._written = True, set()

    def check_replaceable(self) -> None:
        """Raises RuntimeError for weights that sleep, ValueError for those that cannot be replaced."""
        if self._is_asleep and not self._is_dropped:
            raise RuntimeError(self.why_not_whole)
        for user in self._users:
            user.check_replaced()
        self._check_not_on_disk("replaced")

    def write(
        self,
        params: Params,
        *,
        is_partial: bool = True,
        copies: bool = False,
        report: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Replaces some of the weights, in an update that has begun, or all; `report` gets the name of each that is
        written. Arguments and errors as of `replace`."""
        self._check_begun()
        given = self._given(params)
        self.forms.check(given, is_partial=is_partial)
        self.write_each(given.items(), given.keys(), copies=copies, report=report)

    def write_each(
        self,
        given: Iterable[tuple[Path, Any]],
        paths: Collection[Path],
        *,
        copies: bool = False,
        report: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Replaces the weights of `paths` by those that are `given`, as they come; `forms.check` has taken them. After
        an error that left some of them written, all of them are to be written again."""
        self._check_begun()
        leaves, num_before = self._open(), len(self._written | self._torn)
        come: set[Path] = set()

        def marked() -> Iterator[tuple[Path, Any]]:
            for path, leaf in given:
                come.add(path)
                yield path, leaf

        try:
            for path, leaf in self.forms.formed(marked(), lambda path: single(leaves, path), copies=copies):
                if path in come:  # others are those beside it
                    self._torn.add(path)
                leaves[path] = jax.block_until_ready(leaf)
                if path in come:
                    self._written.add(path)
                report(".".join(path))
        except BaseException:
            if len(self._written | self._torn) > num_before or self._torn & set(paths):
                self._torn |= set(paths)
                self._written -= set(paths)
            raise

    def cancel(self) -> None:
        """Ends an update that has written nothing; one that has leaves the weights as they are, to be replaced by
        another."""
        self._is_updating = False
        if self._leaves is not None and not self._torn and not self._is_asleep:
            self._make_whole()

    def finish(self, label: str | None = None) -> None:
        """Ends an update: everything is computed with the new weights. One that has written nothing changes nothing.

        Raises RuntimeError, with a name, where this update has not replaced what another one left half written, and
        for the `label` of an update that has written nothing; nothing is computed then.
        """
        self._check_begun()
        if missing := next((path for path in self.forms.forms if path in self._torn - self._written), None):
            raise RuntimeError(
                f"{'.'.join(missing)} is of an update that has not ended, and this one has not replaced it: update all "
                "weights"
            )
        if self._written:
            self.version += 1
            self.label = str(self.version) if label is None else label
        elif label not in (None, self.label):
            raise RuntimeError(
                f"this update has written no weights: {label!r:.80} would name those of {self.label!r:.80}"
            )
        self._is_updating = False
        if self._leaves is not None:
            self._make_whole()
            for user in self._users:
                user.drop_prefixes()

    def _check_begun(self) -> None:
        if not self._is_updating:
            raise RuntimeError("no update of the weights has begun")

    def _check_not_on_disk(self, what: str) -> None:
        if self._leaves is None and DISK_LAYERS in self.value.params:
            raise ValueError(f"layers that are read from files (offload='disk') cannot be {what}")

    def _check_rest(self) -> None:
        if any(user.has_begun for user in self._users):
            raise RuntimeError("weights are replaced while requests are unfinished")

    # Sleeping.

    @property
    def is_asleep(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self._is_asleep

    def sleep(self, *, keeps: bool = True) -> None:
        """Gives the device's memory back. With `keeps` the weights lie in the host's memory until `wake_up`; without,
        nothing is left of them, and an update gives all. Sleeping twice is harmless. Raises as `check_sleep`."""
        self.check_sleep(keeps=keeps)
        if keeps and self._is_asleep:
            return
        leaves = self._open()
        self._is_asleep = True
        if not keeps:
            self._is_dropped = True
            self._torn.update(self.forms.forms)
            leaves.clear()
            return
        for path in list(leaves):
            leaves[path] = jax.tree.map(np.array, leaves[path])

    def check_sleep(self, *, keeps: bool = True) -> None:
        """Raises RuntimeError while requests are computed or an update is under way, and with `keeps` where there is
        nothing to keep; ValueError for layers that are read from files."""
        if self._is_updating or (keeps and not self._is_asleep):
            self.check_whole()
        self._check_rest()
        self._check_not_on_disk("given back")

    def wake_up(self) -> None:
        """Brings weights that sleep back to their places. Harmless if none do. Those that were dropped come with an
        update, before or after it."""
        if not self._is_asleep:
            return
        if self._is_dropped:
            self._is_asleep = False
            return
        leaves = self._open()
        for path, leaf in list(leaves.items()):
            leaves[path] = self.forms.placed(path, leaf)
        self._make_whole()

    def _make_whole(self) -> None:
        assert self._leaves is not None
        self.value = StoredWeights(self.forms.tree(self._leaves))
        if self._lender is not None:
            self._lender.leave_with(self.value.params)
            self._lender = None
        self._make_views()
        self._leaves, self._torn = None, set()
        self._is_updating = self._is_asleep = self._is_dropped = False

    def _given(self, params: Params) -> dict[Path, Any]:
        """The weights of a tree by path, with layers where the host's memory has them. Raises TypeError for what is no
        tree."""
        if not isinstance(params, Mapping):
            told = f"{type(params).__name__} {params!r:.60}"
            raise TypeError(f"weights are a nested dict of arrays, or the path of a folder, got {told}")
        params = separate(plain(params))
        own = self.forms.forms
        if self.has_host_layers and HOST_LAYERS not in params:
            if not {*params} >= {path[0] for path in own} - {HOST_LAYERS}:
                raise ValueError("the weights of layers in the host's memory are replaced all together")
            on_host = {HOST_LAYERS: {path[1]: {} for path in own if path[0] == HOST_LAYERS}}
            params = move_layers_to_host(params, sorted(host_rows(on_host)), jax.default_backend())
        return given_by_path(params)

    def _open(self) -> dict[Path, Any]:
        """The weights by path, to be replaced; all forms of them are freed."""
        if self._leaves is None:
            _ = self.forms
            old, self._leaves = self.value, by_path(self.value.params)
            self.drop()
            if old.is_shared:
                self._lender = old  # until it is known whether the new tree has arrays of it
            else:
                old.leave()
        return self._leaves

    def release(self) -> None:
        """As `StoredWeights.release`."""
        if self._lender is not None:
            self._lender.release()
        if self.value is not None:
            self.value.release()
        self._leaves = None
        self.drop()


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
        self._num_users, self._is_lent = 1, False
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

    @property
    def run(self) -> list[Params]:
        """The trees that `for_cpu` has made."""
        return [params for params, _ in self._for_cpu.values()]

    def leave(self) -> bool:
        """One user less; returns True if it was the last one, after which the weights are shared no more."""
        with _STORED_LOCK:
            self._num_users -= 1
            if self._num_users or self.key is None:
                return False
            _STORED.pop(self.key, None)
        return True

    @property
    def is_shared(self) -> bool:
        """True if other models use it too."""
        return self._num_users > 1

    def leave_with(self, params: Params) -> None:
        """One user less, who goes on with this tree: its arrays are not deleted with the last user."""
        own = {id(array) for array in jax.tree.leaves(self.params)}
        self._is_lent |= any(id(array) in own for array in jax.tree.leaves(params))
        self.leave()

    def release(self) -> None:
        """One user less. After the last one the device memory of the weights is free, even if references to the
        arrays are left."""
        if not self.leave() or self._is_lent:
            return
        if disk := disk_layers(self.params):
            disk.reader.close()
        for leaf in jax.tree.leaves((self.params, self.run)):
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
