"""A fleet's options, its configuration of Ray Serve, and the choice of a replica: without Ray."""

import json
from collections import Counter

import pytest

from jaxinfer.fleet.ray_serve import deploy
from jaxinfer.fleet.ray_serve.choice import ReplicaChoice
from jaxinfer.fleet.ray_serve.options import FleetOptions

FILE = """
model: demo
num_replicas: 3
mesh: model=2
options: {max_seqs: 8, max_adapters: 2}
server: {max_queued: 64}
weights: {path: ./step-100, version: step-100}
adapters: {first: ./first}
placement: {num_cpus: 2, bundles: [{CPU: 2}]}
"""


@pytest.fixture
def options(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "fleet.yaml").write_text(FILE)
    (tmp_path / "step-100").mkdir()
    return deploy.read_file(tmp_path / "fleet.yaml")


def test_a_file_becomes_a_configuration(options, tmp_path):
    config = deploy.serve_config(options, [{"name": "another"}])
    assert json.loads(json.dumps(config)) == config
    other, own = config["applications"]
    assert other == {"name": "another"}
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    weights = {"path": str(tmp_path / "step-100"), "version": "step-100"}  # it is there; ./first is not
    told = {"weights": weights, "adapters": {"first": "./first"}}
    assert own["deployments"] == [{"name": "Replica", "num_replicas": 3, "user_config": told}]
    # What is changed while it runs is not in what starts replicas again.
    assert not {"weights", "adapters", "num_replicas"} & set(own["args"])
    again = FleetOptions.read(own["args"])
    assert again.llm_options() == {"max_seqs": 8, "max_adapters": 2, "mesh": "model=2"}
    server = again.server_options("10.0.0.1")
    assert server.accept_sent_tokens
    assert (server.max_queued, server.hosts) == (64, ("10.0.0.1",))
    arguments = options.replica_deployment()
    assert arguments["placement_group_bundles"] == [{"CPU": 2}]
    assert arguments["user_config"] == told


MISTAKES = (
    ({}, "model is missing"),
    ({"model": "demo", "replicas": 3}, "'replicas' is none of model"),
    ({"model": "demo", "num_replicas": 0}, "num_replicas must be an integer of at least 1, got 0"),
    ({"model": "demo", "weights": {"path": "x"}}, "weights: version is missing"),
    ({"model": "demo", "adapters": {"first": "x"}}, "1 adapters need max_adapters"),
    ({"model": "demo", "server": {"port": 1}}, "server: 'port' is none of"),
    ({"model": "demo", "server": {"pooling": "all"}}, "server: pooling='all'"),
    ({"model": "demo", "host": "0.0.0.0"}, "reachable from other machines"),
    ({"model": "demo", "placement": {"strategy": "SPREAD"}}, "a replica lies on one host"),
    ({"model": "demo", "stall_timeout": 3}, "stall_timeout must be at least 16 seconds, got 3"),
    ({"model": "demo", "direct_port": 8000}, "direct_port and port are both 8000"),
)


def test_mistakes_are_named(monkeypatch):
    for values, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            FleetOptions.read(values)
    # Ray listens at all addresses.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match="RAY_AUTH_MODE=disabled"):
        deploy.serve_fleet(FleetOptions(model="demo"))


class RaySays:
    """Ray Serve, which says what a test gave it, one thing after another."""

    def __init__(self, *details):
        self.details, self.given = list(details), []

    def get_serve_details(self):
        return self.details.pop(0) if len(self.details) > 1 else self.details[0]

    def deploy_applications(self, config):
        self.given.append(config)


def running(options, *states, status="RUNNING", message=""):
    replicas = [{"state": state} for state in states]
    deployed = {"replicas": replicas, "deployment_config": {"user_config": options.changeable()}, "message": message}
    return {"applications": {"jaxinfer": {"status": status, "deployments": {"Replica": deployed}}}}


def test_a_change_is_over_when_all_replicas_have_it(options, monkeypatch):
    monkeypatch.setattr(deploy, "_POLL_SECONDS", 0)
    before = running(FleetOptions(model="demo"), "RUNNING", "RUNNING", "RUNNING")
    before["applications"]["another"] = {"deployed_app_config": {"name": "another"}}
    at = {"http_options": {"host": "127.0.0.1", "port": 8000}}
    half, over = running(options, "RUNNING", "UPDATING", "RUNNING"), running(options, *["RUNNING"] * 3)
    ray, told = RaySays(before | at, before, half, over), []
    deploy.apply(ray, options, told.append)
    assert told == ["3 of 3 replicas run", "2 of 3 replicas run"]
    assert [app["name"] for app in ray.given[0]["applications"]] == ["another", "jaxinfer"]
    failed = running(options, status="DEPLOY_FAILED", message="Traceback\nValueError: 4 pages are too few\n   ^^^")
    with pytest.raises(deploy.FleetError, match="4 pages are too few"):
        deploy.apply(RaySays({}, failed), options, told.append)
    with pytest.raises(deploy.FleetError, match=r"127\.0\.0\.1:9000, not at http://127\.0\.0\.1:8000"):
        deploy.apply(RaySays(before | {"http_options": {"host": "127.0.0.1", "port": 9000}}), options, told.append)


def test_a_choice_counts_what_runs_and_follows_prefixes():
    choice, names = ReplicaChoice("load"), ["a", "b", "c"]
    firsts = [choice.order(str(number), (), names)[0] for number in range(6)]
    assert Counter(firsts) == {"a": 2, "b": 2, "c": 2}
    choice.complete("0")
    choice.complete("0")
    assert choice.order("6", (), names)[0] == firsts[0]
    choice.route("6", "b")  # Ray sent it elsewhere
    assert choice.loads == {firsts[0]: 1} | {name: 3 if name == "b" else 2 for name in names if name != firsts[0]}
    assert choice.order("7", (), names, avoided=[firsts[0]])[-1] == firsts[0]
    choice, names = ReplicaChoice("prefix", max_imbalance=2), ["a", "b"]
    first, *_ = choice.order("1", [1, 2], names)
    assert choice.order("2", [1, 2, 3], names)[0] == first
    assert choice.order("3", [9], names)[0] != first
    assert choice.order("2", [1, 2, 3], names)[0] == first  # again, as after an error
    assert choice.order("4", [1, 2], names, avoided=[first])[0] != first
    other = [name for name in names if name != first]
    choice.keep(other)
    assert choice.order("5", [1, 2], other) == other
    turns = ReplicaChoice("round_robin")
    assert [turns.order(str(number), [1], names)[0] for number in range(4)] == ["a", "b", "a", "b"]
