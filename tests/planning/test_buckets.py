"""Sizes of programs that are chosen from a trace of lengths."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params, init_params
from jaxinfer.planning import make_plan
from jaxinfer.planning.buckets import MAX_PADDING, best_buckets, choose_buckets, num_programs, padding
from jaxinfer.planning.trace import TraceRequest, all_at_once, one_at_a_time, read_trace
from jaxinfer.speculative import NO_DRAFT, NgramDraft
from tests.planning.plan_models import TINY as BIG
from tests.tiny import OPTIONS, TINY

pytestmark = pytest.mark.all_buckets


def computed(sizes, counts) -> float:
    return sum(count * min(size for size in sizes if size >= rows) for rows, count in counts.items())


@settings(max_examples=40, deadline=None)
@given(
    counts=st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=7),
    most=st.integers(1, 5),
    more=st.integers(0, 20),
    unit=st.sampled_from([1, 4]),
)
def test_no_other_sizes_compute_fewer_rows(counts, most, more, unit):
    last = -(-(max(counts) + more) // unit) * unit
    choices = sorted({-(-rows // unit) * unit for rows in counts} - {last})
    found = best_buckets(counts, most, last, unit)
    assert [len(sizes) for sizes in found] == list(range(1, min(most, len(choices) + 1) + 1))
    for sizes in found:
        assert (sizes[-1], sorted(set(sizes))) == (last, list(sizes))
        every = (computed((*some, last), counts) for some in itertools.combinations(choices, len(sizes) - 1))
        assert computed(sizes, counts) == min(every)


def test_the_share_of_padding():
    assert padding((4, 16), {3: 2, 10: 1}) == pytest.approx(1 - 16 / 24)
    assert padding((4,), {}) == 0.0


# Lengths as of chats, of long documents with short answers, and of prompts of any length.
TRACES = {
    "chats": lambda draw: TraceRequest(min(int(draw.lognormvariate(5.5, 1)) + 4, 3000), draw.randrange(1, 400)),
    "documents": lambda draw: TraceRequest(draw.randrange(1500, 3500), draw.randrange(1, 60)),
    "any": lambda draw: TraceRequest(draw.randrange(50, 3500), draw.randrange(1, 500)),
}


def trace_of(name: str, count: int) -> list[TraceRequest]:
    draw = random.Random(name)
    return [TRACES[name](draw) for _ in range(count)]


def spec_of(draft=NO_DRAFT, **options) -> EngineSpec:
    request = {"max_model_len": 4096, "max_seqs": 64, **options}
    config = replace(BIG, max_position_embeddings=4096)
    return EngineSpec(config, abstract_params(config, "bfloat16"), EngineOptions(**request), "tpu", draft=draft)


@pytest.mark.parametrize(
    ("name", "count"), [("chats", 150), *(pytest.param(one, 2000, marks=pytest.mark.slow) for one in TRACES)]
)
def test_at_most_a_tenth_is_padding(name, count):
    choice = choose_buckets(spec_of(), trace_of(name, count))
    assert choice.holds
    assert choice.chosen.padding <= MAX_PADDING < choice.default.padding
    assert choice.chosen.num_programs <= choice.max_programs == 16


@pytest.mark.parametrize("draft", [NO_DRAFT, NgramDraft()])
def test_programs_are_bounded(draft):
    spec = spec_of(draft)
    trace = trace_of("any", 60)
    least = num_programs(spec, 1, 1)
    few = choose_buckets(spec, trace, least)
    assert (few.chosen.token_buckets, few.chosen.decode_slots) == ((576,), (64,))
    # Three lengths, and rounds in which slots share rows, which the fewest slots do not have.
    assert few.default.num_programs == (5 + 1) + 6 + (0 if draft is NO_DRAFT else 6 * 3 + 5)
    assert not few.holds
    assert "more than 10% padding: the least that" in str(few)
    more = choose_buckets(spec, trace, least + 5)
    assert more.chosen.num_programs <= least + 5
    assert more.chosen.padding < few.chosen.padding
    with pytest.raises(ValueError, match=f"{least - 1} programs are too few: this engine needs {least}"):
        choose_buckets(spec, trace, least - 1)


@pytest.mark.parametrize(("place", "chunk"), [("h100x1", 2048), ("l4x1", 512), ("v6e:1x1", 512)])
def test_chunks_of_prompts_are_larger_on_hopper(ask, place, chunk):
    spec = ask(TINY, place, max_model_len=4096, max_seqs=64, deterministic=False).spec()
    assert (spec.prefill_chunk, spec.token_buckets[-1]) == (chunk, chunk + 64)
    given = ask(TINY, place, max_model_len=4096, prefill_chunk=256, deterministic=False).spec()
    assert given.prefill_chunk == 256


def test_a_plan_prints_what_an_engine_takes(ask):
    request = replace(ask(BIG, "v5e:1x1"), trace=tuple(TraceRequest(40 * i + 9, 7) for i in range(1, 20)))
    plan = make_plan(request, compiles=False)
    assert plan.buckets is not None
    flags = plan.buckets.chosen.flags
    assert flags in plan.to_text()
    found = plan.to_dict()["buckets"]
    assert (found["holds"], found["chosen"]["flags"]) == (True, flags)
    json.dumps(found)
    names = ("token_buckets", "decode_slots")
    spec = request.with_options(**{name: found["chosen"][name] for name in names}).spec()
    assert (spec.token_buckets, spec.decode_slots) == (plan.buckets.chosen.token_buckets, spec.decode_slots)
    assert "buckets" not in make_plan(replace(request, trace=()), compiles=False).to_dict()


@pytest.mark.parametrize("slow_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_runs_the_steps_that_were_foreseen(slow_too):
    """Those of its own scheduler, in programs of the sizes that were chosen, with the answers of the default ones."""
    draw = random.Random(1)
    requests = [TraceRequest(draw.randrange(1, 70), draw.randrange(1, 30)) for _ in range(14)]
    options: dict[str, Any] = {**OPTIONS, "prefix_cache": False}
    params = init_params(TINY, jax.random.key(0))
    chosen = choose_buckets(EngineSpec.of(TINY, params, EngineOptions(**options), None, None), requests, 4).chosen
    sizes: dict[str, Any] = {"token_buckets": chosen.token_buckets, "decode_slots": chosen.decode_slots}
    answers = []
    for own in (sizes, {}) if slow_too else (sizes,):
        with LLM((TINY, params), **options, **own) as llm:
            spec, heard = llm.engine.spec, []
            if own:
                programs = [name for name in llm.engine.program_names if not name.startswith(("sampling", "scores"))]
                assert len(programs) == chosen.num_programs
            with llm.engine.observe(heard.append):
                sampling = [SamplingParams(max_tokens=one.num_answer, ignore_eos=True) for one in requests]
                prompts = [[5 + number] * one.num_prompt for number, one in enumerate(requests)]
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answers.append([one.outputs[0].token_ids for one in outputs])
        steps, decodes = Counter(), Counter()
        for one in heard:
            rows = sum(work.num_prompt_tokens or 1 for work in one.work)
            if one.kind == "step":
                steps[rows] += 1
                assert one.num_rows == min(size for size in spec.token_buckets if size >= rows)
            else:
                decodes[rows] += one.num_steps
                assert one.num_rows in spec.decode_slots
        foreseen = all_at_once(spec, requests)
        assert (steps, decodes) == (foreseen.steps, foreseen.decodes)
    assert answers[0] == answers[-1]


def test_one_request_at_a_time():
    found = one_at_a_time(spec_of(), [TraceRequest(600, 4), TraceRequest(5, 1)])
    assert found.steps == {512: 1, 88: 1, 5: 1}
    assert found.decodes == {1: 3}


LINES = (
    {"prompt_tokens": 12, "output_tokens": 3},
    {"prompt": "x", "usage": {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}},
    {
        "custom_id": "a",
        "response": {"status_code": 200, "body": {"usage": {"prompt_tokens": 7, "completion_tokens": 9}}},
    },
    {"custom_id": "b", "response": None, "error": {"code": "invalid_request_error", "message": "no"}},
)


def test_traces_and_results_of_batches_are_read(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n\n".join(map(json.dumps, LINES)))
    assert read_trace(file, 16) == (TraceRequest(12, 3), TraceRequest(5, 0), TraceRequest(7, 9))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object"),
        ('{"prompt_tokens": 3}', 'line 2: "output_tokens" or "completion_tokens" must be an integer of at least 0'),
        ('{"prompt_tokens": 0, "output_tokens": 3}', 'line 2: "prompt_tokens" must be an integer of at least 1, got 0'),
        ('{"prompt_tokens": true, "output_tokens": 3}', "got True"),
        ('{"prompt_tokens": 9, "output_tokens": "3"}', "got '3'"),
        ('{"prompt_tokens": 90, "output_tokens": 11}', "line 2: 90 \\+ 11 tokens are more than the 100"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_trace(file, 100)


def test_an_empty_trace_is_refused(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(LINES[3]))
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(file, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_buckets": (64, 32)}, "token_buckets must be positive multiples of 16 that increase"),
        ({"token_buckets": (40, 576)}, "multiples of 16"),
        ({"token_buckets": ()}, "must be numbers"),
        ({"decode_slots": (1, "64")}, "must be numbers"),
        ({"decode_slots": 64}, "must be numbers"),
        ({"decode_slots": (0, 64)}, "decode_slots must be positive numbers that increase"),
        ({"token_buckets": (576,), "deterministic": True}, "cannot be combined with deterministic=True"),
        ({"token_buckets": (64, 512)}, "must end with 576, for prefill_chunk=512 and max_seqs=64"),
        ({"decode_slots": (1, 32)}, "must end with 64, for max_seqs=64"),
    ],
)
def test_sizes_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**options)


def test_a_deterministic_engine_has_nothing_to_choose():
    with pytest.raises(ValueError, match="which has one shape"):
        choose_buckets(spec_of(deterministic=True), trace_of("any", 3))
