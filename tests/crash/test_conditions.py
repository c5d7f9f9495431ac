"""Folders that cannot be written or vanish, and full disks: one error with the path, and nothing is lost."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.scenes import SCENES, Reference, digests
from tests.crash.server import Moment, Result, Server
from tests.pallas_kernels.quick import quick

ALL = ["convert", "convert-huggingface", "quantize", "distill", "train-demo"]
QUICK = "convert"
BY_NAME = [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in ALL]
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def reference_of(request) -> Iterator[Callable[[str], Reference]]:
    """What an undisturbed run makes, by the name of the scene; run once."""
    found: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in found:
            server: Server = request.getfixturevalue("converting" if name == QUICK else "server")
            found[name] = Reference(server, SCENES[name], Path(folder) / name)
        return found[name]

    with tempfile.TemporaryDirectory(prefix="jaxinfer-crash-") as folder:
        yield reference


@pytest.fixture(params=BY_NAME)
def reference(request, reference_of) -> Reference:
    return reference_of(request.param)


def check_refused(result: Result, place: Path, what: str = "") -> None:
    assert (result.code, result.stdout) == (1, ""), f"{what}: {result.code} {result.stdout} {result.stderr}"
    last = result.stderr.splitlines()[-1] if result.stderr else ""
    assert "error: " in result.stderr, f"{what}: {result.stderr}"
    assert str(place) in result.stderr, f"{what}: {result.stderr}"
    for wrong in ("Traceback", "JAXINFER_TRACEBACK", "Exception ignored", "Event loop"):
        assert wrong not in result.stderr, f"{what}: {result.stderr}"
    assert len(last) < 2000, what


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(reference):
    place = reference.place()
    (place / "out").chmod(0o555)
    result = reference.run(place, obeys_permissions=True)
    (place / "out").chmod(0o755)
    check_refused(result, place / "out")
    assert digests(place) == reference.before
    reference.check_repeated(place, "after it could not be written")


@pytest.mark.slow
def test_inputs_that_cannot_be_written(reference):
    place = reference.place()
    inputs = [place / "text.txt", place / "source", *(place / "source").iterdir()]
    for path in inputs:
        path.chmod(0o555 if path.is_dir() else 0o444)
    result = reference.run(place, obeys_permissions=True)
    for path in inputs:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert result.code == 0, result.stderr
    reference.check_repeated(place, "read-only inputs")


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", quick([100, 6_000, 30_000], 6_000))
def test_a_disk_that_fills_up(reference, max_bytes):
    """As a limit on the size of a file, which fails at the same calls."""
    place = reference.place()
    result = reference.run(place, max_file_bytes=max_bytes)
    if result.code == 0:  # no file of it is as large
        assert reference.is_complete(place)
        return
    check_refused(result, place, f"at most {max_bytes} bytes")
    assert not reference.is_complete(place)
    reference.check_repeated(place, f"after at most {max_bytes} bytes")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
@pytest.mark.parametrize("kibibytes", [8, 64, 17_000])
def test_a_small_disk(reference, kibibytes):
    place = reference.place()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(place / "out")]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        result = reference.run(place)
        if result.code == 0:
            assert reference.is_complete(place)
        else:
            check_refused(result, place, f"{kibibytes} KiB")
            assert not any((place / name).exists() for name in reference.scene.outputs[-1:])
    finally:
        subprocess.run(["umount", str(place / "out")], check=True)


def check_removed(reference: Reference, name: str, share: float, restore: Callable[[Path], None]) -> str:
    """Removes a folder in mid-run. The run fails, or makes what it always makes; the next one does."""
    place = reference.place()
    what = f"{name} removed at {share:.0%}"
    operation = max(round(share * reference.undisturbed.operations), 1)
    result = reference.run(place, Moment(0, operation=operation, folder=str(place)), remove=str(place / name))
    if result.code != 0:
        check_refused(result, place, what)
    elif name != "out":
        assert reference.is_complete(place), what
    restore(place)
    reference.check_repeated(place, what, removed=name)
    return "refused" if result.code else "complete"


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 0.35, 0.7, 0.9))]
)
def test_the_folder_of_the_work_is_removed(reference, share):
    check_removed(reference, reference.scene.work, share, lambda place: None)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_folder_of_the_output_is_removed(reference, share):
    def restore(place: Path) -> None:
        (place / "out").mkdir(exist_ok=True)

    check_removed(reference, "out", share, restore)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.02, 0.2, 0.8))])
def test_the_source_is_removed(reference, share):
    def restore(place: Path) -> None:
        shutil.copytree(reference.folder / "before" / "source", place / "source", dirs_exist_ok=True)

    check_removed(reference, "source", share, restore)
