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


def draft_model(self) -> tuple[ModelConfig, Params] | None:
        """Configuration and parameters of a draft that is a model, or the target's own first layers."""
        return draft_model(self.draft, self.config, self.params)

    def drafters(self, kind: NgramDraft | ProgramModel) -> dict[TokenTree, Drafter]:
        """The static argument of each tree's program; `kind` is the draft model as programs take it, or n-grams."""
        return {
            tree: Drafter(
                kind,
                tree,
                is_maximal=self.options.acceptance == "maximal",
                shares_cache=isinstance(self.draft, LayersDraft),
                min_rows=self.token_buckets[-1] if self.options.deterministic else 0,
                is_uniform=self.options.deterministic,
            )
            for tree in self.trees
        }

    # Arrays on the devices.

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def is_sharded(self) -> bool:
        return self.mesh is not None and self.mesh.size > 1

    @property
    def program_mesh(self) -> Any:
        """The mesh that abstract programs are compiled over; None on one device."""
        return self.mesh if self.is_sharded else None

    @cached_property
    def placed_params(self) -> Params:
        """The parameters with their shardings and layouts."""
        return self._placed(self.config, self.params)

    @cached_property
    def placed_draft(self) -> Params | None:
        """The same of the draft's."""
        return None if self.draft_model is None else self._placed(*self.draft_model)

    def _placed(self, config: ModelConfig, params: Params) -> Params:
        placed = placed_params(config, params, self.program_mesh)
        if self.platform != "gpu" or self.is_sharded or not isinstance(self.mesh, Mesh):
            return placed
        return outputs_together(placed, NamedSharding(self.mesh, PartitionSpec()))

    def layout_of(self, config: ModelConfig, kv_dtype: str) -> str:
        """How the pages of a model, the target or the draft, lie in memory."""
        return platform_layout(self.platform, kv_dtype, has_values=config.caches_values)

    @cached_property
    def cache(self) -> PagedCache:
        """The model's pages and states."""
        counts = tuple(group.num_allocated for group in self.groups)
        cache = self._cache(self.config, self.kv_dtype, counts, self.layer_groups)
        return replace(cache, states=abstract_state_cache(self.config, self.max_seqs, self.dtype))

    @cached_property
    def saved_states(self) -> StateCache | None:
        """States that are kept for prefix reuse: place p is row p - 1."""
        return abstract_state_cache(self.config, self.num_saved_states, self.dtype)

    @cached_property
    def draft_cache(self) -> PagedCache | None:
        """The pages and states of a draft model's own."""
        if self.draft_kv_dtype is None or self.draft_model is None:
            return None
        config, params = self.draft_model
        cache = self._cache(config, self.draft_kv_dtype, (self.num_pages,))
        return replace(cache, states=abstract_state_cache(config, self.max_seqs, compute_dtype(params)))

    def _cache(
        self, config: ModelConfig, kv_dtype: str, counts: tuple[int, ...], groups: tuple[int, ...] = ()
    ) -> PagedCache:
        layout = self.layout_of(config, kv_dtype)
        return abstract_paged_cache(config, counts, self.page_size, kv_dtype, layout, self.program_mesh, groups)

    @property
    def pages(self) -> Pages:
        """One layer's pages."""
        return next(pages for pages in self.cache.layers if pages is not None)

    @cached_property
    def slots(self) -> tuple[Slots, SamplingBatch]:
        """What slots carry between dispatches, and their sampling parameters."""
        return abstract_slots(self.max_seqs, self.config.vocab_size, self.program_mesh, self.draft_length)

    @cached_property
    def tables(self) -> GrammarTables:
        """Masks and tables of grammars, whole on every device."""
        tables = self.table_sizes.abstract()
        if (mesh := self.program_mesh) is None:
            return tables
        return placed(tables, jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), tables))

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of one device that stay allocated, without the padding of a layout."""
        parts = {"weights": num_bytes(host_layers.on_device(self.placed_params))}
        parts |= {"layers from the host": self.buffer_bytes} if self.buffer_bytes else {}
        if self.has_own_draft:
            parts["draft weights"] = num_bytes(self.placed_draft)
        parts["cache"] = num_bytes(self.cache)
        if self.draft_cache is not None:
            parts["draft cache"] = num_bytes(self.draft_cache)
        if self.num_saved_states:
            parts["saved states"] = num_bytes(self.saved_states)
        return {**parts, "slots": num_bytes(self.slots), "grammars": num_bytes(self.tables)}

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights in the host's memory."""
        return host_layers.host_bytes(self.params)

    @property
    def arriving_bytes(self) -> int:
        """Bytes that each pass over the layers copies from there to the device."""
        return sum(host_layers.row_bytes(self.params).values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device for layers that were copied: the one that computes, and the next."""
        return host_layers.buffer_bytes(self.params)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on a device, in all layers of the first group and the draft's."""
        return self.group_page_bytes[0]

    def with_pages(self, num_pages: int) -> "EngineSpec":
        """The same with a pool of so many pages."""
        return replace(self, pool_pages=num_pages)

    def with_layers(self, layers: Sequence[int], draft_layers: Sequence[int] | None = None) -> "EngineSpec":
        """The same with these layers only, and these of a draft model."""
        config, params = take_layers(self.config, self.params, layers)
        draft = self.draft
        if draft_layers is not None and isinstance(draft, ModelDraft):
            own = take_layers(draft.config, draft.params, draft_layers)
            draft = replace(draft, config=own[0], params=own[1], kv_scales=None)
        elif draft_layers is not None and isinstance(draft, LayersDraft):
            draft = LayersDraft(len(draft_layers))
        return replace(self, config=config, params=params, draft=draft)


def draft_model(draft: Draft | None, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params] | None:
    """What a draft computes: its own model, or the first layers of the target's (`config`, `params`); None for none."""
    if isinstance(draft, ModelDraft):
        return draft.config, draft.params
    return first_layers(config, params, draft.num_layers) if isinstance(draft, LayersDraft) else None
