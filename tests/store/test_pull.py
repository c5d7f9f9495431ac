"""Pulling from a hub: what is downloaded, what is refused before, and what goes wrong on the way."""

import hashlib
import json
import random
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from checkpoints_convert import CheckpointError, CheckpointNotFoundError
from jaxinfer.store import StoreError, find_model, list_models, prepare, pull, show_model
from tests.store.conftest import REPOSITORY
from tests.store.fake_hub import TOKEN

WANTED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
RANDOM = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture
def pulled_names():
    return lambda: [model.name for model in list_models() if model.kind == "pulled"]


def blobs(tmp_path):
    return {path.name for path in (tmp_path / "hf").rglob("blobs/*")}


def test_what_is_pulled_is_listed_and_used_without_the_hub(hub, pulled_names, files):
    model = pull(REPOSITORY)
    assert sorted(file.name for file in model.files) == WANTED
    assert model.license == "apache-2.0"
    assert {name: (model.path / name).read_bytes() for name in WANTED} == {name: files[name] for name in WANTED}
    assert pulled_names() == [REPOSITORY]
    assert not [path for path in hub.requested if path.endswith((".bin", ".py"))]
    hub.reset()
    assert find_model(REPOSITORY).path == model.path
    assert hub.requested == []
    assert pull(REPOSITORY).commit == model.commit
    assert not hub.sent
    assert sum("/resolve/" in path for path in hub.requested) == 0


def test_revisions_are_pinned_until_they_are_pulled_again(hub, files):
    first = pull(REPOSITORY)
    second = hub.push(REPOSITORY, {**files, "generation_config.json": b'{"eos_token_id": 1}', "LICENSE": b"mine"})
    assert find_model(REPOSITORY).path == first.path
    hub.reset()
    assert pull(REPOSITORY).commit == second
    assert find_model(REPOSITORY).path.name == second
    assert not hub.sent  # the weights are the same
    assert find_model(f"{REPOSITORY}@{first.commit}").path == first.path
    assert find_model(REPOSITORY, first.commit).path == first.path
    with pytest.raises(StoreError, match="names a revision"):
        find_model(f"{REPOSITORY}@main", "v1")
    assert [model.name for model in list_models()][:2] == [REPOSITORY, f"{REPOSITORY}@{first.commit}"]


def test_a_branch_that_moves_during_the_download_does_not_mix_commits(hub, files):
    download = prepare(REPOSITORY)
    hub.push(REPOSITORY, {**files, "model.safetensors": b"other", "config.json": b"{}"})
    model = download.fetch()
    assert (model.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert (model.path / "config.json").read_bytes() == files["config.json"]


def test_files_are_shared_with_the_hubs_own_client(hub, tmp_path, pulled_names):
    theirs = snapshot_download(REPOSITORY, allow_patterns=WANTED)
    hub.reset()
    model = pull(REPOSITORY)
    assert str(model.path) == theirs
    assert not hub.sent
    shutil.rmtree(tmp_path / "hf")
    assert pulled_names() == []
    model = pull(REPOSITORY)
    hub.reset()
    assert snapshot_download(REPOSITORY, allow_patterns=WANTED) == str(model.path)
    assert snapshot_download(REPOSITORY, allow_patterns=WANTED, local_files_only=True) == str(model.path)
    assert not hub.sent
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download("someone/else", local_files_only=True)


def test_without_the_hub_what_other_tools_downloaded_is_found(hub, monkeypatch):
    theirs = snapshot_download(REPOSITORY, allow_patterns=WANTED)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.reset()
    assert str(find_model(REPOSITORY).path) == theirs
    with pytest.raises(CheckpointNotFoundError, match="not in the local cache, and the hub may not be contacted"):
        find_model("someone/else")
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE is set"):
        pull(REPOSITORY)
    assert hub.requested == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["Q4_K_M", "q4_k_m", "tiny-Q4_K_M.gguf"])
def test_a_gguf_file_of_a_repository(hub, variant):
    parts = {f"big/tiny-Q8_0-0000{part}-of-00002.gguf": RANDOM[:part] for part in (1, 2)}
    hub.push("someone/gguf", {"tiny-Q4_K_M.gguf": b"GGUF", "mmproj-F16.gguf": b"x", **parts})
    model = pull(f"someone/gguf:{variant}")
    assert (model.path.name, model.path.read_bytes()) == ("tiny-Q4_K_M.gguf", b"GGUF")
    assert set(hub.sent) == {"tiny-Q4_K_M.gguf"}
    model = pull("someone/gguf:Q8_0")
    assert [file.name for file in model.files] == sorted(parts)
    assert model.path.name.endswith("00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"has no Q2_K; it has Q8_0, Q4_K_M"):
        pull("someone/gguf:Q2_K")
    with pytest.raises(CheckpointError, match="has GGUF files: name one of them, someone/gguf:Q8_0"):
        pull("someone/gguf")


def test_a_gguf_file_that_lacks_a_part_is_refused(hub):
    hub.push("someone/gguf", {"tiny-Q8_0-00001-of-00002.gguf": b"GGUF"})
    with pytest.raises(CheckpointError, match="has 1 of the 2 parts of Q8_0"):
        pull("someone/gguf:Q8_0")


CONFIG = json.dumps({"architectures": ["Evil"], "auto_map": {"AutoModel": "modeling_evil.Evil"}}).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "pickled weights"),
        ({"config.json": b"{}", "modeling_evil.py": b"x"}, "code but no weights, and its code is never run"),
        ({"config.json": CONFIG, "model.safetensors": RANDOM}, r"is code of the repository \(auto_map\)"),
        ({"model.safetensors": RANDOM}, "the repository has no config.json"),
        ({"README.md": b""}, "no model that can be loaded"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_download(hub, repository, message, pulled_names):
    hub.push("someone/other", repository)
    with pytest.raises(CheckpointError, match=message):
        pull("someone/other")
    assert not hub.sent
    assert pulled_names() == []


def test_gated_and_unknown_repositories(hub, monkeypatch):
    hub.faults.needs_token = "gated"
    with pytest.raises(CheckpointNotFoundError, match="access is gated: accept the model's terms"):
        pull(REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull(REPOSITORY).name == REPOSITORY
    with pytest.raises(CheckpointNotFoundError, match="no such repository on the hub"):
        pull("someone/else")
    with pytest.raises(CheckpointNotFoundError, match="has no revision 'v9'"):
        pull(f"{REPOSITORY}@v9")


def test_a_full_disk_is_told_before_the_download(hub, monkeypatch, files):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(StoreError, match=r"0\.1 MiB are to be downloaded, and 1\.0 KiB are free"):
        pull(REPOSITORY)
    assert not hub.sent


@pytest.mark.slow
def test_a_cut_connection_is_resumed(hub, files):
    hub.push("someone/large", {**files, "model.safetensors": RANDOM})
    hub.faults.cut_after, hub.faults.num_cuts = 2**19, 3
    model = pull("someone/large")
    assert (model.path / "model.safetensors").read_bytes() == RANDOM
    assert hub.sent["model.safetensors"] == len(RANDOM)


def test_wrong_bytes_are_never_listed_nor_kept(hub, tmp_path, pulled_names, files):
    hub.faults.wrong_bytes = True
    with pytest.raises(CheckpointError, match=r"does not have the hash .* nothing of it is kept"):
        pull(REPOSITORY)
    assert pulled_names() == []
    assert not [name for name in blobs(tmp_path) if "incomplete" in name]
    hub.faults.wrong_bytes = False
    assert (pull(REPOSITORY).path / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_damaged_beginning_is_downloaded_again(hub, tmp_path, files):
    digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
    folder = tmp_path / "hf" / "hub" / "models--someone--tiny" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{digest}.jaxinfer.incomplete").write_bytes(b"wrong")
    assert (pull(REPOSITORY).path / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.slow
def test_a_hub_that_ignores_ranges_and_one_that_fails(hub, files):
    hub.push("someone/large", {**files, "model.safetensors": RANDOM})
    hub.faults.cut_after, hub.faults.num_cuts, hub.faults.ignores_range = 2**19, 1, True
    assert (pull("someone/large").path / "model.safetensors").read_bytes() == RANDOM
    hub.faults.status = 403
    with pytest.raises(CheckpointError, match=r"the hub answered: .*403"):
        pull(REPOSITORY)


def test_a_damaged_file_of_another_tool_is_downloaded_again(hub, files):
    theirs = snapshot_download(REPOSITORY, allow_patterns=WANTED)
    blob = next(path for path in (Path(theirs).parents[1] / "blobs").iterdir() if len(path.name) == 64)
    blob.write_bytes(bytes(len(files["model.safetensors"])))
    assert (pull(REPOSITORY).path / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_two_threads_pull_each_file_once(hub, files):
    hub.push("someone/large", {**files, "model.safetensors": RANDOM})
    hub.faults.bytes_per_second = 2e7
    threads = [threading.Thread(target=pull, args=("someone/large",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hub.sent["model.safetensors"] == len(RANDOM)


def test_a_download_can_be_stopped_and_goes_on(hub, files, pulled_names):
    hub.push("someone/large", {**files, "model.safetensors": RANDOM})
    hub.faults.bytes_per_second = 1e7
    stop, seen = threading.Event(), []

    def watch(num_bytes: int) -> None:
        seen.append(num_bytes)
        if num_bytes > 2**20:
            stop.set()

    with pytest.raises(InterruptedError, match="stopped"):
        prepare("someone/large").fetch(on_bytes=watch, stop=stop)
    assert pulled_names() == []
    hub.faults.bytes_per_second = None
    pull("someone/large")
    assert hub.sent["model.safetensors"] < len(RANDOM) + 2**20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_thirty_points(hub, files, worker, pulled_names):
    """Never listed before it is whole; no file is received twice, but for what was on its way."""
    weights = random.Random(0).randbytes(2**23)
    hub.push("someone/large", {**files, "model.safetensors": weights})
    hub.faults.bytes_per_second = 4e6  # two seconds for the weights
    num_killed = 0
    for point in range(30):
        before = len(hub.requested)
        process = worker.start("pull", "someone/large")
        while len(hub.requested) == before:
            time.sleep(0.001)
        time.sleep(0.01 * point)
        num_killed += worker.kill(process)
        for model in list_models():
            if model.kind == "pulled":
                assert (model.path / "model.safetensors").read_bytes() == weights
    hub.faults.bytes_per_second = None
    assert (pull("someone/large").path / "model.safetensors").read_bytes() == weights
    lost = hub.sent["model.safetensors"] - len(weights)
    print(f"killed {num_killed} of 30; of {len(weights):,} bytes {lost:,} were sent twice")
    assert num_killed >= 25
    assert lost < len(weights)  # what the server had sent, and the killed process had not read
    assert pulled_names() == ["someone/large"]


@pytest.mark.slow
def test_an_adapter_is_pulled_and_served(hub, pulled_names, tmp_path):
    import tokenizers

    from checkpoints_convert.adapters import save_adapter
    from jaxinfer import LLM, SamplingParams
    from tests.engine.test_adapter_stacks import random_adapter, random_params
    from tests.tiny import OPTIONS, TINY

    params = random_params(TINY)
    adapter = random_adapter(params, 1)
    folder = save_adapter(adapter, tmp_path / "lora", TINY)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{number}": number for number in range(97)}, "t0"))
    files |= {"README.md": b"# lora", "adapter_model.bin": b"pickle", "tokenizer.json": tokenizer.to_str().encode()}
    hub.push("someone/lora", files)
    prepared = prepare("someone/lora")
    assert prepared.is_adapter
    assert (prepared.configuration / "adapter_config.json").is_file()
    model = pull("someone/lora")
    wanted = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in model.files) == wanted
    assert [stored.kind for stored in list_models() if stored.name == "someone/lora"] == ["adapter"]
    assert pulled_names() == []
    hub.reset()
    facts = show_model("someone/lora")
    assert (facts["kind"], facts["commit"], facts["files"]) == ("adapter", model.commit, 3)
    assert (facts["rank"], facts["tensors"]) == (adapter.max_rank, 2 * len(adapter.low_rank))
    params_of = SamplingParams(temperature=0, max_tokens=4)
    with LLM((TINY, params), adapters={"a": "someone/lora", "b": adapter}, **OPTIONS) as llm:
        one, other = llm.generate([[3, 4, 5]] * 2, params_of, adapter=["a", "b"])
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert llm.adapters["a"].source == "someone/lora"
    assert hub.requested == []
    with pytest.raises(CheckpointError, match="holds an adapter, not a whole model"):
        LLM("someone/lora")


def test_a_pickled_adapter_is_not_pulled(hub):
    hub.push("someone/pickled", {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"})
    with pytest.raises(CheckpointError, match=r"the adapter has no adapter_model.safetensors; pickled weights"):
        prepare("someone/pickled")
    assert not [path for path in hub.requested if path.endswith(".bin")]
