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
from pallas_kernels.choice import renamed

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

__getattr__ = renamed(
    __name__,
    {
        "Fit": "jaxinfer.models:MeshFit",
        "check_divides": "jaxinfer.models:check_divides",
        "fit": "jaxinfer.models:fit_to_mesh",
        "leaf_shardings": "jaxinfer.models:leaf_shardings",
        "parameter_shardings": "jaxinfer.models:parameter_shardings",
    },
)
