"""The form of each weight of a model, without its numbers; new numbers are brought into it one weight at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from jaxinfer.models import MeshFit, Params
from jaxinfer.quantization.packed import pack_weight
from jaxinfer.quantization.side_by_side import WEIGHT, InFirst, SideBySide, join, weight_at
from jaxinfer.quantization.tree import is_packed, is_weight

Path = tuple[str, ...]
Rounding = Callable[[Path, Any], Any]  # `quantization.Selection`


@dataclass(frozen=True)
class ArrayPlace:
    """Facts of an array that programs are compiled for, and the place where it lies."""

    aval: Any
    format: Format
    committed: bool

    @classmethod
    def of(cls, array: Any) -> "ArrayPlace":
        """The place of an array."""
        return cls(array.aval, array.format, array.committed)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        return len(self.aval.shape)

    @property
    def size(self) -> int:
        return self.aval.size

    def put(self, array: Any, *, copies: bool) -> jax.Array:
        """The array here. Programs differ by layouts too, and by whether an array is committed. `copies`: never the
        array itself, which its owner may free."""
        if not self.committed:
            if isinstance(array, jax.Array) and ArrayPlace.of(array) == self:
                return jnp.array(array, copy=True) if copies else array
            return jnp.array(np.asarray(array), copy=True) if copies else jax.device_put(np.asarray(array))
        placed: Any = jax.device_put(array, self.format.sharding, may_alias=False if copies else None)
        return placed if placed.format == self.format else jax.device_put(placed, self.format)


@dataclass(frozen=True)
class Origin:
    """How a model's weights came to their form.

    Attributes:
      rounding: what rounded them as they were loaded; None for none.
      quantization: the quantized format that their files were in, None for none.
      fit: of the mesh that they lie on, None for one device.
    """

    rounding: Rounding | None = None
    quantization: str | None = None
    fit: MeshFit | None = None


class WeightForms:
    """The forms of all weights of a tree. `run`: trees of the same weights, some of them packed, that programs take.

    Attributes:
      forms: by path, each weight with `ArrayPlace`s in place of its arrays.
    """

    def __init__(self, params: Params, origin: Origin, run: Sequence[Params] = ()):
        self._origin = origin
        self.forms = _forms_of(params)
        self._packed_forms = [
            {path: own for path, own in _forms_of(other).items() if is_packed(own)} for other in (params, *run)
        ]
        self._structure = jax.tree.structure(params, is_leaf=is_weight)

    def tree(self, leaves: Mapping[Path, Any]) -> Params:
        """The tree of weights by path, which must be all."""
        return jax.tree.unflatten(self._structure, [leaves[path] for path in self.forms])

    def check(self, given: Mapping[Path, Any], *, is_partial: bool) -> None:
        """Raises ValueError, with its name, for a weight that is missing, unknown, or could not be brought into its
        form."""
        if more := next((path for path in given if path not in self.forms), None):
            raise _refused(more, "is none of the model's")
        missing = next((path for path in self.forms if path not in given), None)
        if missing is not None and not is_partial:
            raise _refused(missing, "is missing")
        for path, leaf in given.items():
            for array in jax.tree.leaves(leaf) if is_weight(leaf) else (leaf,):
                _check_array(path, array)
            self._check(path, leaf)

    def _check(self, path: Path, leaf: Any) -> None:
        own = self._single(path)
        shape = jax.tree.map(_abstract, leaf)
        if (fit := self._origin.fit) is not None and not is_packed(leaf):
            shape = jax.eval_shape(lambda leaf: fit.resized(path, leaf), shape) if shape.shape != own.shape else shape
        if shape.shape != own.shape:
            raise _refused(path, f"is {described(leaf)}, not {described(own)}")
        scheme = getattr(own, "scheme", None)
        if is_weight(leaf) and not (is_packed(own) and not is_packed(leaf)) and not _is_alike(shape, own):
            raise _refused(path, f"is {described(leaf)}, not {described(own)}")
        if not is_weight(leaf):
            if scheme is not None and self._origin.rounding is None:
                raise _refused(path, self._why_not_rounded(leaf, own))
            if not _rounds_to(leaf, own):
                raise _refused(path, f"is {described(leaf)}, not {described(own)}")
        is_abstract = any(isinstance(array, jax.ShapeDtypeStruct) for array in jax.tree.leaves(leaf))
        for packed in () if is_abstract else self._packed_forms:
            # Of a quantized weight it depends on the values of the scales.
            if (own := packed.get(path)) is not None and own.scheme is not None:
                form = self._packed(own, leaf if is_weight(leaf) else self._rounded(path, leaf))
                if not _is_alike(form, own):
                    told = f"programs would be compiled again for {described(form)}, they are for {described(own)}"
                    raise _refused(path, f": {told}")

    def _why_not_rounded(self, leaf: Any, own: Any) -> str:
        told = f"is {described(leaf)}, and the model's is quantized: {described(own)}"
        if (how := self._origin.quantization) is not None:
            told += f". {how} is not rounding to nearest: give weights in that form, or load the model with quantize="
        return told

    def _single(self, path: Path) -> Any:
        """The form of a weight on its own."""
        own = self.forms[path]
        if isinstance(own, SideBySide):
            return jax.tree.map(lambda place: jax.ShapeDtypeStruct(place.shape, place.dtype), own).part(0)
        if isinstance(own, InFirst):
            first = self.forms[_sibling(path, own.first)]
            return jax.tree.map(lambda place: jax.ShapeDtypeStruct(place.shape, place.dtype), first).part(own.number)
        return own

    def formed(
        self, given: Iterable[tuple[Path, Any]], current: Callable[[Path], Any], *, copies: bool
    ) -> Iterator[tuple[Path, Any]]:
        """Each of the given weights, brought into its form, as it comes; those that lie side by side when all of a
        group have come, or at the end.

        `current`: the weight that is there, for one of a group that is not given. `copies` as of `ArrayPlace.put`.
        """
        groups: dict[Path, dict[Path, Any]] = {}
        for path, leaf in given:
            own = self.forms[path]
            if not isinstance(own, (SideBySide, InFirst)):
                yield path, self._placed(own, self._formed(path, leaf, own), copies)
                continue
            first = path if isinstance(own, SideBySide) else _sibling(path, own.first)
            groups.setdefault(first, {})[path] = leaf
            if len(groups[first]) == 1 + len(self._others(first)):
                yield from self._group(first, groups.pop(first), current, copies)
        for first, parts in groups.items():
            yield from self._group(first, parts, current, copies)

    def _others(self, first: Path) -> list[Path]:
        parent = first[:-2]
        return [
            path
            for path, own in self.forms.items()
            if path[:-2] == parent and isinstance(own, InFirst) and own.first == first[-2]
        ]

    def _group(
        self, first: Path, given: Mapping[Path, Any], current: Callable[[Path], Any], copies: bool
    ) -> Iterator[tuple[Path, Any]]:
        module = {}
        for path in (first, *self._others(first)):
            if path in given:
                leaf = self._single_formed(path, given[path], self._single(path), always=True)
            else:
                leaf = current(path)
            module[path[-2]] = {WEIGHT: leaf}
        joined = join(module)[first[-2]][WEIGHT]
        yield first, self._placed(self.forms[first], joined, copies)
        yield from ((other, self.forms[other]) for other in self._others(first))

    def _formed(self, path: Path, leaf: Any, own: Any) -> Any:
        leaf = self._single_formed(path, leaf, own, always=False)
        return self._packed(own, leaf) if is_packed(own) else leaf

    def _single_formed(self, path: Path, leaf: Any, own: Any, *, always: bool) -> Any:
        """The weight rounded as its form is, and with its shape on a mesh; `always` placed there."""
        if is_packed(leaf) and not _has_codes_of(leaf, own):
            leaf = leaf.unpacked()  # of files with other bits than the model's
        if not is_weight(leaf):
            if getattr(own, "scheme", None) is not None:
                leaf = self._rounded(path, leaf)
            elif not is_packed(own):
                leaf = _cast(leaf, own)
        fit = self._origin.fit
        if fit is None or is_packed(leaf) or (np.shape(leaf) == own.shape and not always):
            return leaf
        return fit.place_leaf(path, leaf)

    def _rounded(self, path: Path, leaf: Any) -> Any:
        rounding = self._origin.rounding
        return leaf if rounding is None else rounding(path, jnp.asarray(leaf))

    def _packed(self, own: Any, leaf: Any) -> Any:
        if is_packed(leaf):
            return leaf
        if not is_weight(leaf) and own.scheme is None:
            codes = own.form.codes
            leaf = np.asarray(leaf).astype(jnp.dtype(codes)) if leaf.dtype.name != codes else leaf
        return pack_weight(leaf, is_transposed=own.is_transposed, activations=own.form.activations)

    def placed(self, path: Path, leaf: Any) -> Any:
        """A weight in its form, of arrays of the host, where it lies."""
        return self._placed(self.forms[path], leaf, False)

    def _placed(self, own: Any, leaf: Any, copies: bool) -> Any:
        return jax.tree.map(lambda place, array: place.put(array, copies=copies), own, leaf)


def _forms_of(params: Params) -> dict[Path, Any]:
    return {path: jax.tree.map(ArrayPlace.of, leaf) for path, leaf in by_path(params).items()}


def _check_array(path: Path, array: Any) -> None:
    """Raises ValueError for what is no array of numbers, and for one whose owner has freed it."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype") and jnp.issubdtype(array.dtype, np.number)):
        dtype = f" of {array.dtype}" if hasattr(array, "dtype") else ""
        raise _refused(path, f"is a {type(array).__name__}{dtype}, not an array of numbers")
    if isinstance(array, jax.Array) and array.is_deleted():
        raise _refused(path, "was deleted, or donated, by its owner")


def given_by_path(params: Any) -> dict[Path, Any]:
    """As `by_path`, of what a caller gives, whatever it is."""

    def leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if isinstance(node, Mapping):
            for name, child in node.items():
                yield from leaves(child, (*path, str(name)))
        else:
            yield path, node

    return dict(leaves(params, ()))


def by_path(params: Params) -> dict[Path, Any]:
    """The weights by path, one of several arrays as one."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def single(leaves: Mapping[Path, Any], path: Path) -> Any:
    """A weight on its own, of weights that may lie side by side."""
    beside = {other: leaf for other, leaf in leaves.items() if other[:-2] == path[:-2] and other[-1] == WEIGHT}
    if path not in beside:
        raise ValueError(f"{'.'.join(path)} was dropped, and has to come together with those beside it")
    return weight_at({other[-2]: {WEIGHT: leaf} for other, leaf in beside.items()}, path[-2:])


def _sibling(path: Path, module: str) -> Path:
    return (*path[:-2], module, path[-1])


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(array), jnp.result_type(array))


def _is_alike(leaf: Any, own: Any) -> bool:
    (arrays, structure), (wanted, its) = jax.tree.flatten(leaf), jax.tree.flatten(own)
    return structure == its and all(
        (np.shape(array), jnp.result_type(array)) == (place.shape, place.dtype)
        for array, place in zip(arrays, wanted, strict=True)
    )


def _has_codes_of(leaf: Any, own: Any) -> bool:
    """True if a packed weight can take the place of one of the form, but for differences that `check` refuses."""
    return is_packed(own) and (own.scheme is not None or leaf.form.codes == own.form.codes)


def _rounds_to(leaf: Any, own: Any) -> bool:
    """True if numbers of the leaf's type are rounded to those of the form: floating point to floating point."""
    given = jnp.result_type(leaf)
    if is_weight(own):
        return jnp.issubdtype(given, jnp.floating)
    return given == own.dtype or (jnp.issubdtype(given, jnp.floating) and jnp.issubdtype(own.dtype, jnp.floating))


def _cast(leaf: Any, own: Any) -> Any:
    if is_weight(leaf) or jnp.result_type(leaf) == own.dtype:
        return leaf
    return leaf.astype(own.dtype)


def described(leaf: Any) -> str:
    """The kind, dtypes and shapes of a weight, for messages."""
    arrays = ", ".join(f"{jnp.result_type(array.dtype)}{list(array.shape)}" for array in jax.tree.leaves(leaf))
    how = (getattr(leaf, "form", None) or getattr(leaf, "scheme", "")) if is_weight(leaf) else ""
    return f"{type(leaf).__name__} {how} of {arrays}" if is_weight(leaf) else arrays


def _refused(path: Path, reason: str) -> ValueError:
    return ValueError(f"the weights cannot be replaced: {'.'.join(path)}{reason if reason[0] == ':' else ' ' + reason}")
