"""Traces as each platform writes them, and the division of device time, on planes that stand for `ProfileData`."""

from dataclasses import dataclass, field

import pytest

from jaxinfer.measure.profiling.ops import MLP, Programs
from jaxinfer.measure.profiling.run import identified
from jaxinfer.measure.profiling.trace import Interval, NoDeviceEventsError, intervals, shares


@dataclass
class Event:
    name: str
    start_ns: float
    duration_ns: float
    stats: dict = field(default_factory=dict)

    def __post_init__(self):
        self.end_ns, self.stats = self.start_ns + self.duration_ns, list(self.stats.items())


@dataclass
class Line:
    name: str
    events: list


@dataclass
class Plane:
    name: str
    lines: list


@dataclass
class Data:
    planes: list


def test_a_cpu_operation_lasts_until_its_end_event_on_any_thread():
    op = {"hlo_module": "jit_step", "program_id": 4, "device_ordinal": 1}
    threads = [
        Line("tf_XLA/1", [Event("dot.1", 10, 2, {**op, "hlo_op": "dot.1", "_p": 7}), Event("StartRegion", 1, 0)]),
        Line("tf_XLA/2", [Event("end: dot.1", 50, 1, {"_c": 7}), Event("add", 60, 5, {**op, "hlo_op": "add"})]),
    ]
    found = intervals(Data([Plane("/host:metadata", []), Plane("/host:CPU", threads)]))
    assert [(one.name, one.start, one.end) for one in found] == [("dot.1", 10, 50), ("add", 60, 65)]
    assert {(one.module, one.run, one.device) for one in found} == {("jit_step", 4, "cpu 1")}


def test_a_cpu_operation_ends_before_those_that_waited_for_it_and_a_loop_after():
    op = {"hlo_module": "jit_step", "program_id": 4}

    def event(name: str, start: int, length: int, number: int) -> Event:
        return Event(name, start, length, {**op, "hlo_op": name, "_p": number})

    threads = [
        Line("tf_XLA/1", [event("while.2", 5, 3, 1), event("add.1", 10, 2, 2)]),
        Line("tf_XLA/2", [event("dot.1", 20, 60, 3), Event("end: dot.1", 80, 1, {"_c": 3}),
                          Event("end: add.1", 81, 1, {"_c": 2}), Event("end: while.2", 82, 1, {"_c": 1})]),
    ]  # fmt: skip
    found = intervals(Data([Plane("/host:CPU", threads)]))
    assert [(one.name, one.start, one.end) for one in found] == [
        ("while.2", 5, 82),
        ("add.1", 10, 20),
        ("dot.1", 20, 80),
    ]


def test_a_tpu_has_a_line_of_operations_and_one_of_programs():
    lines = [
        Line("XLA Modules", [Event("jit_decode(123)", 0, 100), Event("jit_step(77)", 100, 50)]),
        Line("XLA Ops", [Event("%fusion.3 = f32[8] fusion(...)", 10, 20), Event("%copy.1 = ...", 110, 5)]),
        Line("Steps", [Event("0", 0, 150)]),
    ]
    host = Plane("/host:CPU", [Line("python", [Event("add", 0, 9, {"hlo_op": "add"})])])
    found = intervals(Data([host, Plane("/device:TPU:0", lines), Plane("/device:CUSTOM:Megascale", [])]))
    assert [(one.name, one.module, one.device) for one in found] == [
        ("fusion.3", "jit_decode", "/device:TPU:0"),
        ("copy.1", "jit_step", "/device:TPU:0"),
    ]


def test_a_gpu_has_streams_and_names_in_the_trace_itself():
    scope = "jit(decode)/while/body/layers.3/mlp/up_proj/dot_general"
    stats = {"hlo_op": "gemm_fusion_dot.4", "hlo_module": "jit_decode", "program_id": 9, "tf_op": scope}
    streams = [
        Line("Stream #13(Compute)", [Event("triton_gemm", 5, 10, stats)]),
        Line("Stream #14(MemcpyH2D)", [Event("MemcpyH2D", 0, 30)]),
    ]
    found = intervals(Data([Plane("/device:GPU:0", streams)]))
    assert [one.name for one in found] == ["gemm_fusion_dot.4"]
    (op,) = identified(found, Programs())
    assert (op.part, op.layer) == (MLP, 3)


def test_a_trace_without_devices_is_an_error_that_names_its_planes():
    with pytest.raises(NoDeviceEventsError, match=r"/host:CPU, Task Environment"):
        intervals(Data([Plane("/host:CPU", [Line("python", [Event("x", 0, 5)])]), Plane("Task Environment", [])]))


def interval(start, end, device="d"):
    return Interval("x", "m", None, device, start * 1e9, end * 1e9)


def test_time_is_divided_among_what_runs_at_once():
    found = [interval(0, 4), interval(2, 6), interval(8, 9)]
    assert shares(found, [False] * 3) == pytest.approx([3, 3, 1])


def test_a_loop_gets_what_its_operations_leave():
    found = [interval(0, 10), interval(1, 3), interval(4, 9), interval(4, 6)]
    assert shares(found, [True, False, False, False]) == pytest.approx([3, 2, 4, 1])


def test_devices_do_not_share():
    found = [interval(0, 4, "a"), interval(0, 4, "b")]
    assert shares(found, [False, False]) == pytest.approx([4, 4])


def test_all_shares_together_are_the_time_in_which_anything_ran():
    import random

    numbers = random.Random(3)
    for _ in range(50):
        found = [
            interval(start, start + numbers.randint(0, 9)) for start in (numbers.randint(0, 60) for _ in range(20))
        ]
        covered = {t for one in found for t in range(int(one.start / 1e9), int(one.end / 1e9))}
        got = shares(found, [numbers.random() < 0.3 for _ in found])
        assert sum(got) == pytest.approx(len(covered))
        assert min(got) >= -1e-9
