"""Prefix pages in host memory: one answer with and without them, in every combination; accounting and refusals.

Random operations of the scheduler with host pages are in test_scheduler.py.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import state_bytes
from jaxinfer.engine.memory import activation_bytes
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.tiers import host_pages as host_tier_pages
from jaxinfer.engine.tiers import link_rates
from jaxinfer.engine.tiers.host_pages import host_pools
from jaxinfer.engine.tiers.host_tier import HostPool, HostPoolSize, HostTier, PageMove, transit_bytes
from jaxinfer.engine.tiers.link_rates import TransferRule, met_parameters
from jaxinfer.models import abstract_params, init_params
from jaxinfer.quantization.tree import num_parameters
from jaxinfer.speculative import ModelDraft
from tests.engine.test_saved_states import MIXED
from tests.engine.test_states import random_params
from tests.engine.test_windows import WINDOWS, model_of
from tests.pallas_kernels.quick import quick
from tests.tiny import TINY

GIB = 1 / 1024  # of a tiny model: more than all prompts take
OPTIONS = {"max_seqs": 4, "max_model_len": 128, "prefill_chunk": 32, "num_pages": 26, "page_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 60, count).tolist()


# Each prompt fills most of the pool, so that the one before it has to leave.
BEGINNINGS = [random_tokens(70, seed) for seed in range(3)]
PROMPTS = [[*beginning, *random_tokens(5, 10 + turn)] for turn in range(3) for beginning in BEGINNINGS]
COMBINATIONS = {
    "plain": {},
    "int8": {"kv_dtype": "int8"},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "deterministic": {"deterministic": True},
    "n-grams": {"draft": "ngram", "num_draft_tokens": 3},
    "one step": {"steps_per_dispatch": 1, "prefill_chunk": 7},
    "mesh": {"mesh": "model=2"},
}


def answers(llm: LLM, prompts=PROMPTS, params=GREEDY, together: int = 1) -> list:
    """The answers, so many prompts at once, and a check of all accounts after each."""
    found = []
    for start in range(0, len(prompts), together):
        outputs = llm.generate(prompts[start : start + together], params, use_tqdm=False)
        found += [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]
        llm.engine.scheduler.check()
    return found


def moved(llm: LLM) -> tuple[int, int, int]:
    """Bytes out, bytes in, tokens that came back."""
    found = llm.engine.scheduler.counters
    return found.host_bytes_out, found.host_bytes_in, found.host_hit_tokens


def compare(model, prompts=PROMPTS, params=GREEDY, together: int = 1, **options) -> None:
    """The same answers with host memory as without, and pages have come back."""
    with LLM(model, **{**OPTIONS, **options}) as llm:
        expected = answers(llm, prompts, params, together)
        assert moved(llm) == (0, 0, 0)
        reused = llm.engine.scheduler.counters.reused_tokens
    with LLM(model, **{**OPTIONS, **options}, host_cache_gib=GIB) as llm:
        assert answers(llm, prompts, params, together) == expected
        assert llm.engine.scheduler.counters.reused_tokens > reused
        assert min(moved(llm)) > 0


@pytest.mark.parametrize("name", quick(COMBINATIONS, "plain", "int8"))
def test_one_answer(tiny, name):
    compare(tiny, **COMBINATIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("together", quick([2, 4], 4))
def test_one_answer_in_a_batch_that_is_preempted(tiny, together):
    """Beside others, with sampling and several answers to each prompt, in a pool for one and a half."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2, logprobs=2, ignore_eos=True)
    with LLM(tiny, **{**OPTIONS, "num_pages": 60}, prefix_cache=False) as llm:
        expected = [[tokens for tokens, _ in one] for one in answers(llm, params=params, together=together)]
    with LLM(tiny, **{**OPTIONS, "num_pages": 32}, host_cache_gib=GIB) as llm:
        llm.engine.scheduler._num_spare = lambda: [0]  # admits too many
        for _ in range(2):
            found = answers(llm, params=params, together=together)
            assert [[tokens for tokens, _ in one] for one in found] == expected
        assert min(moved(llm)) > 0
        assert llm.engine.scheduler.counters.num_preemptions > 0


@pytest.mark.slow
def test_each_replica_has_host_memory_of_its_own(tiny):
    with LLM(tiny, **OPTIONS) as llm:
        expected = [[tokens for tokens, _ in one] for one in answers(llm)]
    with LLM(tiny, **OPTIONS, mesh="data=2", host_cache_gib=GIB) as llm:
        for _ in range(2):
            found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [[one.token_ids for one in output.outputs] for output in found] == expected
        for engine in llm.engine.engines:
            engine.scheduler.check()
            assert engine.scheduler.tier.num_bytes > 0.9 * GIB * 2**30
            assert engine.scheduler.counters.host_bytes_out > 0


@pytest.mark.slow
def test_a_preempted_answer_computes_less_than_a_page_again(tiny):
    """What it had moves to the host when others take its pages, and comes back with it."""
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = [random_tokens(30, seed) for seed in range(4)]
    computed = []
    for gib in (None, GIB):
        with LLM(tiny, **{**OPTIONS, "num_pages": 50}, host_cache_gib=gib) as llm:
            scheduler = llm.engine.scheduler
            scheduler._num_spare = lambda: [0]  # admits too many
            answers(llm, prompts, params, together=4)
            assert scheduler.counters.num_preemptions > 0
            computed.append(scheduler.counters.computed_prompt_tokens - 4 * 30)
            again = OPTIONS["page_size"] * scheduler.counters.num_preemptions
    assert computed[1] <= again < computed[0]


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", quick(["exact", "maximal"], "exact"))
def test_the_cache_of_a_draft_model_moves_too(tiny, acceptance):
    """The model drafts for itself, so everything is accepted, unless its keys are not where they should be."""
    options = {**OPTIONS, "draft": tiny, "num_draft_tokens": 3, "acceptance": acceptance}
    params = replace(GREEDY, max_tokens=9)
    with LLM(tiny, **{**OPTIONS, "num_pages": 60}) as llm:
        expected = [[tokens for tokens, _ in one] for one in answers(llm, params=params)]
    with LLM(tiny, **options, host_cache_gib=GIB) as llm:
        assert [[tokens for tokens, _ in one] for one in answers(llm, params=params)] == expected
        assert min(moved(llm)) > 0
        stats = llm.speculation_stats()
        assert stats.accepted == stats.proposed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(WINDOWS, "two windows and full"))
def test_one_answer_with_windows(name):
    model = model_of(WINDOWS[name])
    with LLM(model, **{**OPTIONS, "num_pages": 80}, prefix_cache=False) as llm:
        expected = answers(llm)
    with LLM(model, **{**OPTIONS, "num_pages": 26}, host_cache_gib=GIB) as llm:
        assert answers(llm) == expected
        assert min(moved(llm)[:2]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_saved_states", quick([1, 2], 2))
def test_saved_states_move_too(num_saved_states):
    config = replace(MIXED, max_position_embeddings=1024)
    model = config, random_params(config)
    beginnings = [random_tokens(150, seed) for seed in range(3)]
    prompts = [[*beginning, *random_tokens(5, 10 + turn)] for turn in range(3) for beginning in beginnings]
    options = {"max_model_len": 256, "page_size": 8, "max_seqs": 2, "num_pages": 34, "prefill_chunk": 64}
    options["num_saved_states"] = num_saved_states
    with LLM(model, **options, prefix_cache=True) as llm:
        expected = answers(llm, prompts)
    with LLM(model, **options, host_cache_gib=16 * GIB) as llm:
        assert answers(llm, prompts) == expected
        assert answers(llm, prompts, together=3) == expected
        assert min(moved(llm)) > 0
        assert llm.engine.scheduler.tier.pools[1].num_used > 0


@pytest.mark.slow
def test_a_preempted_answer_goes_on_from_its_last_saved_state():
    """Of a model with states: what comes after the last border of its prompt is computed again, and not the prompt."""
    config = replace(MIXED, max_position_embeddings=1024)
    prompts = [random_tokens(150, seed) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {"max_model_len": 256, "page_size": 8, "max_seqs": 4, "num_pages": 64, "prefill_chunk": 64}
    computed, found = [], []
    for gib in (None, 16 * GIB):
        with LLM((config, random_params(config)), **options, num_saved_states=2, host_cache_gib=gib) as llm:
            scheduler = llm.engine.scheduler
            scheduler._num_spare = lambda: [0]  # admits too many
            found.append(answers(llm, prompts, params, together=4))
            assert scheduler.counters.num_preemptions > 0
            computed.append(scheduler.counters.computed_prompt_tokens - 4 * 150)
            border = 150 // llm.engine.spec.save_interval * llm.engine.spec.save_interval
            again = (150 - border + 40) * scheduler.counters.num_preemptions
    assert found[0] == found[1]
    assert computed[1] <= again < computed[0]


@pytest.mark.slow
def test_bits_come_back_as_they_left(tiny):
    """Bit for bit, in the order in which pages were asked for, whatever their number."""
    with LLM(tiny, **OPTIONS, host_cache_gib=GIB) as llm:
        answers(llm, PROMPTS[:1])
        runner = llm.engine.runner
        before = [np.array(leaf) for leaf in jax.tree.leaves(runner._cache.layers)]
        for count in (1, 2, 9, 25):
            moves = [PageMove(0, page, 3 + 2 * page) for page in range(1, count + 1)]
            runner.caches = runner.host_pages.move(runner.caches, moves, [])
            swapped = [PageMove(0, count + 1 - page, 3 + 2 * page) for page in range(1, count + 1)]
            for _ in range(2):  # the second time as it was
                runner.caches = runner.host_pages.move(runner.caches, [], swapped)
                swapped = moves
            after = [np.array(leaf) for leaf in jax.tree.leaves(runner._cache.layers)]
            assert all((one == other).all() for one, other in zip(before, after, strict=True))
            assert any((one[1] != one[2]).any() for one in before)


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(tiny):
    with LLM(tiny, **OPTIONS, host_cache_gib=GIB) as llm:
        llm.warm_up()
        with jax.no_tracing(), jax.transfer_guard("disallow"):
            answers(llm)
        assert min(moved(llm)) > 0


def test_moves_are_counted_in_the_memory(tiny):
    """Four batches of at most 64 MiB."""
    found = []
    for gib in (None, GIB):
        spec = EngineSpec(TINY, abstract_params(TINY), EngineOptions(host_cache_gib=gib), "cpu")
        found.append(activation_bytes(spec))
    assert found[1] - found[0] == 4 * 128 * spec.page_bytes
    assert transit_bytes(2**20) == 4 * 64 * 2**20


# The rule, sizes, refusals.


def test_explain_prints_the_rule_and_the_bytes(tiny):
    with LLM(tiny, **OPTIONS, host_cache_gib=GIB) as llm:
        answers(llm)
        cache = llm.explain().to_dict()["cache"]
        (size,) = llm.engine.runner.host_pages.sizes
        assert cache["host cache bytes"] == size.num_pages * size.page_bytes <= GIB * 2**30
        assert 0 < cache["host cache bytes in use"] <= cache["host cache bytes"]
        assert "a token is read in" in cache["host cache"]
        assert size.page_bytes == llm.engine.spec.page_bytes
    with LLM(tiny, **OPTIONS) as llm:
        assert not any(name.startswith("host cache") for name in llm.explain().to_dict()["cache"])


def test_the_rule():
    rule = TransferRule(token_bytes=128 * 1024, link_rate=25e9, token_flops=16e9, flop_rate=400e12)
    assert rule.pays
    assert (round(1e6 * rule.read_seconds, 2), round(1e6 * rule.compute_seconds)) == (5.24, 40)
    assert str(rule).startswith("pays: a token is read in 5.24 us")
    assert not replace(rule, token_flops=1e9).pays
    assert str(replace(rule, token_flops=1e9)).startswith("does not pay")


FAST_LINK, SLOW_LINK = (1e15, 1e6), (1e3, 1e15)  # bytes and FLOP a second


@pytest.mark.matrix
@pytest.mark.parametrize("rates", [FAST_LINK, SLOW_LINK], ids=["link", "compute"])
def test_auto_uses_host_memory_where_it_pays(tiny, monkeypatch, rates):
    """Pages neither leave nor come back where computing is faster, and the memory of moves is not set aside."""
    monkeypatch.setattr(link_rates, "measured_rates", lambda device, dtype: rates)
    with LLM(tiny, **OPTIONS) as llm:
        expected = answers(llm)
        without = llm.engine.runner.memory.activations
    with LLM(tiny, **OPTIONS, host_cache_gib="auto") as llm:
        assert answers(llm) == expected
        facts, engine = llm.explain().to_dict()["cache"], llm.engine
        if rates is FAST_LINK:
            assert min(moved(llm)) > 0
            assert facts["host cache"].startswith("pays: a token is read in")
            assert engine.runner.memory.activations > without
        else:
            assert moved(llm) == (0, 0, 0)
            assert not engine.scheduler.tier
            assert facts["host cache"].startswith("none, by host_cache_gib='auto': does not pay")
            assert engine.runner.memory.activations == without


def test_a_number_is_used_in_any_case(tiny, monkeypatch):
    monkeypatch.setattr(link_rates, "measured_rates", lambda device, dtype: SLOW_LINK)
    with LLM(tiny, **OPTIONS, host_cache_gib=GIB) as llm:
        answers(llm)
        assert min(moved(llm)) > 0
        fact = llm.explain().to_dict()["cache"]["host cache"]
    assert fact.startswith("does not pay")
    assert fact.endswith("(host_cache_gib is a number: used in any case)")


def test_a_saved_state_counts_in_the_rule(monkeypatch):
    """With the share that one has of a token, where prompts go on from saved states only."""
    monkeypatch.setattr(link_rates, "measured_rates", lambda device, dtype: FAST_LINK)
    found = []
    for count in (0, 2):
        options = EngineOptions(num_saved_states=count, max_model_len=256)
        spec = EngineSpec(MIXED, abstract_params(MIXED), options, "cpu")
        found.append(link_rates.transfer_rule(spec, jax.devices()[0]).token_bytes)
    assert found[1] - found[0] == state_bytes(MIXED, spec.dtype) / spec.save_interval > 0


@pytest.mark.parametrize(("free", "num_devices"), [(2**24, 1), (2**24, 4), (2**50, 1)])
def test_the_size_of_auto(monkeypatch, free, num_devices):
    """Half of the host's free memory, shared by the replicas that its devices have room for; or 16 times the cache."""
    monkeypatch.setattr(host_tier_pages, "system_memory", lambda: free)
    monkeypatch.setattr(jax, "local_device_count", lambda *args: num_devices)
    spec = EngineSpec(TINY, abstract_params(TINY), EngineOptions(host_cache_gib="auto", max_model_len=64), "cpu")
    (pool,) = host_pools(spec)
    wanted = min(free // 2 // num_devices, 16 * spec.num_pages * pool.page_bytes)
    assert wanted - pool.page_bytes < pool.num_pages * pool.page_bytes <= wanted


def test_parameters_that_a_token_meets():
    spec = EngineSpec(TINY, abstract_params(TINY), EngineOptions(), "cpu")
    embeddings = 2 * TINY.vocab_size * TINY.hidden_size
    norms = (2 * TINY.num_layers + 1) * TINY.hidden_size
    assert met_parameters(spec) == num_parameters(spec.params) - embeddings - norms


def test_host_pages_are_shared_out_as_device_pages_are():
    config = model_of(WINDOWS["two windows and full"])[0]
    options = EngineOptions(max_seqs=4, max_model_len=128, page_size=4, host_cache_gib=1 / 64)
    spec = EngineSpec(config, abstract_params(config), options, "cpu")
    pools = host_pools(spec)
    ratios = [pool.num_pages / group.num_pages for pool, group in zip(pools, spec.groups, strict=True)]
    assert max(ratios) < 1.1 * min(ratios)
    assert 0.9 * 2**24 < sum(pool.num_pages * pool.page_bytes for pool in pools) <= 2**24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache_gib": 0}, "host_cache_gib must be a positive number of GiB or 'auto', got 0"),
        ({"host_cache_gib": "much"}, "host_cache_gib must be .* got 'much'"),
        ({"host_cache_gib": "auto", "prefix_store": "x"}, "prefix_store='x' is read into host memory.*'auto'"),
        ({"host_cache_gib": True}, "got True"),
        ({"host_cache_gib": float("nan")}, "got nan"),
        ({"host_cache_gib": 1, "prefix_cache": False}, "host_cache_gib=1 .* prefix_cache=False"),
        ({"host_cache_gib": 1, "cache": "contiguous"}, "host_cache_gib=1 .* cache='contiguous'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("gib", "message"),
    [(1e-9, "host_cache_gib=1e-09 has no room for a page"), (1e9, "host_cache_gib=1000000000.0: the")],
)
def test_too_little_and_too_much_memory_is_refused(gib, message):
    spec = EngineSpec(TINY, abstract_params(TINY), EngineOptions(host_cache_gib=gib), "cpu")
    with pytest.raises(ValueError, match=message):
        host_pools(spec)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    spec = EngineSpec(TINY, abstract_params(TINY), EngineOptions(host_cache_gib=1.0), "cpu")
    with pytest.raises(ValueError, match=r"host_cache_gib=1\.0 needs a single process, not 2"):
        host_pools(spec)


def test_a_model_that_reuses_nothing_is_refused():
    spec = EngineSpec(MIXED, abstract_params(MIXED), EngineOptions(host_cache_gib=1.0, num_saved_states=0), "cpu")
    with pytest.raises(ValueError, match="reuses no prefixes"):
        host_pools(spec)


# The pool of host pages.


def test_the_host_page_that_is_unused_for_longest_goes_first():
    pool, gone = HostPool(3), []

    def allocate(name: str) -> int:
        return pool.allocate(lambda: (gone.append(name), pool.drop(pages[name])))

    pages = {}
    for name in "abc":
        pages[name] = allocate(name)
    pool.touch(pages["a"])
    pool.pin(pages["b"], 1)
    pages["d"] = allocate("d")
    assert gone == ["c"]
    pool.pin(pages["a"], 1)
    pool.pin(pages["d"], 1)
    assert allocate("e") == 0
    with pytest.raises(RuntimeError, match="dropped before it was read"):
        pool.drop(pages["a"])
    pool.pin(pages["b"], -1)
    assert allocate("e") == pages["b"]


def test_moves_of_pages_that_are_given_up_are_not_made():
    tier = HostTier([HostPoolSize(4, 10)])
    first = tier.move_out(0, 7, lambda: None)
    second = tier.move_out(0, 8, lambda: None)
    tier.drop(0, first)
    tier.pin(0, second)
    tier.move_back(0, 9, second)
    tier.cancel(0, 9)
    tier.check([{second}])
    assert tier.used_bytes == 10
    assert tier.take_moves() == ([PageMove(0, 8, second)], [])
    with pytest.raises(RuntimeError, match="are known"):
        tier.check([{first}])


def test_without_sizes_there_is_no_tier():
    tier = HostTier()
    assert not tier
    assert tier.move_out(0, 1, lambda: None) == 0
    assert tier.take_moves() == ([], [])


def test_the_shapes_of_a_draft_are_counted(tiny):
    params = init_params(TINY, jax.random.key(1))
    options = EngineOptions(host_cache_gib=GIB, max_model_len=64)
    alone = EngineSpec(TINY, abstract_params(TINY), options, "cpu")
    both = EngineSpec(TINY, abstract_params(TINY), options, "cpu", draft=ModelDraft("other", TINY, params))
    assert host_pools(both)[0].page_bytes == 2 * host_pools(alone)[0].page_bytes
