import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, convert, load, verify_manifest
from checkpoints_convert.convert import with_tokenizer_of
from checkpoints_convert.load import open_checkpoint
from checkpoints_convert.staging import ConversionJournal
from tests.checkpoints_convert.family_files import read

ROOT = Path(__file__).parents[2]


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and jnp.array_equal(x, y), a, b))


def run(program, *arguments, **environment):
    """Runs Python code in a process of its own, on the CPU."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


KILLED_IN_LAYER_1 = """
import os, signal, sys
from checkpoints_convert import convert
def progress(name, done, total):
    if name.startswith("layers.1.mlp."):
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.fixture(scope="module")
def scene(make_checkpoint, tmp_path_factory):
    """A directory with a source, and what a conversion killed while it read layer 1 left."""
    directory = tmp_path_factory.mktemp("killed")
    source = make_checkpoint(directory / "source").write()
    assert run(KILLED_IN_LAYER_1, source, directory / "native").returncode == -signal.SIGKILL
    assert {path.name for path in directory.iterdir()} == {"source", "native.partial"}
    return directory


@pytest.fixture
def killed(scene, tmp_path):
    """A copy of the scene: the source, and the destination that does not exist yet."""
    shutil.copytree(scene, tmp_path, dirs_exist_ok=True)
    return tmp_path / "source", tmp_path / "native"


@pytest.mark.slow
def test_killed_conversion_resumes_and_gives_the_same_parameters(killed):
    source, destination = killed
    embed = next((destination.parent / "native.partial" / "params" / "embed" / "d").iterdir())
    before = (embed.stat().st_ino, embed.stat().st_mtime_ns)
    seen = []
    report = convert(source, destination, progress=lambda *what: seen.append(what))
    assert (report.num_resumed_units, report.num_units) == (2, 5)
    assert [name for name, *_ in seen[:3]] == ["embed", "layers.0", "layers.1.attention.k_proj.weight"]
    assert seen[-1][1] == seen[-1][2] == report.num_bytes
    assert equal(load(source)[1], load(destination, verify=True)[1])
    assert verify_manifest(destination) == []
    assert {path.name for path in destination.parent.iterdir()} == {"source", "native"}
    assert not (destination / "journal.jsonl").exists()
    embed = destination / embed.relative_to(destination.parent / "native.partial")
    assert (embed.stat().st_ino, embed.stat().st_mtime_ns) == before  # kept, not written again


def test_killed_conversion_resumes_and_gives_the_same_manifest(killed, tmp_path):
    """Two conversions give other files of Orbax: they hold times, and names drawn at random."""
    source, destination = killed
    convert(source, destination, progress=None)
    convert(source, tmp_path / "at-once", progress=None)
    resumed, at_once = (
        json.loads((path / "manifest.json").read_text()) for path in (destination, tmp_path / "at-once")
    )
    assert resumed["parameters"] == at_once["parameters"]
    assert len(resumed["parameters"]) == len(jax.tree.leaves(load(source)[1]))
    for manifest in (resumed, at_once):
        del manifest["sha256"]  # of all files
        manifest["files"] = {name: entry for name, entry in manifest["files"].items() if not name.startswith("params/")}
    assert resumed == at_once
    convert(source, tmp_path / "rounded", progress=None, dtype="bfloat16")
    other = json.loads((tmp_path / "rounded" / "manifest.json").read_text())
    assert all(other["parameters"][name] != found for name, found in resumed["parameters"].items())


@pytest.mark.slow
def test_killed_on_the_way_to_hugging_face_files_come_out_the_same(scene, tmp_path):
    source = scene / "source"
    program = KILLED_IN_LAYER_1.replace("progress=progress)", "progress=progress, to='huggingface')")
    assert run(program, source, tmp_path / "files").returncode == -signal.SIGKILL
    assert not (tmp_path / "files").exists()
    convert(source, tmp_path / "files", progress=None, to="huggingface")
    convert(source, tmp_path / "at-once", progress=None, to="huggingface")
    names = sorted(path.name for path in (tmp_path / "at-once").iterdir())
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == names
    for name in names:
        assert (tmp_path / "files" / name).read_bytes() == (tmp_path / "at-once" / name).read_bytes()


def test_finished_unit_that_is_damaged_is_written_again(killed):
    source, destination = killed
    embed = next((destination.parent / "native.partial" / "params" / "embed" / "d").iterdir())
    data = bytearray(embed.read_bytes())
    data[len(data) // 2] ^= 1
    embed.write_bytes(data)
    report = convert(source, destination, progress=None)
    assert report.num_resumed_units == 1
    assert equal(load(source)[1], load(destination)[1])


def test_changed_dtype_starts_over(killed):
    source, destination = killed
    report = convert(source, destination, progress=None, dtype="bfloat16")
    assert report.num_resumed_units == 0
    assert load(destination)[0].dtype == "bfloat16"


def test_changed_source_starts_over(killed, checkpoint):
    source, destination = killed
    assert checkpoint(seed=1).write() == source
    assert convert(source, destination, progress=None).num_resumed_units == 0
    assert equal(load(source)[1], load(destination)[1])


def test_torn_last_line_of_the_journal_is_no_line(killed):
    source, destination = killed
    journal = destination.parent / "native.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"unit": "layers.1", "fil')
    assert convert(source, destination, progress=None).num_resumed_units == 2


@pytest.mark.slow
def test_full_disk_says_so_and_keeps_what_is_whole(checkpoint, tmp_path):
    source = checkpoint().write()
    program = """
import resource, sys
from jaxinfer.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
sys.argv[1:1] = ["convert"]
main()
"""
    done = run(program, source, tmp_path / "native")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "native.partial/params/embed: could not be written" in done.stderr
    assert not (tmp_path / "native").exists()
    assert convert(source, tmp_path / "native", progress=None).destination.is_dir()


def test_files_that_vanish_in_mid_run_are_missed_before_the_checkpoint_appears(checkpoint, tmp_path):
    source, embed = checkpoint().write(), tmp_path / "native.partial" / "params" / "embed"

    def remove(name, done, total):
        if name == "layers.1.mlp.up_proj.weight":
            shutil.rmtree(embed)

    with pytest.raises(CheckpointError, match=r"native\.partial: \d+ problems\n  - params/embed/.*: missing"):
        convert(source, tmp_path / "native", progress=remove)
    assert not (tmp_path / "native").exists()
    assert convert(source, tmp_path / "native", progress=None).num_resumed_units == 4
    assert equal(load(source)[1], load(tmp_path / "native", verify=True)[1])


def test_too_little_room_is_noticed_before_writing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(
        CheckpointError, match=r"native: needs 16\.\d+ MiB \(\d+ bytes\), .* has 4\.9 KiB \(5000 bytes\) free"
    ):
        convert(checkpoint().write(), tmp_path / "native", progress=None)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_bad_source_creates_nothing(checkpoint, tmp_path):
    source = checkpoint()
    del source.tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' \[32\] is missing"):
        convert(source.write(), tmp_path / "native", progress=None)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_nan_in_the_middle_leaves_nothing_at_the_destination(checkpoint, tmp_path):
    source = checkpoint()
    source.tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    with pytest.raises(CheckpointError, match="1 of 1536 values are NaN"):
        convert(source.write(), tmp_path / "native", progress=None)
    assert not (tmp_path / "native").exists()


def test_existing_checkpoint_is_replaced_only_when_asked_and_only_by_a_whole_one(checkpoint, tmp_path):
    source, destination = checkpoint().write(), tmp_path / "native"
    convert(source, destination, progress=None)
    with pytest.raises(
        CheckpointError,
        match=r"native: exists: choose another destination, or replace it with --overwrite \(overwrite=True",
    ):
        convert(source, destination, progress=None)
    broken = checkpoint(name="broken")
    broken.tensors["model.norm.weight"][0] = np.nan
    with pytest.raises(CheckpointError, match="NaN"):
        convert(broken.write(), destination, progress=None, overwrite=True)
    assert equal(load(source)[1], load(destination, verify=True)[1])
    other = checkpoint(name="other", seed=1).write()
    convert(other, destination, progress=None, overwrite=True)
    assert equal(load(other)[1], load(destination, verify=True)[1])
    assert {path.name for path in tmp_path.iterdir()} == {"source", "broken", "other", "native"}


def test_directories_that_are_no_checkpoint_are_never_overwritten(checkpoint, tmp_path):
    source = checkpoint().write()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(CheckpointError, match="not overwriting what may be no checkpoint"):
        convert(source, tmp_path / "home", overwrite=True, progress=None)
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(source, source, overwrite=True, progress=None)
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "notes.txt").write_text("mine")
    for form in ("native", "huggingface"):
        with pytest.raises(CheckpointError, match="exists and is not a checkpoint being written"):
            convert(source, tmp_path / "other", to=form, progress=None)
    assert (tmp_path / "other.partial" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not a directory"):
        convert(source, tmp_path / "file", overwrite=True, progress=None)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "irreplaceable"


def test_what_is_read_is_never_removed(checkpoint, tmp_path):
    """Overwriting removes the destination: neither a source in it nor anything that is no checkpoint's own may go."""
    source = checkpoint().write()
    inner = tmp_path / "home" / "inner"
    shutil.copytree(source, inner)
    (tmp_path / "home" / "config.json").write_text("{}")
    for form in ("native", "huggingface"):
        with pytest.raises(CheckpointError, match=r"home: holds the source .*inner: name another destination"):
            convert(inner, tmp_path / "home", to=form, overwrite=True, progress=None)
    shutil.copytree(source, tmp_path / "there.partial")
    with pytest.raises(CheckpointError, match=r"there\.partial: is the source itself"):
        convert(tmp_path / "there.partial", tmp_path / "there", overwrite=True, progress=None)
    (source / "model-f32.gguf").write_text("precious")
    (source / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(CheckpointError, match=r"a checkpoint's, model-f32\.gguf, thesis\.txt: not overwriting"):
        convert(inner, source, overwrite=True, progress=None)
    convert(source, source / "native", progress=None)
    convert(source, source / "native", progress=None, overwrite=True)
    assert equal(load(source)[1], load(source / "native", verify=True)[1])
    assert (source / "thesis.txt").read_text() == "irreplaceable"


def test_two_conversions_to_one_place_do_not_mix(checkpoint, tmp_path):
    source = checkpoint().write()
    with (
        ConversionJournal(tmp_path / "native.partial", "another"),
        pytest.raises(CheckpointError, match="another conversion is writing here"),
    ):
        convert(source, tmp_path / "native", progress=None)


def test_files_beside_the_weights_come_along(checkpoint, tmp_path):
    source = checkpoint()
    source.files = {
        "tokenizer.json": "{}",
        "generation_config.json": '{"eos_token_id": [2, 3]}',
        "chat_template.jinja": "x",
        "modeling_evil.py": "1/0",
        "README.md": "#",
    }
    convert(source.write(), tmp_path / "native", progress=None)
    names = {path.name for path in (tmp_path / "native").iterdir()}
    assert names == {
        *("params", "jaxinfer_config.json", "manifest.json"),
        *("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"),
    }


def test_another_tokenizer_replaces_the_tokenizers_files_only(checkpoint, tmp_path):
    """How a model embeds texts (files of sentence-transformers) is its own."""
    own = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json")
    theirs = ("tokenizer.json", "additional_chat_templates/tool_use.jinja")
    folder, other = checkpoint().write(), tmp_path / "other"
    for place, names in ((folder, (*own, "tokenizer.json", "vocab.json", "LICENSE")), (other, (*theirs, own[2]))):
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(place.name)
    with open_checkpoint(folder) as opened:
        companions = opened.companions()
    found = with_tokenizer_of(companions, other)
    texts = {name: Path(value).read_text() for name, value in found.items() if name != "config.json"}
    assert texts == dict.fromkeys((*own, "LICENSE"), folder.name) | dict.fromkeys(theirs, "other")


def test_there_and_back_again_is_bit_for_bit(checkpoint, tmp_path):
    source = checkpoint(
        "Qwen2ForCausalLM", dtype="bfloat16", use_sliding_window=True, sliding_window=5, max_window_layers=1
    )
    source.files = {"tokenizer.json": "{}"}
    source.write()
    convert(source.directory, tmp_path / "native", progress=None)
    convert(tmp_path / "native", tmp_path / "back", to="huggingface", progress=None)
    (config, params), (wanted_config, wanted) = load(tmp_path / "back"), load(source.directory)
    assert config == wanted_config
    assert equal(params, wanted)
    data = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (data["bos_token_id"], data["eos_token_id"]) == (1, 2)
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_token_ids_of_a_model_with_images_are_kept(tmp_path):
    """Also where only its `text_config` has them: what is written has no such part."""
    source = read("qwen3_5")
    text = {**source.config, "eos_token_id": [2, 3], "bos_token_id": 1}
    wrapper = {"architectures": ["Qwen3_5ForConditionalGeneration"], "bos_token_id": 5, "text_config": text}
    replace(source, config=wrapper).write(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "native", progress=None)
    convert(tmp_path / "native", tmp_path / "back", to="huggingface", progress=None)
    for name in ("source", "native", "back"):
        with open_checkpoint(tmp_path / name) as opened:
            assert (opened.eos_token_ids, opened.bos_token_id) == ((2, 3), 5)
    assert "text_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_error_of_a_cast_is_reported(checkpoint, tmp_path):
    source = checkpoint().write()
    report = convert(source, tmp_path / "native", dtype="bfloat16", progress=None)
    assert set(report.cast_errors) == {".".join(key.key for key in path) for path, _ in _leaves(load(source)[1])}
    assert 2**-10 < max(report.cast_errors.values()) <= 2**-8
    assert convert(source, tmp_path / "same", progress=None).cast_errors == {}
    assert json.dumps(report.to_dict())


def _leaves(params):
    return jax.tree_util.tree_leaves_with_path(params)


def test_unknown_form_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="to='gguf' is not 'native' or 'huggingface'"):
        convert(checkpoint().write(), tmp_path / "x", to="gguf")
