"""Running the phases of a model under the profiler: prefill, then decoding (or speculative rounds) of a full batch.

Each phase runs its dispatches three times: to compile, to measure their time, and with a trace.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer import compilation_cache
from jaxinfer.api.llm import LLM
from jaxinfer.engine.events import Dispatch
from jaxinfer.engine.request import RequestOptions
from jaxinfer.measure.bench.model import Bench
from jaxinfer.measure.bench.probe import DispatchProbe
from jaxinfer.measure.profiling import trace
from jaxinfer.sampling import SamplingParams

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)
MAX_TRIES = 6  # traces with a compilation are repeated: an adaptive draft length may need another program


@dataclass(frozen=True)
class Workload:
    """The requests and steps to run.

    Attributes:
      batch: concurrent requests on each replica. prompt_tokens: length of each prompt. steps: decode steps, or prefill
        dispatches, to trace. seed: of the prompts' tokens.
    """

    batch: int
    prompt_tokens: int
    steps: int
    seed: int = 0

    def answer_tokens(self, prefill_chunk: int, steps_per_dispatch: int, tokens_per_step: int) -> int:
        """The length of answers that last for all phases: other requests' prefill, and all tries."""
        num_prompts = self.batch * (-(-self.prompt_tokens // prefill_chunk) + 1)
        return (num_prompts + (MAX_TRIES + 2) * (self.steps + 2 * steps_per_dispatch)) * tokens_per_step


@dataclass(frozen=True)
class DispatchRun:
    """Consecutive dispatches, beginning and ending with an idle device, and their seconds."""

    dispatches: tuple[Dispatch, ...]
    seconds: float


@dataclass(frozen=True)
class Phase:
    """The observations of a phase: a turn without a trace, and one with the trace in `data`."""

    name: str
    plain: DispatchRun
    traced: DispatchRun
    probes: tuple[DispatchProbe, ...]
    data: Any


def run_phase(bench: Bench, name: str, workload: Workload, folder: Path, progress: Callable[[str], None]) -> Phase:
    """Runs a phase, with its trace in `folder`. Raises RuntimeError if every try compiled something, or if an answer
    ended too early."""
    run = _prefill if name == PREFILL else _decode
    with contextlib.closing(run(bench.llm, workload)) as turns:
        progress(f"{name}: compiling")
        next(turns)
        progress(f"{name}: running")
        plain = next(turns)
        for _ in range(MAX_TRIES):
            with compilation_cache.counting() as counts, contextlib.ExitStack() as watching:
                probes = tuple(watching.enter_context(DispatchProbe(engine)) for engine in bench.llm.engine.engines)
                progress(f"{name}: tracing")
                trace.start(folder)
                try:
                    traced = next(turns)
                finally:
                    data = trace.stop(folder)
            if counts.compiled + counts.hits == 0:
                return Phase(name, plain, traced, probes, data)
            plain = next(turns)
    raise RuntimeError(
        f"{name}: programs were compiled in each of {MAX_TRIES} traces; set num_draft_tokens to a number"
    )


def _prefill(llm: LLM, workload: Workload) -> Generator[DispatchRun, None, None]:
    """Each turn runs other prompts, for at most `workload.steps` dispatches."""
    for number in itertools.count():
        with _submitted(llm, workload, 1, number):
            yield _turn(llm, lambda dispatches: len(dispatches) >= workload.steps)


def _decode(llm: LLM, workload: Workload) -> Generator[DispatchRun, None, None]:
    """Each turn continues the same answers."""
    num_tokens = llm.max_model_len - workload.prompt_tokens
    num_answers = workload.batch * len(llm.engine.engines)

    def is_enough(dispatches: list[Dispatch]) -> bool:
        return sum(dispatch.num_steps for dispatch in dispatches if not dispatch.replica) >= workload.steps

    with _submitted(llm, workload, num_tokens, -1):
        while sum(sequence.is_decoding for sequence in llm.engine.snapshot().running) < num_answers:
            _step(llm)
        while True:
            turn = _turn(llm, is_enough)
            if len(llm.engine.snapshot().running) < num_answers:
                raise RuntimeError(f"an answer of {num_tokens} tokens ended before the trace did")
            yield turn


@contextlib.contextmanager
def _submitted(llm: LLM, workload: Workload, num_tokens: int, number: int) -> Iterator[None]:
    count = workload.batch * len(llm.engine.engines)
    numbers = np.random.default_rng([workload.seed, number + 1])
    rows = llm.config.vocab_size
    params = SamplingParams(temperature=0, seed=0, max_tokens=num_tokens, ignore_eos=True)
    request_options = RequestOptions(cache_salt=f"profile {number}")
    requests = [
        llm.prepare(numbers.integers(0, rows, workload.prompt_tokens).tolist(), params, request_options)
        for _ in range(count)
    ]
    answers = []
    try:
        for request in requests:
            answers += llm.submit(request)
        yield
    finally:
        llm.client.abort(answers)


def _turn(llm: LLM, is_enough: Callable[[list[Dispatch]], bool]) -> DispatchRun:
    """Steps the engine until `is_enough` dispatches were sent or there is no more work, and waits for them."""
    dispatches: list[Dispatch] = []
    with llm.engine.observe(dispatches.append):
        start = time.perf_counter()
        while llm.engine.has_work and not is_enough(dispatches):
            _step(llm)
        for dispatch in dispatches:
            dispatch.wait()
        seconds = time.perf_counter() - start
    return DispatchRun(tuple(dispatches), seconds)


def _step(llm: LLM) -> None:
    for sequence in llm.engine.step():
        if sequence.finish_reason == "error":
            raise RuntimeError(f"a request failed: {sequence.error}")
