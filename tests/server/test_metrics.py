"""The metrics, and the dashboard that shows them."""

import asyncio
import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from jaxinfer.server.metrics import QuickHistogram

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
COMPLETIONS = "/v1/completions"
MODEL = '{model_name="tiny"}'


def metrics_after(client, num_requests):
    async def ask():
        for number in range(num_requests):
            body = {"prompt": [7, 8, 9 + number], "max_tokens": 5, "seed": 1, "ignore_eos": True}
            assert (await client.post(COMPLETIONS, body)).status == 200
        await client.post(COMPLETIONS, {"prompt": 5})
        return (await client.get("/metrics")).body.decode()

    return asyncio.run(ask())


def samples(text):
    """Values by name with labels."""
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_times_of_requests_and_dispatches(client):
    found = samples(metrics_after(client, 3))
    for name in ("queue", "prefill", "decode", "inference"):
        assert found[f"jaxinfer_request_{name}_time_seconds_count{MODEL}"] == 3
    prefill, decode, both = (
        found[f"jaxinfer_request_{name}_time_seconds_sum{MODEL}"] for name in ("prefill", "decode", "inference")
    )
    assert prefill > 0
    assert decode > 0
    assert abs(prefill + decode - both) < 1e-6
    assert both <= found[f"jaxinfer_e2e_request_latency_seconds_sum{MODEL}"]
    # A step for each prompt and four for the other tokens of each; results of one more may come after the answer.
    num_dispatches = found[f"jaxinfer_dispatch_seconds_count{MODEL}"]
    assert 3 * 5 <= num_dispatches <= 3 * 6
    assert 0 < found[f"jaxinfer_dispatch_seconds_sum{MODEL}"] <= both
    assert found[f"jaxinfer_iteration_tokens_total_count{MODEL}"] == num_dispatches
    num_tokens = found[f"jaxinfer_iteration_tokens_total_sum{MODEL}"]
    assert 3 * (3 + 4) <= num_tokens <= 3 * (3 + 5)


def test_the_cache_is_described(client, engine):
    text = metrics_after(client, 1)
    options = engine.llm.engine.scheduler.options
    (line,) = (line for line in text.splitlines() if line.startswith("jaxinfer_cache_config_info{"))
    assert f'block_size="{options.page_size}"' in line
    assert f'num_gpu_blocks="{options.num_pages}"' in line


def test_moves_to_host_memory_are_counted(client, engine, monkeypatch):
    counters = engine.llm.engine.scheduler.counters
    values = {"host_hit_tokens": 3, "host_bytes_out": 500, "host_bytes_in": 700, "disk_read_tokens": 9}
    for name, value in values.items():
        monkeypatch.setattr(counters, name, value)
    found = samples(metrics_after(client, 0))
    names = ("prefix_cache_host_hits", "host_cache_bytes_out", "host_cache_bytes_in", "prefix_store_read_tokens")
    assert [found[f"jaxinfer_{name}_total{MODEL}"] for name in names] == [3, 500, 700, 9]
    assert found[f"jaxinfer_host_cache_bytes{MODEL}"] == found[f"jaxinfer_host_cache_used_bytes{MODEL}"] == 0


def test_what_waits_in_the_server_waits(client, service):
    async def ask():
        service.default.admission.num_waiting = 3
        try:
            return (await client.get("/metrics")).body.decode()
        finally:
            service.default.admission.num_waiting = 0

    assert samples(asyncio.run(ask()))[f"jaxinfer_num_requests_waiting{MODEL}"] == 3


def test_a_quick_histogram_is_prometheus_clients():
    buckets, registries = (0.001, 0.5, 1, 2.5), (CollectorRegistry(), CollectorRegistry())
    ours = QuickHistogram("x_seconds", "Of it.", buckets)
    registries[0].register(ours)
    theirs = Histogram("x_seconds", "Of it.", ("model_name",), buckets=buckets, registry=registries[1]).labels("tiny")
    for value in (0, 0.001, 0.0011, 0.5, 0.75, 1, 2, 2.5, 2.6, 100, 1e9):
        ours.labels("tiny").observe(value)
        theirs.observe(value)
    texts = [generate_latest(registry).decode().splitlines() for registry in registries]
    assert texts[0] == [line for line in texts[1] if "_created" not in line]


def dashboard():
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def test_the_dashboard_names_metrics_that_exist(client):
    names = {name.partition("{")[0] for name in samples(metrics_after(client, 1))}
    # A counter with labels of its own has no sample before it counts, the gauge of adapters none without room for them.
    names |= set(re.findall(r"^# TYPE (\w+) (?:counter|gauge)$", metrics_after(client, 0), re.MULTILINE))
    for panel in dashboard():
        for target in panel["targets"]:
            used = set(re.findall(r"\b(?:jaxinfer|process)_\w+", target["expr"]))
            assert used, panel["title"]
            assert used <= names, panel["title"]


def test_the_dashboard_has_all_metrics_of_adapters(client):
    names = set(
        re.findall(r"^# TYPE (jaxinfer_(?:adapter|lora)\w+)(?<!_created) ", metrics_after(client, 0), re.MULTILINE)
    )
    text = " ".join(target["expr"] for panel in dashboard() for target in panel["targets"])
    assert len(names) == 5
    assert [name for name in names if name not in text] == []


def test_the_dashboard_has_units_and_the_quantiles_of_each_histogram(client):
    histograms = set(re.findall(r"^# TYPE (jaxinfer_\w+) histogram$", metrics_after(client, 0), re.MULTILINE))
    places = []
    for panel in dashboard():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        places.append((panel["gridPos"]["x"], panel["gridPos"]["y"]))
        text = " ".join(target["expr"] for target in panel["targets"])
        if "_bucket" in text:
            assert [target["legendFormat"] for target in panel["targets"]] == ["p50", "p95", "p99"]
            assert all(f"0.{q}," in text for q in (50, 95, 99))
            histograms -= set(re.findall(r"(jaxinfer_\w+)_bucket", text))
    assert not histograms
    assert len(set(places)) == len(places)
