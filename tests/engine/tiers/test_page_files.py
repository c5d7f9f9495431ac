"""Pages in files: what is read is what was written, or nothing; bounded, and shared by processes that may be killed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxinfer.engine.tiers.page_files import MAGIC, STALE_SECONDS, PageFiles, PageWriter, chain
from tests.pallas_kernels.quick import quick

SIZE = 1000
NUM_WRITTEN = 400
# Writes pages whose bytes follow from their names, over and over, until it is killed.
WRITER = """
import sys
from pathlib import Path
from jaxinfer.engine.tiers.page_files import PageFiles
from tests.engine.tiers.test_page_files import NUM_WRITTEN, SIZE, content_of, name_of
files = PageFiles(Path(sys.argv[1]), SIZE * NUM_WRITTEN // 2)
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    name = name_of(number % NUM_WRITTEN)
    files.write(name, content_of(name))
    files.read(name_of((number * 7) % NUM_WRITTEN), SIZE)
"""


def name_of(number: int) -> str:
    return chain(b"weights", "", [number.to_bytes(4, "little")])[0]


def content_of(name: str, size: int = SIZE) -> bytes:
    return random.Random(name).randbytes(size)


def files_in(folder, max_bytes: int = 2**30) -> PageFiles:
    return PageFiles(folder / "pages", max_bytes)


def write(files: PageFiles, *numbers: int) -> None:
    for number in numbers:
        files.write(name_of(number), content_of(name_of(number)))


def test_what_is_read_is_what_was_written(tmp_path):
    files = files_in(tmp_path)
    assert files.read(name_of(1), SIZE) is None
    write(files, 1, 2)
    other = files_in(tmp_path)  # another process
    assert other.has(name_of(1), SIZE)
    assert other.read(name_of(1), SIZE) == content_of(name_of(1))
    assert (other.num_damaged, files.num_failed) == (0, 0)


def test_names_depend_on_weights_salt_and_all_tokens_so_far():
    keys = [b"a", b"b", b"c"]
    names = [
        *chain(b"weights", "", keys),
        *chain(b"others", "", keys),
        *chain(b"weights", "tenant", keys),
        *chain(b"weights", "", [b"x", b"b", b"c"]),
    ]
    assert len(set(names)) == len(names)
    assert chain(b"weights", "", keys[:2]) == names[:2]


def spoil(data: bytes, how: str) -> bytes:
    place = len(MAGIC) + 100
    return {
        "cut off": data[:-1],
        "longer": data + b"\0",
        "empty": b"",
        "another byte": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
        "another checksum": data[: len(MAGIC)] + bytes([data[len(MAGIC)] ^ 1]) + data[len(MAGIC) + 1 :],
        "another format": b"x" + data[1:],
        "zeros": bytes(len(data)),
    }[how]


@pytest.mark.parametrize(
    "how", ["cut off", "longer", "empty", "another byte", "another checksum", "another format", "zeros"]
)
def test_a_damaged_file_is_removed_and_not_used(tmp_path, how):
    files = files_in(tmp_path)
    write(files, 1)
    path = files._path(name_of(1))
    path.write_bytes(spoil(path.read_bytes(), how))
    assert files.read(name_of(1), SIZE) is None
    assert files.num_damaged == 1
    assert not path.exists()


def test_a_file_under_anothers_name_is_damaged(tmp_path):
    files = files_in(tmp_path)
    write(files, 1, 2)
    os.replace(files._path(name_of(1)), files._path(name_of(2)))
    assert files.read(name_of(2), SIZE) is None


def test_pages_of_another_size_are_not_used(tmp_path):
    files = files_in(tmp_path)
    write(files, 1)
    assert files.read(name_of(1), SIZE - 1) is None


def test_what_was_not_used_for_longest_goes(tmp_path):
    files = files_in(tmp_path, 10 * SIZE + 10 * 48)
    write(files, *range(8))
    files.touch([name_of(number) for number in range(3)])
    write(files, *range(8, 20))
    kept = [number for number in range(20) if files.has(name_of(number), SIZE)]
    total = sum(path.stat().st_size for path in files.folder.glob("*/*"))
    assert total <= files.max_bytes
    assert 19 in kept
    assert 3 not in kept
    files.touch([name_of(number) for number in kept])
    files.max_bytes = 3 * SIZE
    files.trim()
    assert [number for number in kept if files.has(name_of(number), SIZE)] == kept[:2], "ends go before beginnings"


def test_a_folder_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages").chmod(0o777)
    with pytest.raises(PermissionError, match=r"prefix_store=.*chmod 700"):
        files_in(tmp_path)


def test_a_page_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    files, steps = files_in(tmp_path), []
    fsync, replace = os.fsync, os.replace

    def note(step):
        steps.append((step, files._path(name_of(1)).exists()))

    monkeypatch.setattr(os, "fsync", lambda descriptor: (note("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (note("rename"), replace(*paths)))
    write(files, 1)
    assert steps == [("fsync", False), ("rename", False)]


def test_a_full_disk_loses_the_page_only(tmp_path, monkeypatch):
    files = files_in(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write(files, 1)
    monkeypatch.undo()
    assert files.num_failed == 1
    assert not list(files.folder.glob("*/*"))
    write(files, 1)
    assert files.read(name_of(1), SIZE) == content_of(name_of(1))


def test_a_thread_writes_in_order_and_drops_what_it_cannot_hold(tmp_path, monkeypatch):
    files = files_in(tmp_path)
    monkeypatch.setattr("jaxinfer.engine.tiers.page_files.MAX_QUEUED_BYTES", -1)
    writer = PageWriter(files)
    assert not writer.put(name_of(0), b"")
    monkeypatch.undo()
    assert all(writer.put(name_of(number), content_of(name_of(number))) for number in range(50))
    writer.close()
    assert all(files.read(name_of(number), SIZE) == content_of(name_of(number)) for number in range(50))
    assert writer.num_dropped == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", quick([2, 30], 2))
def test_killed_at_any_moment_there_are_whole_pages_or_none(tmp_path, num_kills):
    """Two processes write the same pages, and remove old ones; one is killed, then the other reads everything."""
    numbers, folder = random.Random(0), tmp_path / "pages"
    num_read = 0
    for turn in range(num_kills):
        arguments = [sys.executable, "-c", WRITER, str(folder)]
        both = [
            subprocess.Popen([*arguments, str(97 * turn + one)], stdout=subprocess.PIPE, text=True) for one in range(2)
        ]
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(numbers.uniform(0, 0.3))
        for process in both:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        files = PageFiles(folder, 2**30)
        found = {number: files.read(name_of(number), SIZE) for number in range(NUM_WRITTEN)}
        assert all(content in (None, content_of(name_of(number))) for number, content in found.items())
        assert files.num_damaged == 0, "a file that was cut off has the name of a whole one"
        num_read += sum(content is not None for content in found.values())
        for path in folder.glob("*/.*.part"):
            os.utime(path, (0, time.time() - STALE_SECONDS - 1))
        files.trim()
        assert not list(folder.glob("*/.*.part"))
    assert num_read > 10 * num_kills
