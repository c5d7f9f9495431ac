"""What is planned for: a model with an engine's options on the devices of one replica, as shapes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache import PagedCache, abstract_paged_cache, stored_dtype
from jaxinfer.engine.abstract import abstract_slots, placed_params
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.paged import default_page_size
from jaxinfer.models import ModelConfig, Params, compute_dtype
from jaxinfer.quantization.on_gpu import OUTPUTS_TOGETHER, is_laid_out
from jaxinfer.quantization.tree import is_quantized, num_bytes
from jaxinfer.speculative import Draft, LayersDraft, ModelDraft, first_layers
from pallas_kernels.paged_attention import platform_layout


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, an engine's options and, if it speculates, a draft; parameters are `jax.ShapeDtypeStruct`s.

    Attributes:
      name: what the user calls the model.
      platform: "tpu", "gpu" or "cpu".
      mesh: the devices of one replica, or for counting an `AbstractMesh` of as many; None for one device whose programs
        are compiled without a mesh.
    """

    name: str
    config: ModelConfig
    params: Params
    options: EngineOptions
    platform: str
    mesh: Any = None
    draft: Draft | None = None

    @property
    def num_devices(self) -> int:
        """Of one replica."""
        return 1 if self.mesh is None else self.mesh.size

    @cached_property
    def dtype(self) -> Any:
        """What the model computes in."""
        return compute_dtype(self.params)

    @property
    def kv_dtype(self) -> str:
        return stored_dtype(self.options.kv_dtype, self.dtype)

    @property
    def page_size(self) -> int:
        return self.options.page_size or default_page_size(self.platform, self.kv_dtype)

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.options.max_model_len // self.page_size)

    @property
    def num_pages(self) -> int:
        """Of a pool that holds max_seqs sequences of max_model_len, unless the options say another; page 0 is
        nobody's."""
        wanted = self.options.max_seqs * self.pages_per_sequence + 1
        return wanted if self.options.num_pages is None else self.options.num_pages

    @property
    def is_sharded(self) -> bool:
        return self.mesh is not None and self.mesh.size > 1

    @cached_property
    def draft_model(self) -> tuple[ModelConfig, Params] | None:
        """The configuration and the parameters of a draft that is a model, or the target's own first layers."""
        if isinstance(self.draft, ModelDraft):
            return self.draft.config, self.draft.params
        if isinstance(self.draft, LayersDraft):
            return first_layers(self.config, self.params, self.draft.num_layers)
        return None

    @property
    def has_own_draft(self) -> bool:
        """Whether there is a draft with weights and a cache of its own."""
        return isinstance(self.draft, ModelDraft)

    # On the devices.

    @cached_property
    def placed_params(self) -> Params:
        return self._placed(self.config, self.params)

    @cached_property
    def placed_draft(self) -> Params | None:
        return None if self.draft_model is None else self._placed(*self.draft_model)

    def _placed(self, config: ModelConfig, params: Params) -> Params:
        mesh = self.mesh if self.is_sharded else None
        placed = placed_params(config, params, mesh)
        if self.platform != "gpu" or self.is_sharded or not isinstance(self.mesh, Mesh):
            return placed
        return _outputs_together(placed, NamedSharding(self.mesh, PartitionSpec()))

    @cached_property
    def cache(self) -> PagedCache:
        return self._cache(self.config, self.kv_dtype)

    @cached_property
    def draft_cache(self) -> PagedCache | None:
        if not self.has_own_draft or self.draft_model is None:
            return None
        config, params = self.draft_model
        settings = self.options.speculation
        wanted = settings.kv_dtype if settings is not None and settings.kv_dtype is not None else self.options.kv_dtype
        return self._cache(config, stored_dtype(wanted, compute_dtype(params)))

    def _cache(self, config: ModelConfig, kv_dtype: str, num_pages: int | None = None) -> PagedCache:
        layout = platform_layout(self.platform, kv_dtype, has_values=config.caches_values)
        mesh = self.mesh if self.is_sharded else None
        return abstract_paged_cache(config, num_pages or self.num_pages, self.page_size, kv_dtype, layout, mesh)

    @cached_property
    def slots(self) -> Any:
        draft_length = None if self.draft is None else self.options.max_model_len + 1
        mesh = self.mesh if self.is_sharded else None
        return abstract_slots(self.options.max_seqs, self.config.vocab_size, mesh, draft_length)

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of one device that stay: what the arrays hold, without the padding of a layout."""
        parts = {"weights": num_bytes(self.placed_params)}
        if self.has_own_draft:
            parts["draft weights"] = num_bytes(self.placed_draft)
        parts["cache"] = num_bytes(self.cache)
        if self.draft_cache is not None:
            parts["draft cache"] = num_bytes(self.draft_cache)
        return {**parts, "slots": num_bytes(self.slots)}

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page on a device, in all layers and the draft's."""
        caches = [self.cache] if self.draft_cache is None else [self.cache, self.draft_cache]
        return sum(num_bytes(one) for one in caches) // self.num_pages

    # Smaller ones.

    def with_layers(self, layers: Sequence[int], draft_layers: Sequence[int] | None = None) -> "Subject":
        """The same with these layers only, and these of a draft model."""
        config, params = take_layers(self.config, self.params, layers)
        draft = self.draft
        if draft_layers is not None and isinstance(draft, ModelDraft):
            smaller = take_layers(draft.config, draft.params, draft_layers)
            draft = replace(draft, config=smaller[0], params=smaller[1], kv_scales=None)
        elif draft_layers is not None and isinstance(draft, LayersDraft):
            draft = LayersDraft(len(draft_layers))
        return replace(self, config=config, params=params, draft=draft)


def take_layers(config: ModelConfig, params: Params, layers: Sequence[int]) -> tuple[ModelConfig, Params]:
    """The model of these layers, in this order."""
    kept = {str(new): params["layers"][str(old)] for new, old in enumerate(layers)}
    return config.with_layers(layers), {**params, "layers": kept}


def layer_kinds(config: ModelConfig, params: Params) -> dict[Any, list[int]]:
    """The layers by kind, in the order in which kinds first appear: those of one kind make the same computation, of
    weights of the same shapes and formats."""
    kinds: dict[Any, list[int]] = {}
    for layer in range(config.num_layers):
        leaves, structure = jax.tree.flatten(params["layers"][str(layer)])
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
        is_moe = config.experts_of(layer) is not None
        kinds.setdefault((config.window(layer), config.rope_of(layer), is_moe, structure, shapes), []).append(layer)
    return kinds


def _outputs_together(params: Params, whole: NamedSharding) -> Params:
    """As `quantization.on_gpu.outputs_together`, of abstract arrays."""

    def laid_out(leaf: Any) -> Any:
        if not is_quantized(leaf) or not is_laid_out(leaf):
            return leaf
        sharding = getattr(leaf.values, "sharding", None) or whole
        place: Any = Format(OUTPUTS_TOGETHER, sharding)
        return replace(leaf, values=jax.ShapeDtypeStruct(leaf.shape, leaf.values.dtype, sharding=place))

    return jax.tree.map(laid_out, params, is_leaf=is_quantized)
