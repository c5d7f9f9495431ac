"""The engine's side of speculation: the draft's cache, what a dispatch drafts, what came of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.cache import KVScales, PagedCache, applied_scales, init_paged_cache, page_bytes, stored_dtype
from jaxinfer.engine import paged_programs, programs, results
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.paged_programs import Slots, StepOutput
from jaxinfer.engine.placement import DevicePlacement
from jaxinfer.engine.scheduler import SequenceState
from jaxinfer.engine.speculative_programs import Drafter, RoundCounts, SpeculativeWork, speculate
from jaxinfer.models import ModelConfig, Params, compute_dtype
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.sampling import SamplingBatch
from jaxinfer.speculative import (
    AcceptanceEstimate,
    Draft,
    LayersDraft,
    LengthController,
    ModelDraft,
    NgramDraft,
    SpeculationStats,
    TokenTree,
    chain,
    draft_name,
    first_layers,
)
from pallas_kernels.paged_attention import platform_layout


@dataclass(frozen=True)
class RoundChoice:
    """What a dispatch drafts: a tree in each round, of which a sequence takes the first nodes (not the root counted);
    `max_rounds` rounds at most."""

    tree: TokenTree
    lengths: dict[SequenceState, int]
    max_rounds: int

    def length_of(self, sequence: SequenceState) -> int:
        return self.lengths.get(sequence, 0)


class Speculation:
    """A draft beside the target of one engine. Owns the draft's cache; parameters belong to the caller.

    Raises ValueError for a draft that cannot draft for the target, or a tree that the draft cannot make.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        draft: Draft,
        options: EngineOptions,
        *,
        page_size: int,
        platform: str,
        placement: DevicePlacement,
    ):
        settings = options.speculation
        if settings is None:
            raise ValueError("a draft needs EngineOptions.speculation")
        self.draft, self.options, self.settings, self.placement = draft, options, settings, placement
        mesh = placement.mesh
        self.max_rounds = 1 if options.deterministic else max(1, options.steps_per_dispatch // 2)
        self.weights: programs.Weights = ()
        self.page_bytes = self.weight_bytes = 0
        self.cache: PagedCache | None = None
        self.kv_dtype: str | None = None  # of a cache of the draft's own
        self._kv_scales: KVScales | None = None
        self._page_size = page_size
        self._draft_config: ModelConfig | None = None
        if settings.kv_dtype is not None and not isinstance(draft, ModelDraft):
            raise ValueError(
                f"draft_kv_dtype={settings.kv_dtype!r}: draft={draft_name(draft)!r} has no cache of its own"
            )
        kind: NgramDraft | programs.ProgramModel
        if isinstance(draft, NgramDraft):
            if settings.tree is not None:
                raise ValueError(f"draft='ngram' drafts a chain, it cannot fill draft_tree={settings.tree}")
            kind = draft
        else:
            if isinstance(draft, LayersDraft):
                draft_config, draft_params = first_layers(config, params, draft.num_layers)
            else:
                draft_config, draft_params = draft.config, draft.params
                self._draft_config = draft_config
                self.kv_dtype = stored_dtype(settings.kv_dtype or options.kv_dtype, compute_dtype(draft_params))
                self._kv_scales = applied_scales(draft.kv_scales, self.kv_dtype, draft_config)
                self._layout = platform_layout(platform, self.kv_dtype, has_values=draft_config.caches_values)
                self.page_bytes = page_bytes(draft_config, page_size, self.kv_dtype, self._layout, mesh)
            kind, self.weights = programs.program_model(draft_config, draft_params, mesh)
            if isinstance(draft, ModelDraft):
                self.weight_bytes = num_bytes(self.weights)
        self.drafters = {
            tree: Drafter(
                kind,
                tree,
                is_maximal=settings.acceptance == "maximal",
                shares_cache=isinstance(draft, LayersDraft),
                min_rows=options.token_buckets[-1] if options.deterministic else 0,
                is_uniform=options.deterministic,
            )
            for tree in settings.trees
        }
        self._by_number = list(self.drafters.values())
        self._has_keys = bytearray()  # of each page: whether the draft has stored all of it
        self.rounds: Counter[tuple[int, int]] = Counter()
        self.num_plain = 0
        self._controller = None
        if settings.is_adaptive:
            lengths = [tree.depth for tree in settings.trees]
            self._controller = LengthController(lengths, num_bytes(self.weights) / num_bytes(params))
        self._estimates: dict[SequenceState, AcceptanceEstimate] = {}

    @property
    def length(self) -> int:
        """Tokens of the longest sequence that slots hold."""
        return self.options.max_model_len + 1

    def number_of(self, tree: TokenTree) -> int:
        """Which of the trees it is, for `run`."""
        return list(self.drafters).index(tree)

    def allocate(self, num_pages: int) -> None:
        """The draft's cache, of as many pages as the target's."""
        self._has_keys = bytearray(num_pages)
        if self._draft_config is not None and self.kv_dtype is not None:
            self.cache = init_paged_cache(
                self._draft_config,
                num_pages,
                self._page_size,
                self.kv_dtype,
                self._layout,
                self.placement.mesh,
                self._kv_scales,
            )

    def close(self) -> None:
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()

    # What a dispatch drafts.

    def choose(self, sequences: Sequence[SequenceState], num_slots: int) -> RoundChoice | None:
        """What the next dispatch, of a program for `num_slots`, drafts if these decode; None for nothing."""
        if self._controller is None or not sequences:
            tree = self.settings.trees[-1]
            return RoundChoice(tree, dict.fromkeys(sequences, tree.num_nodes - 1), self.max_rounds)
        limits = [max(sequence.num_left - 1, 0) for sequence in sequences]
        choice = self._controller.choose(num_slots, self._estimates_of(sequences, self._controller), limits)
        if choice.num_draft_tokens == 0:
            return None
        lengths = dict(zip(sequences, choice.lengths, strict=True))
        return RoundChoice(chain(choice.num_draft_tokens), lengths, min(choice.max_rounds or 2**30, self.max_rounds))

    def started(self, sequences: Sequence[SequenceState], choice: RoundChoice | None, num_steps: int) -> int:
        """To be told of every dispatch in which these decode. Returns how many tokens, that came without it, the draft
        must catch up with."""
        if self._controller is None or not isinstance(self.draft, ModelDraft):  # others store nothing of their own
            return 0
        num_draft_tokens = 0 if choice is None else choice.tree.depth
        return self._controller.start(self._estimates_of(sequences, self._controller), num_draft_tokens, num_steps)

    def _estimates_of(
        self, sequences: Sequence[SequenceState], controller: LengthController
    ) -> list[AcceptanceEstimate]:
        for sequence in sequences:
            if sequence not in self._estimates:
                num_tokens = len(sequence.tokens) if isinstance(self.draft, ModelDraft) else 0
                self._estimates[sequence] = controller.new_estimate(num_tokens)
        return [self._estimates[sequence] for sequence in sequences]

    # What came of it.

    @property
    def stats(self) -> SpeculationStats:
        """Of all answers since the start; tokens beyond the end of an answer count as well."""
        return SpeculationStats.of_rounds(self.rounds, self.num_plain)

    def record_rounds(self, sequence: SequenceState, rounds: Iterable[tuple[int, int]], tree: TokenTree) -> None:
        """A sequence's rounds of a dispatch: how many tokens each drafted and accepted. Of a tree, as many drafts count
        as can be accepted."""
        estimate = self._estimates.get(sequence)
        for proposed, accepted in rounds:
            pair = (min(proposed, tree.depth), accepted)
            sequence.owner.rounds[pair] += 1
            self.rounds[pair] += 1
            if estimate is not None:
                # Where no n-gram was found, nothing was gained.
                estimate.observe(tree.depth if isinstance(self.draft, NgramDraft) else pair[0], accepted)

    def record_time(
        self,
        num_slots: int,
        tree: TokenTree | None,
        seconds: float,
        num_rounds: int,
        tokens: float,
        num_behind: int = 0,
    ) -> None:
        """A dispatch of rounds, or of plain steps (no tree), that made so many tokens in a row's round on average.
        `num_behind` is what `started` said."""
        if self._controller is not None and num_rounds > 0 and seconds > 0:
            num_draft_tokens = 0 if tree is None else tree.depth
            self._controller.observe_time(
                num_slots, num_draft_tokens, seconds, num_rounds, tokens, num_behind=num_behind
            )

    def ended(self, sequence: SequenceState) -> None:
        self._estimates.pop(sequence, None)

    # On the device.

    def slot_row(self, sequence: SequenceState) -> tuple[np.ndarray, int]:
        """What the slot of a sequence starts with: its tokens int32[L], and how many the draft has stored."""
        return results.padded(sequence.tokens[: self.length], self.length), self._num_drafted(sequence)

    def copy_pages(self, sources: jax.Array, destinations: jax.Array) -> None:
        if self.cache is not None:
            self.cache = paged_programs.copy_pages(self.placement.mesh, self.cache, sources, destinations)

    def run(
        self,
        model: programs.ProgramModel,
        weights: programs.Weights,
        cache: PagedCache,
        slots: Slots,
        batch: SamplingBatch,
        work: dict[str, Any],
        table: jax.Array,
        tree: int,
    ) -> tuple[PagedCache, Slots, StepOutput, RoundCounts]:
        """One dispatch of rounds, with the tree of this number. Donates the cache and the slots."""
        device_work = SpeculativeWork(**self.placement.put(work), page_table=table)
        cache, self.cache, slots, output, counts = speculate(
            model,
            weights,
            self._by_number[tree],
            self.weights,
            cache,
            self.cache,
            slots,
            batch,
            device_work,
            self.max_rounds,
        )
        return cache, slots, output, counts

    # Which pages the draft knows.

    def clear_draft_pages(self, pages: Sequence[int]) -> None:
        """The target is about to fill these pages anew."""
        for page in pages:
            self._has_keys[page] = 0

    def mark_draft_pages(self, sequence: SequenceState) -> None:
        """After rounds: the draft has stored all but, at most, the last of what the target has."""
        num_stored = len(sequence.tokens) - 2
        for page in sequence.pages[: max(num_stored, 0) // self._page_size]:
            self._has_keys[page] = 1

    def _num_drafted(self, sequence: SequenceState) -> int:
        """Leading tokens whose pages the draft has stored, in some earlier sequence."""
        count = 0
        for page in sequence.pages[: sequence.num_reused // self._page_size]:
            if not self._has_keys[page]:
                break
            count += 1
        return count * self._page_size
