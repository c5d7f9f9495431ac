"""Short names: what they stand for, what wins over them, and what is said of those that are none."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from checkpoints_convert import CheckpointNotFoundError
from jaxinfer.data import EMBEDDED
from jaxinfer.store import (
    Alias,
    StoreError,
    UnknownModelError,
    copy_model,
    find_model,
    list_models,
    pull,
    remove,
    write_alias,
)
from jaxinfer.store.aliases import is_alias_name
from jaxinfer.store.library import _table, repository_of, short_names
from jaxinfer.store.names import parse_hub_name
from jaxinfer.store.pulled import HubName

ROOT = Path(__file__).parents[2]
SMALL = "Qwen/Qwen3-0.6B"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_HOME", str(tmp_path / "home"))


def test_the_table_is_well_formed():
    names = short_names()
    assert len(names) >= 40
    repositories = [repository for tags in names.values() for repository in tags.values()]
    assert len(set(repositories)) == len(repositories)
    for name, tags in names.items():
        assert tags
        assert name not in EMBEDDED
        for tag in tags:
            assert f"{name}:{tag}" == f"{name}:{tag}".lower()
            assert is_alias_name(f"{name}:{tag}")  # so that an alias of a user may have it
    for repository in repositories:
        assert re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository)
    for start in _table()["gated"]:
        assert any(repository.startswith(start) for repository in repositories), start


def test_the_docs_have_the_same_table():
    spec = spec_from_file_location("update_readme", ROOT / "docs" / "update_readme.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    block = text.partition("<!-- short_names -->\n")[2].partition("\n<!-- /short_names -->")[0]
    assert block == module.short_names()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3:0.6b", HubName(SMALL)),
        ("Qwen3:0.6B", HubName(SMALL)),
        ("qwen3:0.6b@v1", HubName(SMALL, "v1")),
        ("llama3.2:1b", HubName("meta-llama/Llama-3.2-1B-Instruct")),
        ("llama3.2", HubName("meta-llama/Llama-3.2-3B-Instruct")),
        ("smollm2:latest", HubName("HuggingFaceTB/SmolLM2-1.7B-Instruct")),
        ("gemma3:270m", HubName("google/gemma-3-270m-it")),
        ("someone/qwen3:0.6b", HubName("someone/qwen3", variant="0.6b")),
        ("gpt2", HubName("gpt2")),
        ("./qwen3", None),
    ],
)
def test_what_short_names_stand_for(name, found):
    assert parse_hub_name(name) == found


def test_a_tag_that_is_not_there_lists_those_that_are():
    with pytest.raises(UnknownModelError, match=r"qwen3 has no tag '7b', but qwen3:8b, qwen3:0\.6b, .*:Q4_K_M"):
        find_model("qwen3:7b", fetch=False)
    assert repository_of("no-such-name", "7b") is None


def test_aliases_and_folders_win_over_short_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_model("qwen3:0.6b", fetch=False).hub == HubName(SMALL)
    write_alias(Alias("qwen3:0.6b", "demo"))
    assert find_model("qwen3:0.6b").path.name == "demo"
    (tmp_path / "smollm2").mkdir()
    assert find_model("smollm2").path == Path("smollm2")
    write_alias(Alias("brief", "gemma3:1b", system="Be brief."))
    found = find_model("brief", fetch=False)
    assert (found.hub, found.system) == (HubName("google/gemma-3-1b-it"), "Be brief.")


@pytest.mark.slow
def test_a_short_name_is_its_repository_in_every_command(hub, files, jaxinfer, tmp_path):
    hub.push(SMALL, files)
    result = jaxinfer("pull", "qwen3:0.6b")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"pulled {SMALL}, commit " in result.stdout
    found = find_model("qwen3:0.6b", fetch=False)
    assert (found.name, found.path) == ("qwen3:0.6b", pull(SMALL).path)
    answer = jaxinfer("run", "qwen3:0.6b", "hi", "--offline", "--max-tokens", "2")
    assert answer.exit_code == 0, answer.stderr
    assert copy_model("qwen3:0.6b", "tiny").model == SMALL
    with pytest.raises(StoreError, match="is used by the aliases tiny"):
        remove("qwen3:0.6b")
    remove("tiny")
    assert remove("qwen3:0.6b").removed
    assert [model.name for model in list_models()] == ["demo", "demo-draft"]


def test_names_that_are_mistyped_and_models_that_are_gated(hub, monkeypatch):
    hub.reset()
    with pytest.raises(CheckpointNotFoundError, match=r"no such repository on the hub.*: did you mean 'qwen3'"):
        pull("qwem3:0.6b")
    with pytest.raises(CheckpointNotFoundError, match=r"no such repository.*, set HF_TOKEN$"):
        pull("someone/qwen3")
    with pytest.raises(CheckpointNotFoundError, match="it is gated: accept the model's terms on its page"):
        pull("gemma3:270m")  # a hub that does not say so
    hub.faults.needs_token = "gated"
    with pytest.raises(CheckpointNotFoundError) as refused:
        pull("gemma3:270m")
    assert str(refused.value).count("gated") == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownModelError, match=r"\(offline\): did you mean 'qwen3'"):
        find_model("qwem3:0.6b")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointNotFoundError, match="no network") as refused:
        pull("llama3.2:1b")
    assert "gated" not in str(refused.value)


def test_an_alias_of_a_tag_that_is_not_there_does_not_keep_others_from_being_removed(hub):
    pull("someone/tiny")
    write_alias(Alias("old", "qwen3:7b"))
    assert remove("someone/tiny").removed
