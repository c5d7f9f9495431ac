"""The paged engine: no retraces or hidden transfers, what it leaves behind, pages that are shared, too few of them."""

import random
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine import programs
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.memory import OutOfMemoryError
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scheduler import RequestTooLargeError
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.engine.sequences import make_sequence
from tests.tiny import OPTIONS

COMPILED = [
    *(getattr(paged_programs, name) for name in ("step", "sample_step", "decode", "write_slot", "write_plain_slot")),
    *(getattr(paged_programs, name) for name in ("move_slots", "copy_pages")),
    *(getattr(programs, name) for name in ("score", "score_processed")),
]


@pytest.fixture(scope="module")
def engine(tiny):
    engine = Engine(*tiny, EngineOptions(**OPTIONS))
    engine.warm_up()
    yield engine
    engine.close()


make = make_sequence


def run(engine, generations, between=lambda: None):
    for one in generations:
        engine.add(one)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        between()
    assert engine.scheduler.pool.num_owned == 0
    return [one.output for one in generations]


@pytest.mark.slow
@pytest.mark.all_buckets
@pytest.mark.parametrize("is_warm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_token_of_all_does_not_wait_for_the_next_program(tiny, is_warm):
    engine = Engine(*tiny, EngineOptions(**OPTIONS))
    if is_warm:
        engine.warm_up()
    heard = []
    with engine.observe(heard.append):
        first = make(range(40), max_tokens=3)
        engine.add(first)
        while not first.output:
            engine.step()
        kinds = ["step", "step", "decode"]  # two chunks of the prompt
        assert [one.kind for one in heard] == (kinds if is_warm else kinds[:2])
        while engine.has_work:
            engine.step()
        assert [one.kind for one in heard][:3] == kinds
    engine.close()


@pytest.mark.all_buckets
@pytest.mark.parametrize("num_requests", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_retrace_and_no_hidden_transfer_in_mixed_requests(tiny, num_requests):
    with LLM(tiny, **OPTIONS) as llm:
        llm.warm_up(use_tqdm=False)
        prompts = random_prompts(num_requests, 100, seed=1)
        params = [mixed_params(number) for number in range(num_requests)]
        before = [program._cache_size() for program in COMPILED]
        with jax.no_tracing(), jax.transfer_guard("disallow"):
            for start, count in ((0, 1), (1, 3), (4, 96), (100, num_requests - 100)):
                llm.generate(prompts[start : start + count], params[start : start + count])
            # Alone, streamed, scored, several answers, with so few pages that some are preempted.
            list(llm.stream(prompts[0], params[0]))
            llm.score(prompts[:3], [[5, 6]] * 3)
            llm.generate(prompts[5], SamplingParams(n=4, seed=1, max_tokens=20))
            pool = llm.engine.scheduler.pool
            pool.allocate(pool.num_available - 14)
            llm.generate(prompts[:40], SamplingParams(temperature=1.0, seed=3, max_tokens=20))
        assert llm.engine.scheduler.counters.num_preemptions > 0
        assert llm.engine.scheduler.counters.copied_pages > 0
        assert before == [program._cache_size() for program in COMPILED]


@pytest.mark.slow
def test_a_hidden_transfer_would_be_noticed(engine):
    ids = (np.zeros(8, np.int32),), (np.full(8, 60, np.int32),)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="isallowed"):
        paged_programs.copy_pages(None, engine.runner._cache, *ids)


@pytest.mark.slow
def test_programs_take_the_cache_and_the_slots_donated(tiny):
    engine = Engine(*tiny, EngineOptions(**OPTIONS))
    for name, call in (
        ("step", engine.runner._warm_up_step),
        ("decode", lambda _, slots: engine.runner._warm_up_decode(slots)),
    ):
        pages, counts = engine.runner._cache.layers[0].k, engine.runner._slots.history.output_counts
        call(32, 1)
        assert pages.is_deleted(), name
        assert counts.is_deleted(), name
    engine.close()


@pytest.mark.slow
def test_the_logits_do_not_depend_on_what_others_left_in_the_pages(tiny):
    """B in pages full of A's keys and values, of zeros, of infinities and NaN: the same bits."""
    config, params = tiny
    found = []
    for canary in (None, 0.0, 1e30, jnp.inf, jnp.nan):
        engine = Engine(config, params, EngineOptions(**OPTIONS, deterministic=True, prefix_cache=False))
        if canary is None:
            run(engine, [make(prompt) for prompt in random_prompts(8, 100, seed=2)])
        else:
            engine.runner._cache = jax.tree.map(partial(jnp.full_like, fill_value=canary), engine.runner._cache)
        generations = [make([5] * 30, logprobs=5), make([6, 7], logprobs=5, temperature=1.0, seed=4)]
        run(engine, generations)
        found.append([(one.output, one.logprobs) for one in generations])
        engine.close()
    assert all(one == found[0] for one in found[1:])


def random_aborts(engine, num_aborts: int) -> None:
    """Aborts at random moments of prompts, decode and waiting; what is not aborted ends by itself."""
    numbers = random.Random(num_aborts)
    live: list[SequenceState] = []
    num_aborted = num_ended = num_added = 0
    while num_aborted < num_aborts:
        while len(live) < 8:
            prompt = [numbers.randrange(97) for _ in range(numbers.randint(1, 90))]
            live.append(make(prompt, numbers.randint(1, 12), temperature=1.0, seed=num_added))
            engine.add(live[-1])
            num_added += 1
        for _ in range(numbers.randint(0, 2)):
            engine.step()
        for one in numbers.sample(live, numbers.randint(0, 3)):
            if one.finish_reason is None:
                pages = set(one.pages)
                engine.finish(one, "abort")
                num_aborted += 1
                # Nobody else shares a page, so all are free at once: within no step at all.
                owned = {page for other in engine.scheduler.running for page in other.pages}
                known = {page for page in pages if engine.scheduler.pool.is_kept(page)}
                assert all(engine.scheduler.pool.num_owners(page) == 0 for page in pages - owned - known)
        num_ended += sum(one.finish_reason not in (None, "abort") for one in live)
        live = [one for one in live if one.finish_reason is None]
        engine.scheduler.check()
    num_aborted += len(live)
    for one in live:
        engine.finish(one, "abort")
    assert engine.scheduler.pool.num_owned == 0
    assert not engine.has_work
    assert num_aborted + num_ended == num_added
    assert num_ended > num_aborts // 20


@pytest.mark.slow
@pytest.mark.parametrize("num_aborts", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_aborts_at_any_moment_leave_nothing_behind(engine, num_aborts):
    before = engine.scheduler.counters.num_added, engine.scheduler.counters.num_finished
    random_aborts(engine, num_aborts)
    added, finished = engine.scheduler.counters.num_added, engine.scheduler.counters.num_finished
    assert added - before[0] == finished - before[1] > num_aborts
    alone = run(engine, [make([1, 2, 3])])
    assert run(engine, [make([1, 2, 3]), make([4] * 40)])[:1] == alone


def test_several_answers_share_the_pages_of_their_prompt(tiny):
    prompt = list(range(2, 39))  # two full pages and one in part
    with LLM(tiny, **OPTIONS) as llm:
        most = 0
        request = llm.prepare(prompt, SamplingParams(n=4, seed=2, max_tokens=6))
        answers = llm.submit(request)
        while not all(answer.is_finished for answer in answers):
            llm.step()
            for answer in answers:
                llm.advance(answer)
            most = max(most, llm.engine.scheduler.pool.num_owned)
            llm.engine.scheduler.check()
        counters = llm.engine.scheduler.counters
        assert counters.copied_pages == 3
        assert counters.computed_prompt_tokens == len(prompt) + 3
        assert most == 2 + 4
        alone = [
            llm.generate(prompt, SamplingParams(seed=one.seed, max_tokens=6))[0].outputs[0].token_ids
            for one in llm.collect(answers).outputs
        ]
        assert [one.token_ids for one in llm.collect(answers).outputs] == alone
    assert len({tuple(tokens) for tokens in alone}) > 2


def test_a_shared_beginning_is_computed_once_even_when_all_come_together(engine):
    shared = [7] * 64
    before = replace(engine.scheduler.counters)
    run(engine, [make([*shared, i, i + 1]) for i in range(10, 20)])
    counters = engine.scheduler.counters
    assert counters.computed_prompt_tokens - before.computed_prompt_tokens == 64 + 10 * 2
    assert counters.reused_tokens - before.reused_tokens == 9 * 64


def test_other_salts_share_nothing(tiny):
    with LLM(tiny, **OPTIONS) as llm:
        prompt, params = [3] * 50, SamplingParams(temperature=0, max_tokens=2)
        for salt, reused in (("a", 0), ("a", 48), ("b", 48), ("", 48), ("b", 96)):
            llm.generate(prompt, params, cache_salt=salt)
            assert llm.engine.scheduler.counters.reused_tokens == reused, salt


def test_pages_of_a_failed_row_are_not_found_again(tiny):
    config, params = tiny
    poisoned = 96
    broken = {**params, "embed": params["embed"].at[poisoned].set(jnp.nan)}
    options = SamplingParams(temperature=0, max_tokens=4, logit_bias={poisoned: -100.0})
    beginning = [5] * 32
    with LLM((config, broken), **OPTIONS) as llm:
        bad = [*beginning, poisoned, *[6] * 31]
        assert llm.generate(bad, options)[0].outputs[0].finish_reason == "error"
        # The first chunk was sound, the second was not.
        assert llm.engine.scheduler.prefixes.num_pages == 2
        again = llm.generate(bad, options)[0].outputs[0]
        assert (again.finish_reason, again.token_ids) == ("error", [])
        healthy = llm.generate([*beginning, 8], options)[0].outputs[0]
        assert len(healthy.token_ids) == 4
    with LLM((config, params), **OPTIONS) as llm:
        assert llm.generate([*beginning, 8], options)[0].outputs[0].token_ids == healthy.token_ids


def test_lower_priority_values_go_first(tiny):
    with LLM(tiny, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        priority = [11, 3, 8, 1, 5, 10, 0, 7, 2, 9, 6, 4]
        outputs = llm.generate([[number] for number in range(12)], params, priority=priority)
        waits = sorted((one.timings.queue_time, order) for one, order in zip(outputs, priority, strict=True))
        found = [order for _, order in waits]
        # There are four slots.
        assert [set(found[start : start + 4]) for start in (0, 4, 8)] == [{*range(4)}, {*range(4, 8)}, {*range(8, 12)}]
        with pytest.raises(ValueError, match="2 priorities for 1 prompts"):
            llm.generate([[1]], params, priority=[1, 2])
        with pytest.raises(TypeError, match="priority must be an integer"):
            llm.generate([[1]], params, priority=[1.5])


def test_what_takes_too_long_is_aborted(tiny):
    with LLM(tiny, **OPTIONS) as llm:
        params = [SamplingParams(temperature=0, max_tokens=100)] * 20
        llm.generate([1], params[0])
        start = time.monotonic()
        outputs = llm.generate([[i] for i in range(20)], params, timeout=0.03)
        assert time.monotonic() - start < 5
        reasons = {one.outputs[0].finish_reason for one in outputs}
        late = [one for one in outputs if one.outputs[0].finish_reason == "abort"]
        assert reasons <= {"abort", "length"}
        assert late
        assert "deadline" in late[0].outputs[0].error
        assert llm.engine.scheduler.pool.num_owned == 0
        with pytest.raises(ValueError, match="timeout must be positive"):
            llm.generate([1], params[0], timeout=0)


def test_a_request_that_can_never_fit_is_refused_at_once(tiny):
    with LLM(tiny, **{**OPTIONS, "num_pages": 6}) as llm:
        with pytest.raises(
            RequestTooLargeError, match=r"prompt 1: 70 prompt tokens and max_tokens=20 need 6 pages .* has 5"
        ):
            llm.generate([[1], [2] * 70], SamplingParams(max_tokens=20))
        assert not llm.engine.has_work


@pytest.mark.slow
def test_what_just_fits_is_answered(tiny):
    with LLM(tiny, **{**OPTIONS, "num_pages": 6}) as llm:
        for num_prompt in (60, 61):  # capacity - 1 and capacity
            answer = llm.generate([2] * num_prompt, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
            assert len(answer.token_ids) == 20


def room_for(tiny, options: EngineOptions, num_pages: int) -> int:
    """Available bytes that hold so many pages beside everything else."""
    engine = Engine(*tiny, options, available=10**9)
    memory = engine.runner.memory
    engine.close()
    total = memory.weights + memory.sampler + memory.activations + num_pages * memory.page_bytes
    return round(total / options.memory_fraction) + 100 - memory.weights


@pytest.mark.parametrize(
    ("options", "num_pages", "helps"),
    [
        ({"max_seqs": 2}, 8, "Try max_model_len=112."),
        ({"max_seqs": 200}, 0, "Try a smaller max_seqs."),
        ({"max_seqs": 1}, 0, "Try a smaller dtype or a quantized checkpoint."),
        ({"max_seqs": 2, "num_pages": 500}, 20, "Try num_pages=20."),
    ],
)
def test_what_does_not_fit_says_how_much_is_missing_and_what_helps(tiny, options, num_pages, helps):
    options = EngineOptions(max_model_len=128, grammar_memory=0, **options)
    available = room_for(tiny, replace(options, num_pages=None), num_pages)
    with pytest.raises(OutOfMemoryError) as caught:
        Engine(*tiny, options, available=available)
    message = str(caught.value)
    assert message.endswith(helps)
    for part in ("weights", "sampler", "activations", "cache", "needed in all", "available"):
        assert part in message


@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fewer_pages_where_memory_is_short(tiny, runs):
    options = EngineOptions(max_model_len=128, max_seqs=8)
    engine = Engine(*tiny, options, available=room_for(tiny, options, 12))
    assert engine.runner.memory.is_reduced
    assert engine.runner.memory.num_pages == 12
    if runs:
        run(engine, [make([3] * 100, 20) for _ in range(8)])
    engine.close()


def test_a_little_less_memory_gives_the_same_number_of_pages(tiny):
    """Programs are compiled for a number of pages."""
    options = EngineOptions(max_model_len=128, max_seqs=8)  # 65 pages for all slots
    found = {}
    for room in (64, 49, 48, 47, 33, 17, 15, 10):
        engine = Engine(*tiny, options, available=room_for(tiny, options, room))
        found[room] = engine.runner.memory.num_pages
        engine.close()
    assert found == {64: 48, 49: 48, 48: 48, 47: 32, 33: 32, 17: 16, 15: 12, 10: 9}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_seqs", 0),
        ("page_size", 1.5),
        ("num_pages", 1),
        ("prefill_chunk", 0),
        ("memory_fraction", 0),
        ("memory_fraction", 1.1),
        ("deterministic", 1),
        ("max_waiting", -1),
        ("steps_per_dispatch", True),
    ],
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        EngineOptions(**{"max_model_len": 64, "max_seqs": 2, name: value})


def test_warm_up_refuses_while_requests_run(engine):
    engine.add(make([1, 2]))
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        engine.warm_up()
    run(engine, [])
