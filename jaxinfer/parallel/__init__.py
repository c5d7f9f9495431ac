"""Meshes of devices, and the one table of rules that says which mesh axis cuts which dimension."""

from jaxinfer.parallel.meshes import AXES, make_mesh, on_replica, parse_mesh, replicas
from jaxinfer.parallel.sharding import (
    DATA,
    EXPERT,
    MODEL,
    RULES,
    SEQUENCE,
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
    "SEQUENCE",
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
