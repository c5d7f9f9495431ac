"""A trace of requests: their lengths, and the steps that the engine's scheduler makes of them. Nothing is computed."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxinfer.engine.cache_groups import MAX_IN_FLIGHT
from jaxinfer.engine.plans import DispatchPlan
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.engine.scheduler import Scheduler, SchedulerOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.files import json_lines
from jaxinfer.sampling import SamplingParams

# Names of the answer's tokens: jaxinfer's datasets, and the usage of OpenAI's and others' answers.
ANSWER_NAMES = ("output_tokens", "completion_tokens")


@dataclass(frozen=True)
class TraceRequest:
    """Tokens of a prompt and of its answer."""

    num_prompt: int
    num_answer: int


def read_trace(file: Path, longest: int) -> tuple[TraceRequest, ...]:
    """Reads JSON lines with "prompt_tokens" and "output_tokens" or "completion_tokens": at the top, under "usage", or
    as lines of a batch's results have them. Results that are errors are left out.

    Raises ValueError, with file and line, for other content and for requests of more than `longest` tokens;
    FileNotFoundError.
    """
    requests = []
    for where, row in json_lines(file):
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object")
        if row.get("error") is not None and not isinstance(row.get("usage"), dict):
            continue
        for name in ("response", "body", "usage"):
            row = row[name] if isinstance(row.get(name), dict) else row
        prompt, answer = _count(row, ("prompt_tokens",), 1, where), _count(row, ANSWER_NAMES, 0, where)
        if prompt + answer > longest:
            raise ValueError(f"{where}: {prompt} + {answer} tokens are more than the {longest} of a sequence")
        requests.append(TraceRequest(prompt, answer))
    if not requests:
        raise ValueError(f"{file.name} has no requests")
    return tuple(requests)


def _count(body: Mapping[str, Any], names: Sequence[str], least: int, where: str) -> int:
    value = next((body[name] for name in names if name in body), None)
    if type(value) is not int or value < least:
        wanted = " or ".join(f'"{name}"' for name in names)
        raise ValueError(f"{where}: {wanted} must be an integer of at least {least}, got {value!r}")
    return value


@dataclass(frozen=True)
class StepSizes:
    """How many steps had so many tokens, with prompts, and so many answers, without."""

    steps: Counter[int]
    decodes: Counter[int]


def all_at_once(spec: EngineSpec, requests: Sequence[TraceRequest]) -> StepSizes:
    """The steps if all requests arrive at once, as those of a batch: those of the engine's own scheduler."""
    return _run(spec, requests, len(requests))


def one_at_a_time(spec: EngineSpec, requests: Sequence[TraceRequest]) -> StepSizes:
    """The steps if each request arrives when the one before has ended."""
    # Its decode steps have one answer each, and need no scheduler.
    sizes = _run(spec, [replace(request, num_answer=1) for request in requests], 1)
    return StepSizes(sizes.steps, Counter({1: sum(max(request.num_answer - 1, 0) for request in requests)}))


def _run(spec: EngineSpec, requests: Sequence[TraceRequest], num_present: int) -> StepSizes:
    """Runs the scheduler over sequences that end at their lengths, `num_present` of them in the engine at a time."""
    scheduler = Scheduler(replace(SchedulerOptions.of(spec), max_waiting=None), spec.decode_slots)
    sizes, in_flight = StepSizes(Counter(), Counter()), deque[DispatchPlan]()
    waiting = deque(enumerate(requests))
    while waiting or scheduler.has_work:
        while waiting and len(scheduler.waiting) + len(scheduler.running) < num_present:
            scheduler.add(_sequence(*waiting.popleft()))
        plan = scheduler.schedule(can_preempt=not in_flight)
        is_sent = plan is not None and not plan.is_empty
        if plan is not None and is_sent:
            in_flight.append(plan)
            _count_rows(plan, sizes)
        if in_flight and (not is_sent or len(in_flight) >= MAX_IN_FLIGHT):
            _commit(scheduler, in_flight.popleft())
    return sizes


def _sequence(number: int, request: TraceRequest) -> SequenceState:
    """A prompt that begins unlike all others, so that nothing is reused."""
    length = max(request.num_answer, 1)  # an empty answer takes a step of its prompt, too
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    return SequenceState(Request([number] * request.num_prompt, params, length))


def _count_rows(plan: DispatchPlan, sizes: StepSizes) -> None:
    if any(chunk.end_moves for chunk in plan.chunks):
        return  # a pass of its own, with a program of its own
    if plan.chunks:
        sizes.steps[len(plan.decodes) + sum(chunk.length for chunk in plan.chunks)] += 1
    else:
        sizes.decodes[len(plan.decodes)] += plan.num_steps


def _commit(scheduler: Scheduler, plan: DispatchPlan) -> None:
    done = [(chunk.sequence, 1) for chunk in plan.chunks if chunk.is_last]
    for chunk in plan.chunks:
        scheduler.confirm(chunk.sequence, chunk.start + chunk.length)
    for sequence, count in [*done, *((sequence, plan.num_steps) for sequence in plan.decodes)]:
        for _ in range(count):
            if sequence.is_finished:
                break
            scheduler.append(sequence, 0)
            if sequence.num_output >= sequence.request.max_tokens:
                scheduler.finish(sequence, "length")
