"""Faults in simulated fleets."""

from tests.faults.fault import Fault

TESTS = "tests/fleet/simulate/"
EQUAL = TESTS + "test_replicas.py::test_many_steps_at_once_are_each_step_by_itself"
WAITS = TESTS + "test_replicas.py::test_a_request_waits_for_the_two_dispatches_that_were_sent_before_it"

FAULTS = (
    Fault(
        "simulate/ended-sequences-are-still-read",
        "jaxinfer/fleet/simulate/jumps.py",
        "            self._attended -= sequence.num_storable\n",
        "",
        (EQUAL,),
        "steps take the longer, the more requests have ended",
    ),
    Fault(
        "simulate/one-dispatch-ahead",
        "jaxinfer/fleet/simulate/replica.py",
        "flight is None or len(self._in_flight) >= MAX_IN_FLIGHT",
        "flight is None or len(self._in_flight) >= 1",
        (WAITS,),
        "first tokens come a step earlier than those of the engine",
    ),
    Fault(
        "simulate/pages-are-evicted-out-of-order",
        "jaxinfer/fleet/simulate/jumps.py",
        "return self._num_free - self._most_pages",
        "return self._pool.num_available - self._most_pages",
        (EQUAL,),
        "prefixes are cached that the engine has given away",
    ),
    Fault(
        "simulate/failed-requests-are-simulated",
        "jaxinfer/fleet/simulate/traces.py",
        "if min(counts) < 1:",
        "if min(counts) < 0:",
        (TESTS + "test_traces.py::test_public_formats_are_read_and_errors_name_file_and_line",),
        "requests of BurstGPT that failed count as requests without an answer",
    ),
    Fault(
        "simulate/busy-replicas-get-what-they-know",
        "jaxinfer/fleet/simulate/routes.py",
        "for name in owners if loads[name] <= limit]",
        "for name in owners]",
        (TESTS + "test_routes.py::test_the_index_chooses_as_the_router",),
        "a common beginning sends all requests to one replica",
    ),
)
