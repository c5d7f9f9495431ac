"""Models: a frozen configuration, one decoder, its layers."""

from jaxinfer.models.config import ModelConfig, RopeConfig
from jaxinfer.models.decoder import (
    Decoder,
    Params,
    abstract_params,
    bind,
    check_taps,
    collect,
    compute_dtype,
    init_params,
    keeps_float32,
    logical_axes,
    split,
    tap_names,
)

__all__ = [
    "Decoder",
    "ModelConfig",
    "Params",
    "RopeConfig",
    "abstract_params",
    "bind",
    "check_taps",
    "collect",
    "compute_dtype",
    "init_params",
    "keeps_float32",
    "logical_axes",
    "split",
    "tap_names",
]
