"""Bytes by position: what ends too soon, what a tensor does not have, and what is no file."""

import os

import pytest

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.storage import LocalFile, fill, fill_from_tensor


class Slowly(LocalFile):
    """Gives three bytes at a time, as a store may."""

    def read_into(self, offset, buffer):
        return super().read_into(offset, buffer[:3])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(20)))
    return path


@pytest.mark.parametrize("kind", [LocalFile, Slowly])
def test_a_part_is_read_whole(path, kind):
    file, buffer = kind(path), bytearray(9)
    fill(memoryview(buffer), file, 4, "the part")
    assert list(buffer) == list(range(4, 13))
    fill_from_tensor(memoryview(buffer)[:5], file, 10, 16, offset=1, name="w")
    assert list(buffer[:5]) == list(range(11, 16))
    file.close()
    file.close()


def test_the_end_is_said(path):
    file = Slowly(path)
    with pytest.raises(CheckpointError, match="the part: the file ends at byte 20, 4 bytes too soon"):
        fill(memoryview(bytearray(9)), file, 15, "the part")


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (5, 2), (0, 7)])
def test_bytes_that_a_tensor_does_not_have(path, offset, length):
    with pytest.raises(IndexError, match="of tensor 'w', which has 6"):
        fill_from_tensor(memoryview(bytearray(length)), LocalFile(path), 10, 16, offset=offset, name="w")


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        LocalFile(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        LocalFile(tmp_path / "nothing")
