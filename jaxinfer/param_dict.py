"""Parameters of a running model as users see them: nested dicts that refuse changes, which no engine would notice."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

_REFUSAL = (
    "{what}: the weights of an LLM cannot be changed through its params. Change a copy, params = llm.params.copy(), "
    "and make a new LLM((llm.config, params, llm.tokenizer))"
)


class ParamDict(dict[str, Any]):
    """A nested dict of parameters that is a pytree with the paths of a dict.

    What `jax.tree.map`, `jax.grad` or optax make of one is a `ParamDict` too, so that `jax.tree.map` takes both, and
    it can be changed. `read_only(params)` makes one whose changes raise TypeError, at every depth. `copy()` gives plain
    dicts, to be combined with others.
    """

    is_read_only = False

    @classmethod
    def read_only(cls, params: Mapping[str, Any]) -> "ParamDict":
        """Wraps the arrays in dicts that refuse changes."""
        wrapped = cls(
            {name: cls.read_only(entry) if isinstance(entry, dict) else entry for name, entry in params.items()}
        )
        wrapped.is_read_only = True
        return wrapped

    def copy(self) -> dict[str, Any]:
        """Copies into plain dicts, at every depth, the arrays being shared."""
        return plain(self)

    def __reduce__(self) -> Any:  # pickle and copy.deepcopy make plain dicts
        return dict, (dict(self),)

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(f"params[{name!r}] = ...")
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._check(f"del params[{name!r}]")
        super().__delitem__(name)

    def __ior__(self, other: Any) -> Any:
        self._check("params |= ...")
        return super().__ior__(other)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._check("params.update")
        super().update(*args, **kwargs)

    def setdefault(self, *args: Any) -> Any:
        self._check("params.setdefault")
        return super().setdefault(*args)

    def pop(self, *args: Any) -> Any:
        self._check("params.pop")
        return super().pop(*args)

    def popitem(self) -> tuple[str, Any]:
        self._check("params.popitem")
        return super().popitem()

    def clear(self) -> None:
        self._check("params.clear")
        super().clear()

    def _check(self, what: str) -> None:
        if self.is_read_only:
            refuse(what)


def refuse(what: str) -> NoReturn:
    """Raises the TypeError of a change, with what works instead."""
    raise TypeError(_REFUSAL.format(what=what))


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Plain dicts with these leaves, at every depth, as programs take them."""
    return {name: plain(entry) if isinstance(entry, dict) else entry for name, entry in params.items()}


def _flatten_with_keys(params: ParamDict) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(params))
    return [(jax.tree_util.DictKey(name), params[name]) for name in names], names


def _flatten(params: ParamDict) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(sorted(params))
    return [params[name] for name in names], names


def _unflatten(names: tuple[str, ...], leaves: Any) -> ParamDict:
    return ParamDict(zip(names, leaves, strict=True))


jax.tree_util.register_pytree_with_keys(ParamDict, _flatten_with_keys, _unflatten, _flatten)
jax.export.register_pytree_node_serialization(  # for exported functions of parameters
    ParamDict,
    serialized_name="jaxinfer.ParamDict",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)
