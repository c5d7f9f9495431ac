"""Running the phases of a model under the profiler: prompts, then decoding (or speculative rounds) of a full batch.

Each phase runs its dispatches three times: once to compile, once for the time that they take, once with a trace.
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
from jaxinfer.engine.contiguous import ContiguousEngine
from jaxinfer.engine.events import Dispatch
from jaxinfer.engine.paged import PagedEngine
from jaxinfer.engine.processor import RequestOptions
from jaxinfer.engine.replicas import Replicas
from jaxinfer.llm import LLM
from jaxinfer.measure.bench.model import Bench
from jaxinfer.measure.bench.probe import DispatchProbe, engines_of
from jaxinfer.measure.profiling import trace
from jaxinfer.sampling import SamplingParams

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)
MAX_TRIES = 6  # of a trace that a compilation got into: a draft whose length adapts may need another program


@dataclass(frozen=True)
class Workload:
    """Attributes:
    batch: requests at once, on each replica. prompt_tokens: of each. steps: to trace: of decoding, or dispatches of
      prompts. seed: of the prompts' tokens.
    """

    batch: int
    prompt_tokens: int
    steps: int
    seed: int = 0

    def answer_tokens(self, prefill_chunk: int, steps_per_dispatch: int, tokens_per_step: int) -> int:
        """Of an answer that lasts as long as the phases do: the others' prompts, and all tries."""
        num_prompts = self.batch * (-(-self.prompt_tokens // prefill_chunk) + 1)
        return (num_prompts + (MAX_TRIES + 2) * (self.steps + 2 * steps_per_dispatch)) * tokens_per_step


@dataclass(frozen=True)
class Turn:
    """Dispatches that ran one after the other, from an idle device to an idle device, and the seconds they took."""

    dispatches: tuple[Dispatch, ...]
    seconds: float


@dataclass(frozen=True)
class Phase:
    """What was seen: a turn without a trace, and one with it; `data` is the trace."""

    name: str
    plain: Turn
    traced: Turn
    probes: tuple[DispatchProbe, ...]
    data: Any


def run_phase(bench: Bench, name: str, workload: Workload, folder: Path, told: Callable[[str], None]) -> Phase:
    """Runs a phase, its trace in `folder`. Raises RuntimeError where every try compiled something, or an answer ended
    before its time."""
    run = _prefill if name == PREFILL else _decode
    with contextlib.closing(run(bench.llm, workload)) as turns:
        told(f"{name}: compiling")
        next(turns)
        told(f"{name}: running")
        plain = next(turns)
        for _ in range(MAX_TRIES):
            with compilation_cache.counting() as counts, contextlib.ExitStack() as watching:
                probes = tuple(watching.enter_context(DispatchProbe(one)) for one in engines_of(bench.llm.engine))
                told(f"{name}: tracing")
                trace.start(folder)
                try:
                    traced = next(turns)
                finally:
                    data = trace.stop(folder)
            if counts.compiled + counts.hits == 0:
                return Phase(name, plain, traced, probes, data)
            plain = next(turns)
    raise RuntimeError(f"{name}: something was compiled in each of {MAX_TRIES} traces; fix num_draft_tokens")


def _prefill(llm: LLM, workload: Workload) -> Generator[Turn, None, None]:
    """Other prompts in each turn, as many dispatches of them as are asked for at most."""
    for number in itertools.count():
        with _submitted(llm, workload, 1, number):
            yield _turn(llm, lambda heard: len(heard) >= workload.steps)


def _decode(llm: LLM, workload: Workload) -> Generator[Turn, None, None]:
    """The same answers go on in each turn."""
    num_tokens = llm.max_model_len - workload.prompt_tokens
    num_answers = workload.batch * len(engines_of(llm.engine))
    with _submitted(llm, workload, num_tokens, -1):
        while sum(one.is_decoding for one in _engine(llm).snapshot().running) < num_answers:
            _step(llm)
        while True:
            turn = _turn(llm, lambda heard: sum(one.num_steps for one in heard if not one.replica) >= workload.steps)
            if len(_engine(llm).snapshot().running) < num_answers:
                raise RuntimeError(f"an answer of {num_tokens} tokens ended before the trace did")
            yield turn


@contextlib.contextmanager
def _submitted(llm: LLM, workload: Workload, num_tokens: int, number: int) -> Iterator[None]:
    count = workload.batch * len(engines_of(llm.engine))
    numbers = np.random.default_rng([workload.seed, number + 1])
    rows = llm.config.vocab_size
    params = SamplingParams(temperature=0, seed=0, max_tokens=num_tokens, ignore_eos=True)
    terms = RequestOptions(cache_salt=f"profile {number}")
    requests = [
        llm.prepare(numbers.integers(0, rows, workload.prompt_tokens).tolist(), params, terms) for _ in range(count)
    ]
    try:
        for request in requests:
            llm.submit(request)
        yield
    finally:
        for request in requests:
            for generation in request.generations:
                llm.engine.finish(generation, "abort")


def _turn(llm: LLM, is_enough: Callable[[list[Dispatch]], bool]) -> Turn:
    """Steps the engine until it has sent enough, or has no more work, and waits for what it sent."""
    heard: list[Dispatch] = []
    with _engine(llm).observe(heard.append):
        start = time.perf_counter()
        while llm.engine.has_work and not is_enough(heard):
            _step(llm)
        for dispatch in heard:
            dispatch.wait()
        seconds = time.perf_counter() - start
    return Turn(tuple(heard), seconds)


def _engine(llm: LLM) -> PagedEngine | Replicas:
    if isinstance(llm.engine, ContiguousEngine):
        raise ValueError("a profile is of cache='paged' only")
    return llm.engine


def _step(llm: LLM) -> None:
    for generation in llm.engine.step():
        if generation.finish_reason == "error":
            raise RuntimeError(f"a request failed: {generation.error}")
