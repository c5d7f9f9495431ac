"""Where each layer of a model keeps its keys and values."""

from dataclasses import dataclass

from jaxinfer.cache.policies import KeptPages
from jaxinfer.models import ModelConfig


@dataclass(frozen=True)
class LayerCache:
    """Where one layer keeps its keys and values.

    Attributes:
      kind: "full", "window" (only the last `window` tokens are read), "latent" (keys that hold the values),
        "contiguous" (one page per slot), or "kept" (a policy's pages are read).
      window: tokens that a query of the layer sees; None for all. Of "kept", `KeptPages.window`.
    """

    kind: str
    window: int | None = None


def layer_caches(config: ModelConfig, is_contiguous: bool, kept: KeptPages | None) -> tuple[LayerCache, ...]:
    """The cache of each layer; `kept` is what a policy keeps in layers without a window."""
    if is_contiguous:
        return (LayerCache("contiguous"),) * config.num_layers
    if config.mla is not None:
        return (LayerCache("latent"),) * config.num_layers
    windows = (config.window(layer) for layer in range(config.num_layers))
    whole = LayerCache("full") if kept is None else LayerCache("kept", kept.window)
    return tuple(whole if window is None else LayerCache("window", window) for window in windows)
