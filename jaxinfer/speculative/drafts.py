"""Kinds of drafts: a smaller model, n-grams of the sequence itself, or the target's first layers."""

from dataclasses import dataclass

from jaxinfer.cache import KVScales
from jaxinfer.models import ModelConfig, Params
from jaxinfer.models.host_layers import take_layers
from jaxinfer.quantization.on_device import Copies


@dataclass(frozen=True, eq=False)
class ModelDraft:
    """A smaller model with the same vocabulary. It has its own cache, under the target's page table.

    Attributes:
      kv_scales: scales of its checkpoint for an fp8 cache.
      copies: how many of its quantized weights `params` holds as float32.
    """

    name: str
    config: ModelConfig
    params: Params
    kv_scales: KVScales | None = None
    copies: Copies | None = None


@dataclass(frozen=True)
class NgramDraft:
    """Prompt lookup (Saxena 2023): drafts the continuation of the longest earlier match of the newest tokens, the
    latest of equally long ones.

    Attributes:
      min_match, max_match: shortest and longest match, in tokens.
    """

    min_match: int = 2
    max_match: int = 8


@dataclass(frozen=True)
class LayersDraft:
    """The target's first layers with its final norm and head (Elhoushi et al. 2024, LayerSkip, section 4.3).

    They write to the target's own pages; the target's pass overwrites those keys and values with equal ones.
    """

    num_layers: int


Draft = ModelDraft | NgramDraft | LayersDraft


def draft_name(draft: Draft) -> str:
    """The name of a draft in options and reports: a model's name, "ngram" or "layers:N"."""
    if isinstance(draft, ModelDraft):
        return draft.name
    return "ngram" if isinstance(draft, NgramDraft) else f"layers:{draft.num_layers}"


def first_layers(config: ModelConfig, params: Params, num_layers: int) -> tuple[ModelConfig, Params]:
    """Configuration and parameters of a model of the first layers; arrays are shared, not copied.

    Raises ValueError unless 1 <= num_layers < config.num_layers.
    """
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(f"draft='layers:{num_layers}': the target has {config.num_layers} layers, use 1 to one less")
    return config.with_layers(range(num_layers)), take_layers(params, range(num_layers))


def draft_model(draft: Draft | None, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params] | None:
    """What a draft computes: its own model, or the first layers of the target's (`config`, `params`); None for none."""
    if isinstance(draft, ModelDraft):
        return draft.config, draft.params
    return first_layers(config, params, draft.num_layers) if isinstance(draft, LayersDraft) else None
