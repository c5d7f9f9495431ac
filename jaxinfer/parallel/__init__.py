"""Meshes of devices, and the one table of rules that says which mesh axis cuts which dimension."""

import importlib
import warnings
from typing import Any

from jaxinfer.parallel.meshes import AXES, make_mesh, on_replica, parse_mesh, replicas
from jaxinfer.parallel.sharding import (
    DATA,
    EXPERT,
    MODEL,
    RULES,
    AnyMesh,
    array_shardings,
    axis_of,
    axis_size,
    is_axes,
    local_shapes,
    page_specs,
    shardings,
    shortest,
    spec,
)

__all__ = [
    "AXES",
    "DATA",
    "EXPERT",
    "MODEL",
    "RULES",
    "AnyMesh",
    "array_shardings",
    "axis_of",
    "axis_size",
    "is_axes",
    "local_shapes",
    "make_mesh",
    "on_replica",
    "page_specs",
    "parse_mesh",
    "replicas",
    "shardings",
    "shortest",
    "spec",
]

# Names that `jaxinfer.models` has in their place; removed in the next release.
_DEPRECATED = {
    "Fit": "MeshFit",
    "check_divides": "check_divides",
    "fit": "fit_to_mesh",
    "leaf_shardings": "leaf_shardings",
    "parameter_shardings": "parameter_shardings",
}


def __getattr__(name: str) -> Any:
    if name not in _DEPRECATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _DEPRECATED[name]
    warnings.warn(f"jaxinfer.parallel.{name} is now jaxinfer.models.{new}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("jaxinfer.models"), new)
