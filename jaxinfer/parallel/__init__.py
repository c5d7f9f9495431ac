"""Which device holds what: the one table of sharding rules."""

from jaxinfer.parallel.sharding import (
    MODEL,
    RULES,
    check_divides,
    local_shapes,
    page_specs,
    parameter_shardings,
    shardings,
    spec,
)

__all__ = [
    "MODEL",
    "RULES",
    "check_divides",
    "local_shapes",
    "page_specs",
    "parameter_shardings",
    "shardings",
    "spec",
]
