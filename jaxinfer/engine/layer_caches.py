"""Where each layer of a model keeps its keys and values, and which of them are read."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxinfer.cache.policies import (
    BestPages,
    HeavyHitters,
    HeavyPages,
    KeptPages,
    LayerBudget,
    PromptBudget,
    Quest,
    SinksWindow,
)
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import ModelConfig

GroupKind = tuple[int | None, LayerBudget | None]


@dataclass(frozen=True)
class LayerCache:
    """Where one layer keeps its keys and values.

    Attributes:
      kind: "full", "window" (only the last `window` tokens are read), "latent" (keys that hold the values),
        "contiguous" (one page per slot), "kept" (a policy's pages are read), "compacted" (at a prompt's end), or "best"
        (answers read the best pages).
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
    config: ModelConfig,
    options: EngineOptions,
    page_size: int,
    kept: KeptPages | None = None,
    best: BestPages | None = None,
) -> tuple[LayerCache, ...]:
    """The cache of each layer; `kept` is what a policy keeps in layers without a window, `best` what answers read."""
    if options.cache == "contiguous":
        return (LayerCache("contiguous"),) * config.num_layers
    if config.mla is not None:
        return (LayerCache("latent"),) * config.num_layers
    if isinstance(policy := options.policy, PromptBudget):
        count = config.num_layers
        return tuple(LayerCache("compacted", None, policy.of_layer(page_size, layer, count)) for layer in range(count))

    def of_layer(layer: int) -> LayerCache:
        if (window := config.window(layer)) is not None:
            return LayerCache("window", window)
        if kept is not None:
            return LayerCache("kept", kept.window)
        return LayerCache("full" if best is None or layer < best.num_dense_layers else "best")

    return tuple(map(of_layer, range(config.num_layers)))


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
        return layer_caches(self.config, self.options, self.page_size, self.kept_pages, self.best_pages)

    @cached_property
    def kept_pages(self) -> KeptPages | None:
        """The pages that `kv_policy` keeps in layers without a window; None for all."""
        policy = self.options.policy
        if not isinstance(policy, SinksWindow):
            return None
        trained = self.config.max_length
        return policy.pages(self.page_size, trained if self.max_model_len > trained else None)

    @cached_property
    def best_pages(self) -> BestPages | None:
        """The pages that `kv_policy` lets answers read in layers without a window; None for all."""
        policy = self.options.policy
        return policy.pages(self.page_size, self.num_dense_layers) if isinstance(policy, Quest) else None

    @cached_property
    def heavy_pages(self) -> HeavyPages | None:
        """How many of the tokens that queries attend to most `kv_policy` keeps; None where it keeps others."""
        policy = self.options.policy
        return policy.pages(self.page_size) if isinstance(policy, HeavyHitters) else None

    @property
    def has_prompt_lengths(self) -> bool:
        """Whether steps must know where prompts end."""
        return self.heavy_pages is not None or self.best_pages is not None

    @property
    def bounded_layers(self) -> tuple[int, ...]:
        """The layers that store bounds of the keys of each page."""
        return tuple(layer for layer, cache in enumerate(self.layers) if cache.kind == "best")

    def num_seen(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, at most; None for all. With `best_pages`, a query of an answer."""
        kind, pages = self.layers[layer].kind, self.kept_pages or self.best_pages
        return pages.num_tokens if kind in ("kept", "best") and pages else self.layers[layer].window
