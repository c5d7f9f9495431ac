"""Which device holds what: the one table of sharding rules, and models made to fit a mesh."""

from jaxinfer.parallel.fit import Fit, fit
from jaxinfer.parallel.meshes import AXES, make_mesh, on_replica, parse_mesh, replicas
from jaxinfer.parallel.sharding import (
    DATA,
    EXPERT,
    MODEL,
    RULES,
    array_shardings,
    axis_of,
    axis_size,
    check_divides,
    leaf_shardings,
    local_shapes,
    page_specs,
    parameter_shardings,
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
    "Fit",
    "array_shardings",
    "axis_of",
    "axis_size",
    "check_divides",
    "fit",
    "leaf_shardings",
    "local_shapes",
    "make_mesh",
    "on_replica",
    "page_specs",
    "parameter_shardings",
    "parse_mesh",
    "replicas",
    "shardings",
    "shortest",
    "spec",
]
