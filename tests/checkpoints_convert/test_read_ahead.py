"""Reading ahead: several groups at once, in order, within the bound, and an end to it when something fails."""

import sys
import threading

import jax
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, load
from checkpoints_convert.checkpoint import Checkpoint
from checkpoints_convert.huggingface.checkpoint import HuggingFaceCheckpoint
from checkpoints_convert.load import OnDefaultDevice, read_ahead

SIZES = [5, 1, 1, 300, 7, 20, 20, 20, 1, 250]
KIB = 1024


class Drawn(Checkpoint):
    """Parameters of so many KiB, whose reading waits for `gate` and notes what is held."""

    def __init__(self, sizes, gate=lambda number: None):
        super().__init__(None)
        self.sizes, self.gate = sizes, gate
        self.lock, self.held, self.peak, self.num_read = threading.Lock(), 0, 0, 0

    def units(self):
        return {"all": {(str(number),): (size * KIB,) for number, size in enumerate(self.sizes)}}

    def param_bytes(self, path):
        return self.sizes[int(path[0])] * KIB

    def read_param(self, path, parts=()):
        number = int(path[0])
        with self.lock:
            self.held += self.sizes[number] * KIB
            self.peak = max(self.peak, self.held)
            self.num_read += 1
        self.gate(number)
        return [np.full(self.sizes[number] * KIB, number % 100, np.int8)]

    def quantized(self):
        return {}

    def fingerprint(self):
        return ""


def placed(source):
    def place(path, found):
        leaf = jax.device_put(found[0] + 0)
        with source.lock:
            source.held -= found[0].nbytes
        return leaf

    return place


@pytest.mark.parametrize("limit", [1, 30 * KIB, 400 * KIB, 10**9])
def test_everything_comes_in_order_within_the_bound(limit):
    source = Drawn(SIZES)
    found = list(read_ahead(source, {}, placed(source), limit=limit))
    assert [path for path, _ in found] == [(str(number),) for number in range(len(SIZES))]
    assert all((np.asarray(leaf) == number).all() for number, (_, leaf) in enumerate(found))
    assert source.peak <= max(limit, max(SIZES) * KIB)


def test_small_tensors_do_not_wait_for_one_another():
    meeting = threading.Barrier(4, timeout=60)
    source = Drawn([1] * 8, gate=lambda _: meeting.wait())
    assert len(list(read_ahead(source, {}, placed(source)))) == 8


def test_the_bound_keeps_them_apart():
    """The test above can fail: with room for three, four never meet."""
    meeting = threading.Barrier(4, timeout=0.5)
    source = Drawn([1] * 8, gate=lambda _: meeting.wait())
    with pytest.raises(threading.BrokenBarrierError):
        list(read_ahead(source, {}, placed(source), limit=3 * KIB))


def test_an_error_ends_the_reading():
    def gate(number):
        if number == 2:
            raise CheckpointError("file", "tensor 'x': broken")

    source = Drawn([100] * 50, gate)
    seen = []
    reading = read_ahead(source, {}, placed(source), limit=300 * KIB)
    with pytest.raises(CheckpointError, match="tensor 'x': broken"):
        seen.extend(path for path, _ in reading)
    assert seen == [("0",), ("1",)]
    assert source.num_read < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-param")]


def test_a_reader_that_stops_early_leaves_no_threads():
    source = Drawn([1] * 20)
    reading = read_ahead(source, {}, placed(source))
    next(reading)
    reading.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-param")]


def test_load_holds_no_more_than_the_bound(checkpoint, monkeypatch):
    """As the loader uses it: bytes that sources returned and no device has taken."""
    held, peak = 0, 0
    lock, is_ahead = threading.Lock(), threading.Event()
    source = checkpoint()
    largest = max(array.nbytes for array in source.tensors.values())
    read_param = HuggingFaceCheckpoint.read_param

    def counting(self, path, parts):
        nonlocal held, peak
        arrays = read_param(self, path, parts)
        with lock:
            held += sum(array.nbytes for array in arrays)
            peak = max(peak, held)
        if peak > largest:
            is_ahead.set()
        return arrays

    call = OnDefaultDevice.__call__

    def taking(self, path, found):
        nonlocal held
        is_ahead.wait(2)  # on a busy machine the reader may not have begun
        is_ahead.set()
        with lock:
            held -= sum(array.nbytes for array in found)
        return call(self, path, found)

    monkeypatch.setattr(HuggingFaceCheckpoint, "read_param", counting)
    monkeypatch.setattr(OnDefaultDevice, "__call__", taking)
    limit = 12 * KIB
    module = sys.modules["checkpoints_convert.load"]  # the package has a function of that name
    monkeypatch.setattr(module, "read_ahead", lambda *arguments, **_: read_ahead(*arguments, limit=limit))
    load(source.write())
    assert largest < peak <= limit
