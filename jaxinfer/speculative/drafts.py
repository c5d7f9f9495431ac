"""What may draft: a model, the sequence's own past, or the target's first layers."""

from dataclasses import dataclass

from jaxinfer.cache import KVScales
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization.on_cpu import Copies


@dataclass(frozen=True, eq=False)
class ModelDraft:
    """A smaller model of the same tokens, with pages of its own in the target's page table. `kv_scales` are its
    checkpoint's, for an fp8 cache; `copies` say which of its quantized weights are float32 in `params`."""

    name: str
    config: ModelConfig
    params: Params
    kv_scales: KVScales | None = None
    copies: Copies | None = None


@dataclass(frozen=True)
class NgramDraft:
    """Prompt lookup (Saxena 2023): what followed the longest earlier match of the newest tokens, the latest of equal
    ones.

    Attributes:
      min_match: tokens that must match. max_match: more do not count.
    """

    min_match: int = 2
    max_match: int = 8


@dataclass(frozen=True)
class LayersDraft:
    """The target's first layers with its final norm and head (Elhoushi et al. 2024, LayerSkip, section 4.3). They share
    the target's pages: what they store there, the target's own pass writes again."""

    num_layers: int


Draft = ModelDraft | NgramDraft | LayersDraft


def draft_name(draft: Draft) -> str:
    """As users name it."""
    if isinstance(draft, ModelDraft):
        return draft.name
    return "ngram" if isinstance(draft, NgramDraft) else f"layers:{draft.num_layers}"


def first_layers(config: ModelConfig, params: Params, num_layers: int) -> tuple[ModelConfig, Params]:
    """The model that the first layers make, over the same arrays. Raises ValueError unless 1 <= num_layers < all."""
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(f"draft='layers:{num_layers}': the target has {config.num_layers} layers, use 1 to one less")
    layers = {name: params["layers"][name] for name in map(str, range(num_layers))}
    return config.with_layers(range(num_layers)), {**params, "layers": layers}
