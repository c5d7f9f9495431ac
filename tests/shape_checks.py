"""Executes the product's jaxtyping annotations: each call that returns is checked against the shapes it declares.

The product imports jaxtyping under TYPE_CHECKING only, so that it is no runtime dependency. `install` wraps the
annotated functions and methods of the packages as their modules are imported. A call that raises is not checked, so the
errors of the product itself can be tested.
"""

import builtins
import functools
import importlib.machinery
import inspect
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

import jaxtyping
import numpy as np


def install(*packages: str) -> None:
    """Checks functions of `packages` from here on; call it before they are imported."""
    imported = [name for name in sys.modules if name.partition(".")[0] in packages]
    if imported:
        raise RuntimeError(f"shapes can not be checked in modules that are imported already: {imported}")
    sys.meta_path.insert(0, _Finder(packages))


def check_shapes(function: Callable) -> Callable:
    """`function`, raising TypeError where its arguments or its result do not have the annotated shapes and dtypes.

    Names of axes stand for one size throughout a call. A function without jaxtyping annotations is returned as it is.
    """
    texts = {
        name: hint for name, hint in function.__annotations__.items() if isinstance(hint, str) and "[Array," in hint
    }
    namespace = ChainMap(function.__globals__, vars(builtins), _TypeCheckingNames())
    hints = {name: eval(text, {}, namespace) for name, text in texts.items()}  # noqa: S307 - our own annotations
    if not hints:
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        result = function(*args, **kwargs)
        values = {**signature.bind(*args, **kwargs).arguments, "return": result}
        declared = [name for name in hints if name in values]
        with jaxtyping.jaxtyped("context"):
            for name in declared:
                if not _matches(values[name], hints[name]):
                    found = ", ".join(f"{name} {_describe(values[name])}" for name in declared)
                    raise TypeError(f"{function.__qualname__}: {name} is not {texts[name]}; the call has {found}")
        return result

    return checked


class _Finder:
    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        own = {name: value for name, value in vars(module).items() if _is_from(value, module)}
        for owner in (module, *filter(inspect.isclass, own.values())):
            for name, value in list(vars(owner).items()):
                # Constructors of pytrees also take what stands for an array while a tree is flattened.
                if inspect.isfunction(value) and _is_from(value, module) and name not in ("__init__", "__new__"):
                    setattr(owner, name, check_shapes(value))


def _is_from(value: Any, module: types.ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


class _Unknown:
    """A class that is imported for type checkers only, and not jaxtyping's: any value matches."""

    def __class_getitem__(cls, _):
        return cls


class _TypeCheckingNames(dict):
    def __missing__(self, name: str) -> Any:
        return getattr(jaxtyping, name, _Unknown)


def _matches(value: Any, hint: Any) -> bool:
    """Whether an annotated array, or a union or tuple of them, has its shape; anything else is left to pyright."""
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_matches(value, part) for part in parts)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        parts = (parts[0],) * len(value) if parts[-1] is ... else parts
        return len(parts) == len(value) and all(map(_matches, value, parts))
    if isinstance(value, np.ndarray) and getattr(hint, "array_type", None) is jaxtyping.Array:
        hint = hint.dtype[np.ndarray, hint.dim_str]  # host arrays are taken where arrays of JAX are
    return isinstance(value, hint) if isinstance(hint, type) and hint not in (Any, _Unknown) else True


def _describe(value: Any) -> Any:
    return f"{value.dtype} {value.shape}" if hasattr(value, "shape") else type(value).__name__
