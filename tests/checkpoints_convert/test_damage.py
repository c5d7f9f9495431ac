"""Single bit flips anywhere in a converted checkpoint: an error that names the file, or no effect."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, convert, load, open_checkpoint
from checkpoints_convert.files import files_below
from jaxinfer.data import embedded_path
from jaxinfer.text import Tokenizer


@pytest.fixture(scope="module")
def converted(tmp_path_factory, make_checkpoint):
    """A tiny model with the demo's tokenizer, converted."""
    root, demo = tmp_path_factory.mktemp("damage"), embedded_path("demo")
    source = make_checkpoint(root / "source", dtype="bfloat16").write()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, source / name)
    convert(source, root / "native", progress=None)
    return root / "native"


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


def contents(directory):
    """All that `LLM` reads of a checkpoint: configuration, parameters, tokenizer, defaults."""
    config, params = load(directory)
    with open_checkpoint(directory) as opened:
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
        tokenizer = Tokenizer.from_dir(directory)
        return config, leaves, opened.generation_config, opened.eos_token_ids, tokenizer.encode("Once upon a time")


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1 << bit]))


def check_flips(directory, num_flips, seed):
    """Flips bits one at a time in files at random, half of them by size. Returns how many were refused."""
    wanted, random = contents(directory), np.random.default_rng(seed)
    names = [name for name in files_below(directory) if (directory / name).stat().st_size]
    sizes = np.array([(directory / name).stat().st_size for name in names])
    chosen = [*random.choice(names, num_flips // 2), *random.choice(names, num_flips // 2, p=sizes / sizes.sum())]
    num_refused = 0
    for name in chosen:
        path = directory / name
        position, bit = int(random.integers(path.stat().st_size)), int(random.integers(8))
        what = f"{name}: byte {position}, bit {bit}"
        flip(path, position, bit)
        problem = None
        try:
            assert contents(directory) == wanted, f"{what} loads other values"
        except CheckpointError as error:
            problem = error
        flip(path, position, bit)
        if problem is not None:
            num_refused += 1
            assert name in str(problem), f"{what}: {problem}"
            assert len(problem.problems) == 1, f"{what}: {problem}"
            assert "Traceback" not in str(problem)
    assert contents(directory) == wanted
    return num_refused


def test_a_dozen_flips_are_refused_or_harmless(copy):
    assert check_flips(copy, 12, seed=0) >= 4


@pytest.mark.slow
def test_four_hundred_flips_are_refused_or_harmless(copy, capfd):
    assert check_flips(copy, 400, seed=1) >= 100
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_two_hundred_flips_of_the_demo_are_refused_or_harmless(tmp_path):
    convert(embedded_path("demo"), tmp_path / "native", progress=None)
    assert check_flips(tmp_path / "native", 200, seed=2) >= 50


def data_file(directory):
    files = [path for path in (directory / "params" / "embed").rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def damage_values(path, bit=6):
    """Flips a bit of the values that zstd kept as they are."""
    flip(path, path.stat().st_size // 2, bit)


def test_damaged_weights_are_found_as_they_are_read(copy):
    path = data_file(copy)
    damage_values(path)
    with pytest.raises(
        CheckpointError, match=rf"{path.name}: its \d+ bytes have SHA-256 .* found in reading array 'em"
    ):
        load(copy)


def test_verify_false_does_not_compare(copy, converted):
    damage_values(data_file(copy))
    wrong = load(copy, verify=False)[1]["embed"]
    assert not np.array_equal(np.asarray(wrong), np.asarray(load(converted)[1]["embed"]))


def test_damage_of_another_part_of_a_mesh_is_found_or_not_read(converted):
    with open_checkpoint(converted) as opened:
        whole = opened.read_param(("embed",))[0]
        parts = opened.read_param(("embed",), [((3, 50), (4, 20)), ((0, 80), (31, 32))])
    assert np.array_equal(parts[0], whole[3:50, 4:20])
    assert np.array_equal(parts[1], whole[:, 31:])


def test_damage_beside_the_part_that_is_read_is_found(copy):
    damage_values(data_file(copy))
    with open_checkpoint(copy) as opened, pytest.raises(CheckpointError, match="array 'embed'"):
        opened.read_param(("embed",), [((0, 1), (0, 1))])


def test_damaged_configuration_and_tokenizer_are_found_when_it_is_opened(copy):
    flip(copy / "tokenizer.json", 1000, 0)
    with pytest.raises(CheckpointError, match=r"copy: tokenizer\.json: its \d+ bytes have SHA-256"):
        open_checkpoint(copy)


def test_damaged_manifest_is_refused(copy):
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"xxh3": [\n        "', '"xxh3": [\n        "f', 1))
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        open_checkpoint(copy)


def test_an_array_without_checksums_is_read_without_verification_only(copy, converted):
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["arrays"]["embed"], manifest["sha256"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    for verify in (None, True):
        with pytest.raises(CheckpointError, match=r"manifest\.json: array 'embed' has no chunk shape"):
            load(copy, verify=verify)
    assert jax.tree.all(jax.tree.map(np.array_equal, load(copy, verify=False)[1], load(converted)[1]))
