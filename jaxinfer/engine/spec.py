"""Everything static of an engine: shapes, dtypes, buckets, cache kinds, bytes. Allocates nothing.

The runner allocates what a spec describes; the planner, `explain()` and the benchmarks read it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache import (
    PagedCache,
    StateCache,
    abstract_paged_cache,
    abstract_state_cache,
    check_rotated,
    default_page_size,
    stored_dtype,
)
from jaxinfer.cache.paged import PageLeaves
from jaxinfer.cache.policy.contract import CachePolicy, GroupKind, LayerPages, PolicyUse
from jaxinfer.chips import chip_of_kind
from jaxinfer.engine.abstract_work import (
    abstract_slots,
    buckets,
    placed,
    placed_params,
    shapes_of,
    take_layers,
)
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.cache_groups import CacheGroup, PoolSizes
from jaxinfer.engine.determinism import Determinism, decide
from jaxinfer.engine.options import EngineOptions, most_tokens
from jaxinfer.engine.programs import MIN_HEAD_ROWS, ProgramModel, Weights
from jaxinfer.engine.programs.speculative import Drafter
from jaxinfer.engine.programs.work import Slots
from jaxinfer.engine.request import Request, tap_name
from jaxinfer.engine.steering import Steering
from jaxinfer.grammar.device import GrammarTables, TableSizes
from jaxinfer.models import ModelConfig, Params, compute_dtype, host_layers
from jaxinfer.quantization.adapted import without_adapters
from jaxinfer.quantization.tree import num_adapters, num_bytes
from jaxinfer.request_arrays import RequestArray
from jaxinfer.sampling import BoundProcessors, SamplingBatch, as_processors
from jaxinfer.speculative import NO_DRAFT, Draft, ObservingDraft, TokenTree
from pallas_kernels.paged_attention import Pages, platform_layout
from pallas_kernels.recurrence import BLOCK_TOKENS

DEFAULT_MAX_MODEL_LEN = 4096
CPU_MAX_SEQS, DEFAULT_MAX_SEQS = 16, 64  # on a CPU more answers at once would wait for its few cores
MIN_STEP_TOKENS = 32
# A chunk reads all weights and launches all kernels, however many tokens it has: on Hopper, whose kernels are short,
# four times as many tokens share both.
DEFAULT_CHUNK, CHUNKS_OF_CHIPS = 512, {"h100": 2048, "h200": 2048}


def default_chunk(chip: str | None) -> int:
    """Prompt tokens of a step, unless options say otherwise, on a chip by its name."""
    return CHUNKS_OF_CHIPS.get(chip or "", DEFAULT_CHUNK)


@dataclass(frozen=True, eq=False)
class EngineSpec:
    """A model, an engine's options and, if it speculates, a draft; all arrays are `jax.ShapeDtypeStruct`s.

    Attributes:
      config, params: of the model, as the mesh runs it; the vocabulary has room for tokens that adapters add.
      platform: "tpu", "gpu" or "cpu".
      mesh: the devices of one replica, or for counting an `AbstractMesh` of as many; None for one device whose programs
        are compiled without a mesh.
      draft: what drafts, with abstract parameters.
      pool_pages: pages that fit in the memory; None before that is known.
      numbers: of the layers in the model that the options are for; None where they are all of its layers.
      chip: the name of the chip, where its figures are known.
      determinism: whether every pass has one shape, and its rows; decided where it is None.
      processors: the options' functions, traced where it is None and there are any.

    Raises ValueError for options that the draft cannot fulfil, and for those that need a draft where there is none.
    """

    config: ModelConfig
    params: Params
    options: EngineOptions
    platform: str
    mesh: Any = None
    draft: Draft = NO_DRAFT
    pool_pages: int | None = None
    numbers: tuple[int, ...] | None = None
    chip: str | None = None
    determinism: Determinism = None  # type: ignore[assignment]
    processors: BoundProcessors | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", self.draft or NO_DRAFT)
        options = self.options
        host_layers.check_devices(self.params, self.num_devices)
        check_states(self.config, self.draft, self.num_devices, options, (self.kv_dtype, self.draft_kv_dtype))
        check_sequence_axis(self.mesh, self.page_size, options)
        self._check_adapters()
        self._check_layers()
        options.check_draft(self.draft)
        self.policy.check(self._policy_use)
        if self.determinism is None:
            object.__setattr__(self, "determinism", decide(self))
        options.check_buckets(self.prefill_chunk, self.max_seqs)
        if options.processors and self.processors is None:
            bound = BoundProcessors(as_processors(options.processors), self.config.vocab_size, self.max_model_len)
            object.__setattr__(self, "processors", bound)

    @classmethod
    def of(
        cls, config: ModelConfig, params: Params, options: EngineOptions, draft: Draft | None, mesh: Mesh | None
    ) -> "EngineSpec":
        """The spec of an engine over concrete parameters, on the devices where they lie."""
        device = jax.tree.leaves(params)[0].addressable_shards[0].device
        draft = (draft or NO_DRAFT).with_params(lambda config, params: (config, shapes_of(params)))
        platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
        chip = chip_of_kind(device.device_kind)
        return cls(config, shapes_of(params), options, platform, mesh, draft, chip=chip and chip.name)

    @cached_property
    def num_adapters(self) -> int:
        """Adapters in the weights, number 0 included, which is none; 0 for weights without any."""
        return num_adapters(host_layers.all_layers(self.params))

    @cached_property
    def base_params(self) -> Params:
        """The parameters of all layers without adapters."""
        return without_adapters(host_layers.all_layers(self.params))

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of the slots of adapters."""
        return num_bytes(host_layers.all_layers(self.params)) - num_bytes(self.base_params)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: what a loaded adapter takes of the host's memory at most. 0 without any."""
        return -(-self.adapter_bytes // self.options.max_adapters) if self.options.max_adapters else 0

    @property
    def host_adapter_bytes(self) -> int | None:
        """Bytes of the host's memory that `max_loaded_adapters` take at most; None where any number may be loaded."""
        most = self.options.max_loaded_adapters
        return None if most is None else most * self.slot_bytes

    @property
    def base_config(self) -> ModelConfig:
        """The configuration of the model without what adapters add."""
        num_added = self.options.max_adapter_tokens or 0
        return replace(self.config, vocab_size=self.config.vocab_size - num_added) if num_added else self.config

    @property
    def has_adapters(self) -> bool:
        return self.num_adapters > 0

    def check_adapter(self, adapter: LoadedAdapter | int) -> None:
        """Raises ValueError, with both numbers, for an adapter that the weights do not hold."""
        if isinstance(adapter, LoadedAdapter):
            if self.options.adapter_sizes is None:
                raise ValueError(f"adapter {adapter.name!r} was asked for, and there is room for none: max_adapters=8")
        elif not 0 <= adapter < max(self.num_adapters, 1):
            held = f"hold adapters 0 to {self.num_adapters - 1}" if self.has_adapters else "hold no adapters"
            raise ValueError(f"adapter {adapter} was asked for, and the model's weights {held}")

    def _check_adapters(self) -> None:
        if self.has_adapters and self.mesh is not None and self.options.adapter_sizes is None:
            raise ValueError(f"weights with adapters run without a mesh, not on one of {self.num_devices} devices")
        if (num := self.options.max_adapter_tokens) and self.draft.models(self.base_config, self.base_params):
            raise ValueError(
                f"max_adapter_tokens={num}: draft {self.draft.name!r} cannot read added tokens; draft=ngram can"
            )
        if any(num_adapters(params) for _, params in self.draft.own):
            raise ValueError(
                f"draft {self.draft.name!r} has weights with adapters, which only the model itself may have"
            )

    @property
    def steered_layers(self) -> tuple[int, ...]:
        """Layers after which requests may add vectors."""
        return tuple(self.options.steered_layers)

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers after which requests may ask for hidden states."""
        return tuple(self.options.tapped_layers)

    def _check_layers(self) -> None:
        if self.numbers is not None:  # of some layers of a model, to count
            return
        for name, layers in (("steered_layers", self.steered_layers), ("tapped_layers", self.tapped_layers)):
            if layers and layers[-1] >= self.config.num_layers:
                raise ValueError(f"{name}={layers}: the model has layers 0 to {self.config.num_layers - 1}")

    def check_request(self, request: Request) -> None:
        """Raises ValueError for an adapter, vectors, layers and arrays that the engine has no room for."""
        self.check_adapter(request.adapter)
        self.check_steering(request.steering)
        self.check_taps(request.options.tapped_layers)
        declared = {} if self.processors is None else self.processors.arrays
        for name, array in request.arrays.items():
            own = declared.get(name)
            if own is None or (array.shape, array.dtype) != (own.shape, own.dtype):
                told = f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"array {name!r} {told} of the request is none that the engine's processors declare")

    def check_taps(self, layers: Sequence[int]) -> None:
        """Raises ValueError for layers whose hidden states the engine does not return."""
        for layer in layers:
            if layer not in self.tapped_layers:
                declared = f"tapped_layers={self.tapped_layers}" if self.tapped_layers else "there are no tapped_layers"
                raise ValueError(f"hidden states after layer {layer}: {declared}; name it when the LLM is made")

    def check_steering(self, steering: Steering | None) -> None:
        """Raises ValueError for vectors that the engine has no room for."""
        if steering is not None:
            steering.check(self.config.hidden_size, self.config.num_layers, self.steered_layers)

    @cached_property
    def policy(self) -> CachePolicy:
        """The policy of the cache."""
        trained = self.config.max_length
        policy = self.options.policy.bound(self.page_size, trained if self.max_model_len > trained else None)
        return policy if self.numbers is None else policy.of_layers(self.numbers)

    @property
    def _policy_use(self) -> PolicyUse:
        return PolicyUse(
            f"kv_policy={self.options.kv_policy!r}",
            self.config,
            self.max_model_len,
            self.num_devices,
            self.kv_dtype,
            draft=self.draft.name,
            draft_in_cache=self.draft.in_cache,
            host_cache_gib=self.options.host_cache_gib,
        )

    @property
    def is_deterministic(self) -> bool:
        """True if every pass has one shape."""
        return self.determinism.is_on

    # Sizes.

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.options.max_model_len or min(self.config.max_length, DEFAULT_MAX_MODEL_LEN)

    @property
    def max_seqs(self) -> int:
        """Sequences that run at once: slots."""
        return self.options.max_seqs or (CPU_MAX_SEQS if self.platform == "cpu" else DEFAULT_MAX_SEQS)

    @cached_property
    def dtype(self) -> Any:
        """The dtype that the model computes in."""
        return compute_dtype(self.params)

    @property
    def kv_dtype(self) -> str:
        """The stored dtype of keys and values."""
        return stored_dtype(self.options.kv_dtype, self.dtype)

    @property
    def draft_kv_dtype(self) -> str:
        """Stored type of a draft's own cache, where it has one."""
        given = self.options.draft_kv_dtype or self.options.kv_dtype
        return next((stored_dtype(given, compute_dtype(params)) for _, params in self.draft.own), self.kv_dtype)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        if self.options.cache == "contiguous":
            return self.max_model_len
        return self.options.page_size or default_page_size(self.platform, self.kv_dtype)

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the first group's pool, the null page included: of the layers without a window, where there are any.
        Unless set, `PoolSizes.default`."""
        return self.pool_pages or self.options.num_pages or self.pool_sizes.default

    @property
    def reuses_prefixes(self) -> bool:
        """True if pages of finished work are kept; those of a contiguous cache are never full before the end."""
        is_possible = self.options.prefix_cache and self.options.cache == "paged"
        return is_possible and self.policy.reuses_prefixes and (not self.has_states or self.num_saved_states > 0)

    @property
    def has_states(self) -> bool:
        """True if sequences have a state beside their pages: it is of all tokens so far and cannot be cut."""
        return bool(self.config.recurrent_layers)

    @property
    def draft_has_states(self) -> bool:
        """As `has_states` of the draft, which may be the model's own first layers."""
        return any(config.recurrent_layers for config, _ in self.draft_models)

    @property
    def save_interval(self) -> int:
        """States are saved after multiples of so many tokens: of whole pages, and of blocks of the recurrence, whose
        results do not depend on where steps end."""
        return math.lcm(BLOCK_TOKENS, self.page_size)

    @property
    def num_saved_states(self) -> int:
        """Places for states that are kept for prefix reuse; none where no prompt is as long as the interval."""
        options = self.options
        is_possible = self.has_states and options.prefix_cache and options.cache == "paged"
        if not is_possible or self.save_interval >= self.max_model_len:
            return 0
        return self.max_seqs if options.num_saved_states is None else options.num_saved_states

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots, of the model and a draft model, and of those that are saved."""
        return num_bytes((self.states, self.draft_states, self.saved_states))

    # Groups of layers.

    @cached_property
    def layers(self) -> tuple[LayerPages, ...]:
        """Pages of each layer."""
        if self.options.cache == "contiguous":
            return (LayerPages("contiguous"),) * self.config.num_layers
        return self.policy.layers(self.config)

    @cached_property
    def _group_kinds(self) -> tuple[GroupKind, ...]:
        """The groups of layers: first those that keep everything, then the largest window first, and lower layers
        before higher ones.

        A draft model's own layers are all in the group that keeps everything, as it stores a whole prompt at once when
        it first drafts: none of it may have been given back.
        """
        kinds = {layer.group for layer in (*self.layers, *(LayerPages("full") for _ in self.draft.own))}

        def order(kind: GroupKind) -> tuple[bool, int, int]:
            window, _, at_end = kind
            return window is not None, -(window or 0), -1 if at_end is None else at_end.order

        return tuple(sorted(kinds, key=order))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the groups, None for layers without one."""
        return tuple(window for window, _, _ in self._group_kinds)

    @property
    def ends_prompts(self) -> bool:
        """True if prompts lose pages at their end, in a pass of its own."""
        return any(at_end is not None for _, _, at_end in self._group_kinds)

    @property
    def can_rewind(self) -> bool:
        """True if tokens that are refused can be taken back: they are in no state, and nothing was dropped for them."""
        return not self.has_states and not self.draft_has_states and self.policy.can_rewind

    @cached_property
    def layer_groups(self) -> tuple[int, ...]:
        """The group of each layer; () where there is only one."""
        kinds = self._group_kinds
        return tuple(kinds.index(layer.group) for layer in self.layers) if len(kinds) > 1 else ()

    @cached_property
    def pool_sizes(self) -> PoolSizes:
        """The rule for the numbers of pages."""
        tokens = self.max_model_len, self.prefill_chunk, self.max_tokens_per_dispatch + self.most_nodes
        sizes = self._group_kinds, self.group_page_bytes, self._scratch, self.page_size, self.max_seqs
        return PoolSizes(*sizes, *tokens, self.policy)

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers and their pools."""
        windows, sinks, ends = zip(*self._group_kinds, strict=True)
        sizes = self._layers_by_group, self.group_page_bytes, sinks, self._scratch
        return tuple(map(CacheGroup, self.pool_sizes.pages(self.num_pages), windows, *sizes, ends))

    @property
    def _scratch(self) -> tuple[int, ...]:
        """By group, the pages that programs use within a pass."""
        most = self.token_buckets[-1], self.max_seqs
        return tuple(self.policy.num_scratch(kind, *most) for kind in self._group_kinds)

    @property
    def _layers_by_group(self) -> list[tuple[int, ...]]:
        kinds = [(layer, cache.group) for layer, cache in enumerate(self.layers)]
        return [tuple(layer for layer, own in kinds if own == kind) for kind in self._group_kinds]

    @cached_property
    def group_page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each group on a device, in all of its layers and the draft's."""
        single = self._cache(self.config, self.kv_dtype, (1,), leaves=self.page_leaves)
        sizes = [sum(num_bytes(single.layers[layer]) for layer in layers) for layers in self._layers_by_group]
        sizes[0] += sum(num_bytes(self._cache(config, self.draft_kv_dtype, (1,))) for config, _ in self.draft.own)
        return tuple(sizes)

    @cached_property
    def table_sizes(self) -> TableSizes:
        """Room for grammars on the device."""
        return TableSizes.of_bytes(self.options.grammar_memory * 2**20, self.max_seqs, self.config.vocab_size)

    # Buckets: the numbers of tokens and slots that programs are compiled for.

    @cached_property
    def prefill_chunk(self) -> int:
        """Prompt tokens of a step, at most; with one shape the rows that decoding sequences leave."""
        default = self.determinism.num_rows if self.is_deterministic else default_chunk(self.chip)
        return min(self.options.prefill_chunk or default, self.max_model_len)

    @cached_property
    def decode_slots(self) -> tuple[int, ...]:
        """Numbers of slots of decode programs and speculative rounds: unless set, 1, 4, 8, 16, ... and max_seqs."""
        default = buckets((1, *(4 * 2**i for i in range(16))), self.max_seqs)
        return self.step_slots if self.is_deterministic else tuple(self.options.decode_slots or default)

    @cached_property
    def step_slots(self) -> tuple[int, ...]:
        """Numbers of slots of steps, where only the sampler's work depends on it."""
        return (self.max_seqs,) if self.is_deterministic else buckets((1,), self.max_seqs)

    def step_slots_of(self, num_tokens: int) -> tuple[int, ...]:
        """Numbers of slots of steps of `num_tokens`, one of the `token_buckets`. In all but the smallest, unused rows
        of logits cost little, so that only the largest number is compiled."""
        return self.step_slots if num_tokens == self.token_buckets[0] else self.step_slots[-1:]

    @cached_property
    def token_buckets(self) -> tuple[int, ...]:
        """Numbers of tokens of steps: unless set, 32, 128, 256, ... and a whole chunk beside max_seqs slots. One that
        the largest exceeds by less than 5 % is left out."""
        if self.is_deterministic:
            return (self.determinism.num_rows,)
        if self.options.token_buckets is not None:
            return tuple(self.options.token_buckets)
        largest = most_tokens(self.prefill_chunk, self.max_seqs)
        sizes = buckets((MIN_STEP_TOKENS, *(4 * MIN_STEP_TOKENS * 2**i for i in range(16))), largest)
        return tuple(size for size in sizes if size == largest or 1.05 * size < largest)

    @property
    def head_rows(self) -> int | None:
        """Rows of every product with the output layer, where all passes have one shape."""
        return max(self.max_seqs, MIN_HEAD_ROWS) if self.is_deterministic else None

    @property
    def steps_per_dispatch(self) -> int:
        """Decode steps of one dispatch."""
        return self.options.steps_per_dispatch

    # Drafting.

    @cached_property
    def trees(self) -> tuple[TokenTree, ...]:
        """Trees that rounds are compiled for, the smallest first."""
        return self.options.trees(self.draft.lengths)

    @cached_property
    def round_forms(self) -> tuple[tuple[TokenTree, int], ...]:
        """The rounds that programs are compiled for: a tree, and rows of a pass for each slot on average, of
        `Drafter.rows_per_slot`. An adaptive length also drafts its longest chains in the rows of the second longest,
        which they share."""
        forms = tuple((tree, 0) for tree in self.trees)
        if not self.packs_rounds:
            return forms
        return *forms, (self.trees[-1], self.trees[-2].num_nodes)

    @property
    def packs_rounds(self) -> bool:
        """True if there are rounds in which slots share rows: not with one shape of all passes, nor under a policy of
        the cache that needs as many rows of each slot. The fewest slots have none."""
        several = self.options.is_adaptive and len(self.trees) > 1 and len(self.decode_slots) > 1
        return several and not self.is_deterministic and self.policy.packs_slots

    def shares_rows(self, num_slots: int) -> bool:
        """True if there are rounds of so many slots that share rows."""
        return self.packs_rounds and num_slots > self.decode_slots[0]

    def forms_of(self, num_slots: int) -> list[int]:
        """The numbers of the `round_forms` that are compiled for so many slots."""
        return [number for number, (_, rows) in enumerate(self.round_forms) if not rows or self.shares_rows(num_slots)]

    def form_of(self, tree: TokenTree, shares_rows: bool, num_slots: int) -> int:
        """The number of a round's form: with shared rows, if so many slots have such rounds."""
        is_shared = shares_rows and self.shares_rows(num_slots)
        return len(self.trees) if is_shared else self.trees.index(tree)

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree; 0 without a draft."""
        return max((tree.num_nodes for tree in self.trees), default=0)

    @property
    def max_tokens_per_dispatch(self) -> int:
        """Tokens of an answer that one dispatch makes, at most."""
        return max(self.steps_per_dispatch, *(self.max_rounds * (tree.depth + 1) for tree in self.trees), 1)

    @property
    def max_rounds(self) -> int:
        """Speculative rounds of one dispatch."""
        return max(1, self.options.steps_per_dispatch // 2)

    @property
    def draft_length(self) -> int | None:
        """Tokens of the longest sequence that slots hold for drafting; None without a draft."""
        return self.max_model_len + 1 if self.trees else None

    @cached_property
    def draft_models(self) -> tuple[tuple[ModelConfig, Params], ...]:
        """Configuration and parameters of a draft that is a model, or the target's own first layers."""
        return self.draft.models(self.config, self.params)

    def drafters(self, *models: ProgramModel) -> tuple[Drafter, ...]:
        """The static argument of each round's program, in the order of `round_forms`; `models` are those of the draft
        as programs take them."""
        return tuple(
            Drafter(
                self.draft.proposer(*models),
                tree,
                is_maximal=self.options.acceptance == "maximal",
                min_rows=self.token_buckets[-1] if self.is_deterministic else 0,
                is_uniform=self.is_deterministic,
                rows_per_slot=rows,
            )
            for tree, rows in self.round_forms
        )

    def observer(self, models: Sequence[ProgramModel], weights: Weights) -> ObservingDraft | None:
        """A draft that observes every pass of the target, with the models and weights that `speculate` takes; None for
        one that does not."""
        return ObservingDraft(self.draft.proposer(*models), weights) if self.trees and self.draft.observes else None

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
    def placed_draft(self) -> Params:
        """Placed parameters of the model that a draft computes with; {} for none."""
        return next((self._placed(*model) for model in self.draft_models), {})

    @property
    def own_draft_params(self) -> Params:
        """Placed parameters of a draft's own."""
        return next((self._placed(*model) for model in self.draft.own), {})

    def _placed(self, config: ModelConfig, params: Params) -> Params:
        device = None if self.is_sharded else self.mesh
        return placed_params(config, params, self.program_mesh, self.platform, device)

    def layout_of(self, config: ModelConfig, kv_dtype: str) -> str:
        """How the pages of a model, the target or the draft, lie in memory."""
        return platform_layout(self.platform, kv_dtype, has_values=config.caches_values)

    @cached_property
    def cache(self) -> PagedCache:
        """The model's pages and states."""
        counts = tuple(group.num_allocated for group in self.groups)
        cache = self._cache(self.config, self.kv_dtype, counts, self.layer_groups, self.page_leaves)
        return replace(cache, states=self.states)

    @property
    def states(self) -> StateCache | None:
        """States of recurrent layers, of all slots."""
        return abstract_state_cache(self.config, self.max_seqs, self.dtype)

    @cached_property
    def saved_states(self) -> StateCache | None:
        """States that are kept for prefix reuse: place p is row p - 1."""
        return abstract_state_cache(self.config, self.num_saved_states, self.dtype)

    @property
    def draft_states(self) -> Any:
        """States of a draft model's own, of all slots, or what else it carries from pass to pass."""
        own = (abstract_state_cache(config, self.max_seqs, compute_dtype(params)) for config, params in self.draft.own)
        carried = self.draft.carried(self.max_seqs)
        return self._replicated(next(own, None) if carried is None else carried)

    def _replicated(self, arrays: Any) -> Any:
        """Abstract arrays, whole on every device."""
        if (mesh := self.program_mesh) is None:
            return arrays
        return placed(arrays, jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), arrays))

    @cached_property
    def draft_cache(self) -> PagedCache | None:
        """The pages and states of a draft model's own."""
        for config, _ in self.draft.own:
            return replace(self._cache(config, self.draft_kv_dtype, (self.num_pages,)), states=self.draft_states)
        return None

    def _cache(
        self,
        config: ModelConfig,
        kv_dtype: str,
        counts: tuple[int, ...],
        groups: tuple[int, ...] = (),
        leaves: PageLeaves | None = None,
    ) -> PagedCache:
        layout, mesh = self.layout_of(config, kv_dtype), self.program_mesh
        return abstract_paged_cache(config, counts, self.page_size, kv_dtype, layout, mesh, groups, leaves)

    def page_leaves(self, layer: int, pages: Any) -> Any:
        """Arrays that the policy keeps beside the pages of a layer."""
        layout = self.layout_of(self.config, self.kv_dtype)
        return self.policy.page_leaves(self.config, layer, pages, self.kv_dtype, layout)

    @property
    def pages(self) -> Pages:
        """One layer's pages."""
        pages: Any = next(pages for pages in self.cache.bare.layers if pages is not None)
        return pages

    @property
    def cache_of_draft(self) -> PagedCache:
        """Cache that the model of a draft reads: its own, or the first layers of the target's."""
        return self.draft_cache or self.cache.first(
            max((draft_config.num_layers for draft_config, _ in self.draft_models), default=0)
        )

    @cached_property
    def slots(self) -> tuple[Slots, SamplingBatch]:
        """State that slots carry between dispatches, and their sampling parameters."""
        return abstract_slots(
            self.max_seqs,
            self.config.vocab_size,
            self.program_mesh,
            self.draft_length,
            self.has_adapters,
            self.processors,
            self.steering_arrays,
        )

    @property
    def steering_arrays(self) -> dict[str, RequestArray]:
        """The vectors that a request may add, by layer."""
        return {str(layer): RequestArray((self.config.hidden_size,)) for layer in self.steered_layers}

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the hidden states that passes return."""
        return tuple(map(tap_name, self.tapped_layers))

    @cached_property
    def tables(self) -> GrammarTables:
        """Masks and tables of grammars, whole on every device."""
        return self._replicated(self.table_sizes.abstract())

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of one device that stay allocated, without the padding of a layout."""
        parts = {"weights": num_bytes(host_layers.on_device(self.placed_params))}
        parts |= {"arriving layers": self.buffer_bytes} if self.buffer_bytes else {}
        parts |= {"draft weights": num_bytes(self.own_draft_params)}
        parts |= {"cache": num_bytes(self.cache), "draft cache": num_bytes(self.draft_cache)}
        parts = {name: size for name, size in parts.items() if size or not name.startswith("draft")}
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
        """This spec with a pool of so many pages."""
        return replace(self, pool_pages=num_pages)

    def with_layers(self, layers: Sequence[int], draft_layers: Sequence[int] | None = None) -> "EngineSpec":
        """This spec with these layers only, and these of a draft model."""
        config, params = take_layers(self.config, self.params, layers)
        draft = self.draft.with_layers(draft_layers)
        return replace(self, config=config, params=params, draft=draft, numbers=tuple(layers))


def check_states(
    config: ModelConfig,
    draft: Draft,
    num_devices: int,
    options: EngineOptions,
    kv_dtypes: Sequence[str | None],
) -> None:
    """Raises ValueError for several devices or a draft with branches (`options.draft_tree`) beside layers that are not
    attention, in the model or its draft, for a model without attention, and as `_check_indexer` and `check_rotated`.
    `kv_dtypes` are those of the caches that there are."""
    draft_tree = options.draft_tree
    _check_indexer(config, draft, num_devices, [dtype for dtype in kv_dtypes if dtype], draft_tree)
    models = (config, *(own for own, _ in draft.own))
    for model, kv_dtype in zip(models, kv_dtypes, strict=False):
        if kv_dtype is not None:
            check_rotated(model, kv_dtype)
    for model in models:
        kinds = ", ".join(sorted({kind for kind in model.layer_kinds if kind != "attention"}))
        if not kinds:
            continue
        if draft_tree is not None and max(draft_tree) > 1 and model.recurrent_layers:
            raise ValueError(
                f"{model.architecture} has layers of kind {kinds}: states follow one chain of tokens, so "
                f"draft_tree={tuple(draft_tree)} cannot have branches; draft a chain with num_draft_tokens"
            )
        if num_devices > 1:
            raise ValueError(
                f"{model.architecture} has layers of kind {kinds}: they run on one device, not {num_devices}"
            )
        if not model.attention_layers:
            raise ValueError(f"{model.architecture} has no layer with attention: an engine needs one")


def check_sequence_axis(mesh: parallel.AnyMesh | None, page_size: int, options: EngineOptions) -> None:
    """Raises ValueError for pages that the "sequence" axis of the mesh does not divide, and for a draft with branches
    beside such an axis."""
    count = 1 if mesh is None else parallel.axis_size(mesh, "tokens")
    if page_size % count:
        raise ValueError(f"page_size={page_size} is not a multiple of {count}, the mesh's axis {parallel.SEQUENCE!r}")
    tree = options.draft_tree
    if count > 1 and tree is not None and max(tree) > 1:
        raise ValueError(
            f"draft_tree={tuple(tree)} cannot have branches on a mesh with {parallel.SEQUENCE}={count}: tokens of an "
            "accepted branch would move between devices; draft a chain with num_draft_tokens"
        )


def _check_indexer(
    config: ModelConfig, draft: Draft, num_devices: int, kv_dtypes: Sequence[str], tree: Sequence[int] | None
) -> None:
    """Raises ValueError for several devices, a tree of drafts or a cache of 8 bits beside an indexer, in the model or
    its draft."""
    for model in (config, *(own for own, _ in draft.own)):
        if model.mla is None or not model.mla.has_indexer:
            continue
        name = f"{model.architecture}, whose indexer chooses the tokens that a query attends to,"
        if num_devices > 1:
            raise ValueError(f"{name} runs on one device, not {num_devices}")
        if tree is not None:
            raise ValueError(f"{name} does not verify trees of drafts (draft_tree), only chains")
        if narrow := [dtype for dtype in kv_dtypes if dtype.startswith(("int", "float8"))]:
            raise ValueError(f"{name} has no cache of {narrow[0]} (kv_dtype): index keys have at least 16 bits")
