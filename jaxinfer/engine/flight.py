"""A dispatch between sending and reading, and what it computed."""

from dataclasses import dataclass

import numpy as np

from jaxinfer.engine.plans import Chunk, DispatchPlan
from jaxinfer.engine.programs.speculative import RoundCounts
from jaxinfer.engine.programs.work import StepOutput
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scoring import PendingScores
from jaxinfer.sampling import SampleOutput


@dataclass(frozen=True)
class Flight:
    """A dispatch whose results are not read yet.

    Attributes:
      plan: what was dispatched. chunks, decodes: its sequences with the slots that they had.
      output: tokens and samples; counts: of speculative rounds. scores: of prompts.
      num_slots: of the program. num_rows: of tokens of a step, padding included.
      sent_at: seconds of `time.perf_counter`.
    """

    plan: DispatchPlan
    chunks: list[tuple[int, Chunk]]
    decodes: list[tuple[int, SequenceState]]
    output: StepOutput
    num_slots: int
    num_rows: int
    sent_at: float
    counts: RoundCounts | None = None
    scores: PendingScores | None = None


@dataclass(frozen=True)
class FlightResults:
    """What a dispatch computed, on the host.

    Attributes:
      tokens: by slot, one a step; INVALID_LOGITS and NO_TOKEN stand after the last one.
      samples: for log-probabilities, leaves [steps, slots, ...]; None where nobody asked for them.
      proposed, accepted: drafted and accepted tokens of each slot's rounds, -1 where it took no part.
      seconds: from when the dispatch began to when it was read. It began when it was sent, or when the one before it
        had ended.
    """

    tokens: list[list[int]]
    samples: SampleOutput | None
    proposed: np.ndarray | None
    accepted: np.ndarray | None
    seconds: float
