"""The passes that compact prompts, on the devices."""

from typing import Any, Protocol

import jax
import numpy as np
from jax.stages import Lowered

from jaxinfer.cache import PagedCache
from jaxinfer.engine.compiling import Program
from jaxinfer.engine.lockstep import Operated, operation
from jaxinfer.engine.placement import DevicePlacement
from jaxinfer.engine.plans import Chunk, GroupMove
from jaxinfer.engine.programs import ProgramModel, Weights, paged
from jaxinfer.engine.programs.compaction import CompactionWork, compact_prompt, compaction_work
from jaxinfer.engine.programs.work import Slots, StepOutput, StepSlots
from jaxinfer.engine.scoring import ScoredChunk
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.step_rows import step_rows
from jaxinfer.engine.weights import WeightsView
from jaxinfer.sampling import SamplingBatch


class PromptPasses(Operated, Protocol):
    """The part of `ModelRunner` that compacts prompts."""

    spec: EngineSpec
    model: ProgramModel
    weights: WeightsView[Weights]
    placement: DevicePlacement
    _cache: PagedCache
    _slots: Slots
    _batch: SamplingBatch
    _tables: Any
    _hidden: jax.Array | None

    def _compact(self, slot: int, chunk: Chunk) -> tuple[StepOutput, list[ScoredChunk]]:
        """Runs the pass of a prompt's last tokens; where they are in the hidden states."""
        spec, sequence = self.spec, chunk.sequence
        rows, pieces = step_rows([(slot, chunk)], [], chunk.length, spec.max_seqs)
        del rows["tokens"], rows["token_slots"]
        prompt = sequence.tokens[: sequence.num_prompt]
        work = self._end_work(prompt, chunk.length, chunk.end_moves)
        return self._run_compaction(rows, work, pieces[0].is_read), pieces

    @operation
    def _run_compaction(self, rows: dict[str, np.ndarray], work: CompactionWork, is_scored: bool) -> StepOutput:
        self._cache, logits, hidden = compact_prompt(*self._compaction_arguments(work))
        slots = StepSlots(**self.placement.put(rows))
        arguments = self._slots, self._batch, slots, logits, self._tables
        self._slots, output = paged.sample_step(self.placement.mesh, *arguments)
        self._hidden = hidden if is_scored else None
        return output

    def _compaction_arguments(self, work: CompactionWork) -> tuple[Any, ...]:
        spec = self.spec
        static = spec.max_seqs, spec.is_deterministic, spec.token_buckets[-1]
        return self.model, self.weights.value, self._cache, self.placement.put(work), *static

    @property
    def _compaction_programs(self) -> list[Program]:
        """The program, if prompts are compacted."""
        if not self.spec.ends_prompts:
            return []
        return [Program("compaction of a prompt", self._lower_compaction, self._warm_up_compaction)]

    def _empty_compaction(self) -> CompactionWork:
        """Work that writes nothing that is read: to the null page."""
        moves = tuple(GroupMove((), (), 0) for _ in self.spec.groups)
        observed = max(group.at_end.num_observed for group in self.spec.groups if group.at_end is not None)
        return self._end_work([0] * observed, observed, moves)

    def _end_work(self, prompt: list[int], window: int, moves: tuple[GroupMove, ...]) -> CompactionWork:
        spec = self.spec
        return compaction_work(prompt, window, moves, spec.groups, spec.pages_per_sequence, spec.policy)

    def _lower_compaction(self) -> Lowered:
        return compact_prompt.lower(*self._compaction_arguments(self._empty_compaction()))

    def _warm_up_compaction(self) -> None:
        rows = paged.empty_work(1, self.spec.max_seqs)
        slots = {name: rows[name] for name in StepSlots.__dataclass_fields__ if name in rows}
        self._run_compaction(slots, self._empty_compaction(), False)
