"""Where each layer of a model keeps its keys and values, and which of them are read."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from jaxinfer.cache.policies import BestPages, KeptPages
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import ModelConfig


@dataclass(frozen=True)
class LayerCache:
    """Where one layer keeps its keys and values.

    Attributes:
      kind: "full", "window" (only the last `window` tokens are read), "latent" (keys that hold the values),
        "contiguous" (one page per slot), "kept" (a policy's pages are read), or "best" (answers read the best pages).
      window: tokens that a query of the layer sees; None for all. Of "kept", `KeptPages.window`.
    """

    kind: str
    window: int | None = None


def layer_caches(
    config: ModelConfig, is_contiguous: bool, kept: KeptPages | None, best: BestPages | None = None
) -> tuple[LayerCache, ...]:
    """The cache of each layer; `kept` is what a policy keeps in layers without a window, `best` what answers read."""
    if is_contiguous:
        return (LayerCache("contiguous"),) * config.num_layers
    if config.mla is not None:
        return (LayerCache("latent"),) * config.num_layers

    def of_layer(layer: int) -> LayerCache:
        if (window := config.window(layer)) is not None:
            return LayerCache("window", window)
        if kept is not None:
            return LayerCache("kept", kept.window)
        return LayerCache("full" if best is None or layer < best.num_dense_layers else "best")

    return tuple(map(of_layer, range(config.num_layers)))


class PolicyPages:
    """The part of `EngineSpec` that knows which pages of a layer are stored and read."""

    config: ModelConfig
    options: EngineOptions
    num_dense_layers: int

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @property
    @abstractmethod
    def page_size(self) -> int: ...

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """The cache of each layer."""
        return layer_caches(self.config, self.options.cache == "contiguous", self.kept_pages, self.best_pages)

    @cached_property
    def _policy_pages(self) -> KeptPages | BestPages | None:
        """What `kv_policy` keeps or reads."""
        if (policy := self.options.policy) is None:
            return None
        trained = self.config.max_length
        return policy.pages(self.page_size, trained if self.max_model_len > trained else None)

    @property
    def kept_pages(self) -> KeptPages | None:
        """The pages that `kv_policy` keeps in layers without a window; None for all."""
        return pages if isinstance(pages := self._policy_pages, KeptPages) else None

    @property
    def best_pages(self) -> BestPages | None:
        """The pages that `kv_policy` lets answers read in layers without a window; None for all."""
        pages = self._policy_pages
        return replace(pages, num_dense_layers=self.num_dense_layers) if isinstance(pages, BestPages) else None

    @property
    def bounded_layers(self) -> tuple[int, ...]:
        """The layers that store bounds of the keys of each page."""
        return tuple(layer for layer, cache in enumerate(self.layers) if cache.kind == "best")

    def num_seen(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, at most; None for all. With `best_pages`, a query of an answer."""
        kind, pages = self.layers[layer].kind, self.kept_pages or self.best_pages
        return pages.num_tokens if kind in ("kept", "best") and pages else self.layers[layer].window
