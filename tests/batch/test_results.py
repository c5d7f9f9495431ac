"""One file of results: whole lines, one writer, nothing cut that no crash has torn."""

import errno
import os

import pytest

from jaxinfer.batch import results
from jaxinfer.batch.errors import BatchError, BatchWriteError
from jaxinfer.batch.results import ResultsFile

WHOLE = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def opened(path):
    files = []

    def open_file() -> ResultsFile:
        files.append(ResultsFile(path))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"custom_id"',
        b'{"custom_id": "c"}',  # whole but for its newline: the row is redone, never doubled
        b'{"custom_id": \n',
        b"\0" * 4096,  # what a power loss leaves
        b'{"other": 1}\n',
        b"\0\0\n{\n",
    ],
)
def test_what_follows_the_last_whole_line_is_cut(path, opened, tail):
    path.write_bytes(WHOLE + tail)
    file = opened()
    assert [(number, record["custom_id"]) for number, record in file.read()] == [(1, "a"), (2, "b")]
    assert path.read_bytes() == WHOLE + tail  # not before the job is known to be the same
    assert file.trim() == len(tail)
    file.append({"custom_id": "c"})
    assert path.read_bytes() == WHOLE + b'{"custom_id": "c"}\n'


def test_damage_that_whole_lines_follow_is_refused(path, opened):
    path.write_bytes(b"{\n" + WHOLE)
    with pytest.raises(BatchError, match="line 1 is not a result, and complete ones follow"):
        list(opened().read())
    assert path.read_bytes() == b"{\n" + WHOLE


def test_a_second_writer_is_refused_until_the_first_lets_go(path, opened):
    first = opened()
    with pytest.raises(BatchError, match="being written by another process"):
        opened()
    first.close()
    opened()


def test_a_file_that_was_replaced_while_it_was_opened_is_opened_again(path, opened, monkeypatch):
    flock = results.fcntl.flock

    def replace_then_lock(fd, how):
        monkeypatch.setattr(results.fcntl, "flock", flock)
        path.unlink()
        flock(fd, how)

    monkeypatch.setattr(results.fcntl, "flock", replace_then_lock)
    opened().append({"custom_id": "a"})
    assert path.read_bytes() == b'{"custom_id": "a"}\n'


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("num_written", [0, 1, 10])
def test_a_line_that_does_not_fit_leaves_nothing_behind(path, opened, monkeypatch, code, num_written):
    file = opened()
    file.append({"custom_id": "a"})
    write = os.write

    def write_some(fd, data):
        if len(data) == len(b'{"custom_id": "b"}\n') and num_written:
            return write(fd, data[:num_written])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(results.os, "write", write_some)
    with pytest.raises(BatchWriteError, match=os.strerror(code)):
        file.append({"custom_id": "b"})
    monkeypatch.undo()
    assert path.read_bytes() == b'{"custom_id": "a"}\n'
    file.append({"custom_id": "c"})
    assert path.read_bytes() == b'{"custom_id": "a"}\n{"custom_id": "c"}\n'


def test_syncs_are_few_and_the_last_one_is_never_left_out(opened, monkeypatch):
    synced = []
    monkeypatch.setattr(results.os, "fsync", synced.append)
    file = opened()
    for number in range(100):
        file.append({"custom_id": str(number)})
    assert len(synced) == 1  # the first at once, the next after half a second
    file.sync()
    file.sync()
    assert len(synced) == 2


def test_a_sync_that_fails_is_told(opened, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(results.os, "fsync", fail)
    with pytest.raises(BatchWriteError, match="Input/output error"):
        opened().append({"custom_id": "a"})


def test_results_must_be_a_file(tmp_path):
    with pytest.raises(BatchError, match="must be a file"):
        ResultsFile(tmp_path)
