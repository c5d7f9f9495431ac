"""Removing: what it frees, and what stays."""

import threading
import time

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.utils import WeakFileLock

from jaxinfer.store import StoreError, UnknownModelError, copy_model, disk_usage, find_model, list_models, pull, remove
from jaxinfer.store.remove import folder_bytes
from tests.store.conftest import REPOSITORY


def cache(tmp_path):
    return tmp_path / "hf" / "hub" / "models--someone--tiny"


def test_it_frees_what_it_says(hub, tmp_path):
    pull(REPOSITORY)
    before = folder_bytes(tmp_path / "hf" / "hub")
    found = remove(REPOSITORY)
    assert found.freed_bytes == before - folder_bytes(tmp_path / "hf" / "hub") > 100_000
    assert not cache(tmp_path).exists()
    assert [model.kind for model in list_models()] == ["embedded", "embedded"]
    with pytest.raises(UnknownModelError, match="is not here"):
        remove(REPOSITORY)


def test_commits_of_aliases_stay(hub, files):
    first = pull(REPOSITORY)
    copy_model(REPOSITORY, "tiny")
    with pytest.raises(StoreError, match="is used by the aliases tiny: remove these first, jaxinfer rm tiny"):
        remove(REPOSITORY)
    second = hub.push(REPOSITORY, {**files, "LICENSE": b"mine"})
    pull(REPOSITORY)
    found = remove(REPOSITORY)
    assert found.removed == (f"{REPOSITORY}@{second}",)
    assert len(b"mine") <= found.freed_bytes < 5000  # with what the client notes of a commit
    assert found.kept_bytes == first.num_bytes
    assert set(found.kept_by) == {"tiny", f"{REPOSITORY}@{first.commit}"}
    assert not first.missing()
    assert find_model("tiny").path == first.path
    assert remove("tiny").freed_bytes == 0
    assert remove(REPOSITORY).freed_bytes > 100_000


def test_variants_of_a_repository_go_one_by_one(hub, tmp_path):
    hub.push("someone/gguf", {"tiny-Q4_K_M.gguf": b"4" * 40, "tiny-Q8_0.gguf": b"8" * 80})
    pull("someone/gguf:Q4_K_M")
    model = pull("someone/gguf:Q8_0")
    with pytest.raises(UnknownModelError, match="there are someone/gguf:Q8_0@"):
        remove("someone/gguf")
    assert remove("someone/gguf:Q4_K_M").freed_bytes == 40
    assert not model.missing()
    assert list_models()[0].name == "someone/gguf:Q8_0"


def test_snapshots_of_other_tools_keep_their_files(hub, tmp_path, files):
    snapshot_download(REPOSITORY, allow_patterns=["*.safetensors"])
    hub.push(REPOSITORY, {**files, "LICENSE": b"mine"})
    pull(REPOSITORY)
    found = remove(REPOSITORY)
    assert found.kept_by == ("snapshots in the hub's cache that were not pulled",)
    assert found.kept_bytes == len(files["model.safetensors"])
    assert (cache(tmp_path) / "blobs").exists()


def test_a_file_of_another_tool_stays_in_the_same_snapshot(hub, tmp_path, files):
    pull(REPOSITORY)
    other = cache(tmp_path) / "snapshots" / find_model(REPOSITORY).hub.revision / "README.md"
    snapshot_download(REPOSITORY, allow_patterns=["README.md"])
    remove(REPOSITORY)
    assert other.read_bytes() == files["README.md"]
    assert find_model(REPOSITORY, fetch=False).path is None
    assert not (other.parent / "model.safetensors").exists()


def test_a_model_that_lost_a_file_takes_no_other_snapshot_with_it(hub, tmp_path, files):
    first = pull(REPOSITORY)
    second = hub.push(REPOSITORY, {**files, "LICENSE": b"mine"})
    snapshot_download(REPOSITORY, allow_patterns=["*.safetensors", "LICENSE"])
    (first.snapshot / "config.json").unlink()
    remove(REPOSITORY)
    other = cache(tmp_path) / "snapshots" / second
    assert (other / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert not first.manifest.exists()


def test_a_download_that_another_process_has_begun_stays(hub, tmp_path):
    """It has the lock of its blob, and nothing is linked yet."""
    pull(REPOSITORY)
    unfinished = cache(tmp_path) / "blobs" / f"{'0' * 64}.deadbeef.incomplete"
    lock = tmp_path / "hf" / "hub" / ".locks" / cache(tmp_path).name / f"{'0' * 64}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    done = threading.Event()
    with WeakFileLock(lock):
        unfinished.write_bytes(b"half")
        thread = threading.Thread(target=lambda: (remove(REPOSITORY), done.set()))
        thread.start()
        assert not done.wait(0.3)
        unfinished.rename(unfinished.with_name("0" * 64))  # it is finished
    thread.join(20)
    assert done.is_set()


def test_what_other_tools_downloaded_can_be_removed(hub, tmp_path):
    snapshot_download(REPOSITORY, allow_patterns=["*.safetensors"])
    [usage] = disk_usage()
    assert (usage["repository"], usage["models"]) == (REPOSITORY, [])
    assert remove(REPOSITORY).freed_bytes == usage["bytes"]
    assert disk_usage() == []


def test_unfinished_downloads_are_shown_and_removed(hub, tmp_path):
    model = pull(REPOSITORY)
    partial = cache(tmp_path) / "blobs" / ("0" * 64 + ".jaxinfer.incomplete")
    partial.write_bytes(bytes(1000))
    [usage] = disk_usage()
    assert (usage["unfinished bytes"], usage["models"]) == (1000, [f"{REPOSITORY}@{model.commit}"])
    assert remove(REPOSITORY).freed_bytes == usage["bytes"]


@pytest.mark.slow
def test_a_killed_removal_leaves_no_broken_model(hub, files, worker):
    """It is listed whole or not at all; pulling and removing it again works."""
    num_killed = num_listed = 0
    for point in range(30):
        model = pull(REPOSITORY)
        process = worker.start("remove", REPOSITORY)
        time.sleep(0.002 * point)
        num_killed += worker.kill(process)
        listed = [one.name for one in list_models() if one.kind == "pulled"]
        num_listed += bool(listed)
        assert not (listed and model.missing())
        again = pull(REPOSITORY)
        assert {name: (again.path / name).read_bytes() for name in ("config.json", "model.safetensors")} == {
            name: files[name] for name in ("config.json", "model.safetensors")
        }
    print(f"killed {num_killed} of 30; {num_listed} of them before the model was gone")
    assert num_killed >= 10
    assert remove(REPOSITORY).freed_bytes > 100_000
    assert disk_usage() == []
