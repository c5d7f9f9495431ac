"""When a host counts as lost: by what the coordinator says, and by the clock."""

import pytest

from jaxinfer.parallel.watchdog import LOST_SECONDS, LossDetector


class Scene:
    """The loss detector of one host of three, on a simulated clock."""

    def __init__(self, index: int = 0, is_needed: bool = True):
        self.is_needed, self.now, self.beats = is_needed, 100.0, {}
        self.detector = LossDetector(index, 3, lambda: self.is_needed)
        self.detector.start(self.now)

    def passes(self, seconds: float, *alive: int, hears: bool = True, **state: dict) -> str | None:
        for _ in range(int(seconds)):
            self.now += 1
            for host in alive:
                self.beats[host] = {"number": self.now}
            self.beats |= {int(name.removeprefix("host")): {"number": 0, **beat} for name, beat in state.items()}
            if hears:
                self.detector.record(dict(self.beats), self.now)
            if message := self.detector.failure(self.now):
                return message
        return None


def test_hosts_that_beat_are_not_lost():
    assert Scene().passes(100, 0, 1, 2) is None


@pytest.mark.parametrize("index", [0, 1])
def test_a_silent_host_is_named_within_the_time(index):
    scene = Scene(index)
    assert scene.passes(10, 0, 1, 2) is None
    assert scene.passes(LOST_SECONDS, 0, 1) is None
    message = scene.passes(3, 0, 1)
    assert message is not None
    assert message.startswith("host 2 of 3 was lost: no sign of it for 16 s")


def test_one_that_never_came_is_lost():
    assert "host 1 of 3" in (Scene().passes(LOST_SECONDS + 2, 0, 2) or "")


def test_without_the_coordinator_it_is_host_0():
    message = Scene(2).passes(LOST_SECONDS + 2, hears=False)
    assert message is not None
    assert message.startswith("host 0 of 3, or the network to it, was lost")


def test_an_end_is_no_loss_unless_one_is_needed():
    scene = Scene(is_needed=False)
    assert scene.passes(100, 0, 2, host1={"ended": True}) is None
    scene.is_needed = True
    assert "host 1 of 3 has ended while host 0 still worked" in (scene.passes(10, 0, 2) or "")


def test_all_have_ended_once_each_other_host_says_so():
    scene = Scene(is_needed=False)
    assert scene.passes(5, 0, 2, host1={"ended": True}) is None
    assert not scene.detector.have_ended
    assert scene.passes(5, 0, host2={"ended": True}) is None
    assert scene.detector.have_ended


def test_what_another_host_says_is_taken_over():
    assert Scene().passes(5, 0, 2, host1={"lost": "host 2 of 3 was lost"}) == "host 2 of 3 was lost"
    assert "host 1 of 3 failed: no memory" in (Scene().passes(5, 0, 2, host1={"error": "no memory"}) or "")


def test_a_process_that_was_stopped_itself_accuses_nobody():
    scene = Scene()
    scene.passes(5, 0, 1, 2)
    scene.now += 300
    assert scene.passes(10, 0, 1, 2) is None
    assert scene.passes(LOST_SECONDS + 2, 0, 1) is not None
