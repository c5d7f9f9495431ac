"""Where each layer of a model keeps its keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.cache.policies import KeptPages, LayerBudget, PromptBudget
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import ModelConfig

GroupKind = tuple[int | None, LayerBudget | None]


@dataclass(frozen=True)
class LayerCache:
    """Where one layer keeps its keys and values.

    Attributes:
      kind: "full", "window" (only the last `window` tokens are read), "latent" (keys that hold the values),
        "contiguous" (one page per slot), "kept" (a policy's pages are read), or "compacted" (at a prompt's end).
      window: tokens that a query of the layer sees; None for all. Of "kept", `KeptPages.window`.
      budget: of "compacted", what stays.
    """

    kind: str
    window: int | None = None
    budget: LayerBudget | None = None

    @property
    def group(self) -> GroupKind:
        """What layers of one group have in common."""
        return self.window, self.budget


def layer_caches(
    config: ModelConfig, options: EngineOptions, kept: KeptPages | None, page_size: int
) -> tuple[LayerCache, ...]:
    """The cache of each layer; `kept` is what a policy keeps in layers without a window."""
    if options.cache == "contiguous":
        return (LayerCache("contiguous"),) * config.num_layers
    if config.mla is not None:
        return (LayerCache("latent"),) * config.num_layers
    if isinstance(policy := options.policy, PromptBudget):
        count = config.num_layers
        return tuple(LayerCache("compacted", None, policy.of_layer(page_size, layer, count)) for layer in range(count))
    windows = (config.window(layer) for layer in range(config.num_layers))
    whole = LayerCache("full") if kept is None else LayerCache("kept", kept.window)
    return tuple(whole if window is None else LayerCache("window", window) for window in windows)


def group_kinds(layers: Sequence[LayerCache], has_own_draft: bool) -> tuple[GroupKind, ...]:
    """The groups of layers: first those that keep everything, then the largest window first, and lower layers before
    higher ones.

    A draft model's own layers are all in the group that keeps everything, as it stores a whole prompt at once when it
    first drafts: none of it may have been given back.
    """
    found = {layer.group for layer in layers} | ({(None, None)} if has_own_draft else set())

    def order(kind: GroupKind) -> tuple[bool, int, int]:
        window, budget = kind
        return window is not None, -(window or 0), -1 if budget is None else budget.layer

    return tuple(sorted(found, key=order))
