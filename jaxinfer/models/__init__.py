"""Models: a frozen configuration, one decoder, its layers, and their shardings on a mesh."""

from jaxinfer.models.config import LayerInputConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig, TokenMapConfig
from jaxinfer.models.decoder import (
    Decoder,
    Params,
    abstract_params,
    bind,
    bind_draft_head,
    bind_layer,
    check_taps,
    collect,
    compute_dtype,
    init_params,
    keeps_float32,
    logical_axes,
    tap_names,
)
from jaxinfer.models.draft_head_config import DraftHeadConfig, tap_layers_of, tap_names_of
from jaxinfer.models.recurrent_config import ConvConfig, DeltaConfig, MambaConfig
from jaxinfer.models.sharding import MeshFit, check_divides, fit_to_mesh, leaf_shardings, parameter_shardings

__all__ = [
    "ConvConfig",
    "Decoder",
    "DeltaConfig",
    "DraftHeadConfig",
    "LayerInputConfig",
    "MLAConfig",
    "MambaConfig",
    "MeshFit",
    "MoEConfig",
    "ModelConfig",
    "Params",
    "RopeConfig",
    "TokenMapConfig",
    "abstract_params",
    "bind",
    "bind_draft_head",
    "bind_layer",
    "check_divides",
    "check_taps",
    "collect",
    "compute_dtype",
    "fit_to_mesh",
    "init_params",
    "keeps_float32",
    "leaf_shardings",
    "logical_axes",
    "parameter_shardings",
    "tap_layers_of",
    "tap_names",
    "tap_names_of",
]
