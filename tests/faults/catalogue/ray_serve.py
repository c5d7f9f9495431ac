"""Faults in fleets under Ray Serve."""

from tests.faults.fault import Fault

OPTIONS = "tests/fleet/ray_serve/test_options.py::"
DOOR = "tests/fleet/ray_serve/test_replica.py::test_a_closed_door_waits_for_those_inside_and_holds_the_others"

FAULTS = (
    Fault(
        "ray_serve/new-weights-start-replicas-again",
        "jaxinfer/fleet/ray_serve/options.py",
        'for name in ("weights", "adapters", "num_replicas"):',
        'for name in ("num_replicas",):',
        (OPTIONS + "test_a_file_becomes_a_configuration",),
        "a change of weights starts all replicas again, in place of a change while they run",
    ),
    Fault(
        "ray_serve/requests-that-ended-still-count",
        "jaxinfer/fleet/ray_serve/choice.py",
        "self._sent.pop(request, None)",
        "self._sent.get(request)",
        (OPTIONS + "test_a_choice_counts_what_runs_and_follows_prefixes",),
        "a replica is thought to be idle, or busy, though it is not",
    ),
    Fault(
        "ray_serve/a-change-is-over-too-early",
        "jaxinfer/fleet/ray_serve/deploy.py",
        'states == ["RUNNING"] * options.num_replicas',
        '"RUNNING" in states',
        (OPTIONS + "test_a_change_is_over_when_all_replicas_have_it",),
        "a command says that all replicas have new weights while some answer with the old ones",
    ),
    Fault(
        "ray_serve/anybody-may-run-programs",
        "jaxinfer/fleet/ray_serve/deploy.py",
        'mode.lower() != "token"',
        "not mode",
        (OPTIONS + "test_mistakes_are_named",),
        "Ray listens at all addresses and takes programs from anybody",
    ),
    Fault(
        "ray_serve/weights-change-under-requests",
        "jaxinfer/fleet/ray_serve/replica.py",
        "while self.num_inside:",
        "while False:",
        (DOOR,),
        "an answer names the version of the weights before, and is of the new ones",
    ),
    Fault(
        "ray_serve/newer-weights-end-streams",
        "jaxinfer/fleet/front/relay.py",
        'if code == "resume_differs" and',
        'if code == "" and',
        ("tests/fleet/front/test_relay.py::test_a_replica_with_newer_weights_is_passed_over",),
        "while weights are replaced, streams of a replica that dies end, though another one has their weights",
    ),
)
