"""The three kinds of run on a tiny model: exact lengths, nothing compiled, and figures that fit together."""

import asyncio
import itertools

import jax
import numpy as np
import pytest

from jaxinfer.measure.bench import rates, runs
from jaxinfer.measure.bench.model import opened, public_name, random_model
from jaxinfer.measure.bench.probe import DispatchProbe, host_gap
from jaxinfer.measure.bench.workload import BenchWorkload, Lengths, WorkloadRequest
from jaxinfer.models import init_params
from tests.tiny import TINY

ARGUMENTS = {"max_seqs": 4, "max_model_len": 64, "prefill_chunk": 16, "steps_per_dispatch": 4}
SIZES = {"num_bytes": 2**16, "size": 64}
WORKLOAD = BenchWorkload(Lengths("uniform", 4, 12), Lengths("uniform", 3, 9))


@pytest.fixture(scope="module")
def bench():
    """Steps its engine on this thread."""
    live = (TINY, init_params(TINY, jax.random.key(0)))
    with opened(live, dict(ARGUMENTS), serves=False, sizes=SIZES) as found:  # type: ignore[arg-type]
        yield found


@pytest.fixture(scope="module")
def served():
    """Has a thread that steps its engine; nobody else may."""
    live = (TINY, init_params(TINY, jax.random.key(0)))
    with opened(live, dict(ARGUMENTS), serves=True, sizes=SIZES) as found:  # type: ignore[arg-type]
        yield found


def check(run, requests):
    assert run["answer_tokens"] == sum(request.num_tokens for request in requests)
    assert run["prompt_tokens"] == sum(len(request.prompt) for request in requests)
    assert run["compiled_after_warm_up"] == 0
    assert 0 < run["ttft"]["p50"] <= run["e2el"]["p50"]
    assert 0 < run["decode"]["mean_batch"] <= ARGUMENTS["max_seqs"]
    if run["tpot"]["p50"]:  # 0 where all tokens of an answer came at once
        assert run["decode"]["percent"] > 0
    else:
        assert run["decode"]["percent"] is None
    assert run["memory"]["peak_rss_bytes"] > 2**20
    assert len(run["memory"]["seconds"]) == len(run["memory"]["rss_bytes"])


@pytest.mark.slow
def test_latency_counts_all_batches_but_the_first(bench):
    ended = []
    options = runs.RunOptions(progress=lambda: ended.append(1))
    batches = [WORKLOAD.requests(2, 64, part) for part in range(3)]
    run = runs.latency(bench, batches, options)
    check(run, [request for batch in batches[1:] for request in batch])
    assert (run["batch"], run["requests"], len(ended)) == (2, 4, 6)
    assert run["prefill"]["roofline_seconds"] < run["prefill"]["seconds"]
    assert run["host_gap"]["steps"] >= run["host_gap"]["dispatches"] > 0


@pytest.mark.slow
def test_throughput_serves_more_requests_than_slots(bench):
    requests = WORKLOAD.requests(9, 64)
    run = runs.throughput(
        bench, requests, WORKLOAD.requests(1, 64, 1), runs.RunOptions(limits={"ttft": 1e-9}, price_per_hour=1.0)
    )
    check(run, requests)
    assert run["goodput"]["share"] == 0
    assert run["cost_per_million_tokens"]["out"] > run["cost_per_million_tokens"]["total"] > 0


@pytest.mark.slow
def test_load_streams_to_clients_who_arrive(served):
    requests = WORKLOAD.requests(5, 64)
    times = [0.0, 0.01, 0.02, 0.02, 0.1]
    run = runs.load(served, requests, times, runs.RunOptions())
    check(run, requests)
    assert run["seconds"] >= times[-1]


@pytest.mark.slow
def test_a_limit_of_concurrency_is_kept(served):
    requests = [WorkloadRequest([1, 2, 3], 6)] * 4
    traces, _ = asyncio.run(runs.serve_arriving(served.engine, requests, [0.0] * 4, runs.RunOptions(), 1))
    spans = sorted((trace.sent, trace.times[-1]) for trace in traces)
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))
    assert all(trace.num_tokens == 6 for trace in traces)


@pytest.mark.slow
def test_a_repeated_prompt_of_another_run_is_not_found_in_the_prefix_cache(bench):
    request = WorkloadRequest(list(range(3, 43)), 2)
    engine = bench.llm.engine
    seen = []
    original = engine.scheduler._find_known

    def spied(sequence, *rest):
        found = original(sequence, *rest)
        seen.append(sequence.num_reused)
        return found

    engine.scheduler._find_known = spied
    try:
        runs.serve_all(bench.llm, [request], runs.RunOptions())
        runs.serve_all(bench.llm, [request], runs.RunOptions())
    finally:
        del engine.scheduler._find_known
    assert seen
    assert set(seen) == {0}


def test_a_request_too_long_is_named_and_leaves_nothing_behind(bench):
    with pytest.raises(ValueError, match="request 1"):
        runs.serve_all(bench.llm, [WorkloadRequest([1], 2), WorkloadRequest([1] * 60, 60)], runs.RunOptions())
    assert not bench.llm.engine.has_work


def test_the_probe_sees_a_host_that_is_slow(bench, monkeypatch):
    """The inverse: 20 ms of the host's time before each dispatch must be found as gaps."""
    import time

    engine = bench.llm.engine
    schedule = engine.scheduler.schedule

    def slow(*arguments, **keywords):
        time.sleep(0.02)
        return schedule(*arguments, **keywords)

    monkeypatch.setattr(engine.scheduler, "schedule", slow)
    with DispatchProbe(engine) as probe:
        runs.serve_all(bench.llm, [WorkloadRequest([1, 2, 3], 20)], runs.RunOptions())
    found = host_gap([probe])
    assert found["seconds"] > 0.02
    before = probe.num_steps
    runs.serve_all(bench.llm, [WorkloadRequest([1, 2, 3], 4)], runs.RunOptions())
    assert probe.num_steps == before  # it has left


def test_gaps_of_all_replicas_count(bench):
    probes = [DispatchProbe(bench.llm.engine) for _ in range(2)]
    probes[0].gaps, probes[0].num_steps = [0.25, 0.0], 3
    probes[1].gaps, probes[1].num_steps = [0.75], 1
    found = host_gap(probes)
    assert (found["dispatches"], found["steps"], found["seconds"], found["per_step_mean"]) == (3, 4, 1.0, 0.25)
    assert host_gap([DispatchProbe(bench.llm.engine)]) is None


def test_bytes_and_flops_of_a_step_are_those_of_the_weights_and_the_cache(bench):
    counted = bench.ideal.counted
    params = bench.llm.engine.spec.params  # as a CPU packs them
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    if not TINY.tie_word_embeddings:  # of which only rows are read
        weights -= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["embed"]))
    point = bench.ideal.decode(3, 20)
    cache = 3 * 20 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert point.hbm_bytes == counted.dense_bytes + cache
    assert counted.dense_bytes == weights
    assert point.seconds == pytest.approx(
        max(point.hbm_bytes / bench.ideal.measured.bandwidth, point.flops / bench.ideal.measured.flops["bf16"])
    )


@pytest.mark.slow
def test_rates_are_measured_of_what_is_asked_for():
    found = rates.measure_rates("float32", ("bf16", "int8"), **SIZES)
    assert set(found.bandwidths) == {"read", "copy", "matvec"}
    assert set(found.flops) == {"bf16", "int8"}
    assert all(np.isfinite(rate) and rate > 0 for rate in (*found.bandwidths.values(), *found.flops.values()))
    slower = rates.MeasuredRates(found.dtype, dict.fromkeys(found.bandwidths, 1.0), {**found.flops, "int8": 1e30})
    best = slower.best(found)
    assert (best.bandwidths, best.flops) == (found.bandwidths, {**found.flops, "int8": 1e30})
    assert found.bandwidth == max(found.bandwidths.values())
    assert set(found.to_dict()["flops_per_second"]) == {"float32", "int8"}


@pytest.mark.slow
def test_random_weights_need_a_configuration_only(tmp_path):
    from tests.cli.conftest import write_checkpoint

    folder = write_checkpoint(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    config, params = random_model(str(folder))[:2]
    assert config.num_layers == 2
    assert params["embed"].shape == (260, 32)


def test_names_of_paths_are_cut(tmp_path):
    assert public_name(str(tmp_path)) == tmp_path.name
    assert public_name("demo") == "demo"
    assert public_name("owner/model") == "owner/model"


def test_each_kind_of_run_wants_a_model_that_was_opened_for_it(bench, served):
    requests = WORKLOAD.requests(2, 64)
    with pytest.raises(ValueError, match="stepped by its own thread"):
        runs.latency(served, [requests, requests], runs.RunOptions())
    with pytest.raises(ValueError, match="stepped by its own thread"):
        runs.throughput(served, requests, requests, runs.RunOptions())
    with pytest.raises(ValueError, match="needs a model that was opened to serve"):
        runs.load(bench, requests, [0.0, 0.0], runs.RunOptions())
