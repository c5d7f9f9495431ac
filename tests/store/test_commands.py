"""The commands: pull, list, show, run, create, cp, rm, disk."""

import subprocess

import pytest

from tests.store.conftest import REPOSITORY

pytestmark = pytest.mark.usefixtures("hub")


@pytest.mark.slow
def test_from_pull_to_rm(jaxinfer, json_lines, hub):
    result = jaxinfer("pull", REPOSITORY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{REPOSITORY}: 5 files, 0.1 MiB, 0.1 MiB to download, license apache-2.0\nfits: needs " in result.stdout
    assert "pulled someone/tiny, commit " in result.stdout
    result = jaxinfer("create", "brief", "--from", REPOSITORY, "--system", "Be brief.", "--temperature", "0")
    assert (result.exit_code, result.stderr) == (0, "")
    assert jaxinfer("cp", "brief", "copy").exit_code == 0
    names = [model["name"] for model in json_lines(jaxinfer("list", "--json").stdout)]
    assert names == [REPOSITORY, "brief", "copy", "demo", "demo-draft"]
    assert "alias of someone/tiny " in jaxinfer("list").stdout
    [shown] = json_lines(jaxinfer("show", "brief", "--json").stdout)
    assert shown["alias"]["system"] == "Be brief."
    assert (shown["license"], shown["architecture"]) == ("apache-2.0", "LlamaForCausalLM")
    shown = jaxinfer("show", REPOSITORY).stdout
    assert "brief, copy" in shown
    assert "26,912" in shown
    assert "<|assistant|>" in jaxinfer("show", "brief", "--template").stdout
    assert jaxinfer("verify", "brief").exit_code == 0
    assert "5 files" not in jaxinfer("disk").stdout
    refused = jaxinfer("rm", REPOSITORY)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is used by the aliases brief, copy" in refused.stderr
    removed = jaxinfer("rm", "brief", "copy", REPOSITORY)
    assert removed.exit_code == 0
    assert "removed brief: 0 bytes freed" in removed.stdout
    assert "0.1 MiB freed" in removed.stdout
    assert json_lines(jaxinfer("disk", "--json").stdout) == []


@pytest.mark.slow
def test_models_are_listed_without_importing_jax(jaxinfer, command, model):
    assert jaxinfer("pull", REPOSITORY).exit_code == 0
    for name, source in (("brief", REPOSITORY), ("mine", str(model))):
        assert jaxinfer("create", name, "--from", source).exit_code == 0
    (python, *arguments), variables = command("list", "--json")
    shown = subprocess.run(
        [python, "-X", "importtime", *arguments], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    assert [name for name in ("brief", "mine", REPOSITORY) if f'"{name}"' not in shown.stdout] == []
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "jaxinfer.store" in imported
    assert "jax" not in imported


@pytest.mark.slow
def test_run_pulls_and_an_alias_answers_alike(jaxinfer, json_lines, hub):
    refused = jaxinfer("run", REPOSITORY, "hi")
    assert refused.exit_code == 2
    assert "someone/tiny is not here: --yes downloads it" in refused.stderr
    assert jaxinfer("list").stdout.count("\n") == 3
    result = jaxinfer("run", REPOSITORY, "hi", "--yes", "--json", "--temperature", "0", "--system", "Be brief.")
    assert result.exit_code == 0
    [answer] = json_lines(result.stdout)
    hub.reset()
    jaxinfer("create", "brief", "--from", REPOSITORY, "--system", "Be brief.", "--temperature", "0")
    [again] = json_lines(jaxinfer("run", "brief", "--offline", "--json", input="hi\n").stdout)
    assert again["message"] == answer["message"]
    assert again["num_prompt_tokens"] == answer["num_prompt_tokens"] > len("hi<|user|>Be brief.") - 9
    assert hub.requested == []


@pytest.mark.slow
def test_a_model_without_a_chat_template_continues(jaxinfer, model_without_template):
    result = jaxinfer("run", model_without_template, "def f", "--max-tokens", "4", "--temperature", "0")
    options = ["-m", model_without_template, "--max-tokens", "4", "--temperature", "0"]
    assert result.stdout == jaxinfer("generate", "def f", *options).stdout


def test_offline(jaxinfer, hub):
    result = jaxinfer("run", "someone/else", "hi", "--offline")
    assert result.exit_code == 1
    assert "the hub may not be contacted" in result.stderr
    assert hub.requested == []


def test_pull_says_what_would_fit(jaxinfer, json_lines, hub, monkeypatch):
    result = jaxinfer("pull", REPOSITORY, "--dry-run", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    [plenty] = json_lines(result.stdout)
    assert plenty["fits"]["fits"] is True
    assert plenty["path"] is None
    monkeypatch.setattr("jaxinfer.planning.planner.available_bytes", lambda device: 1000)
    [scarce] = json_lines(jaxinfer("pull", REPOSITORY, "--dry-run", "--json").stdout)
    assert scarce["fits"]["fits"] is False
    assert "does not fit: needs" in scarce["fits"]["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull", "demo"], "demo is a part of jaxinfer"),
        (["pull", "a b"], "is not of the form user/model"),
        (["show", "someone/else"], "someone/else is not here: jaxinfer pull someone/else"),
        (["create", "x", "--system", "y"], "an alias needs a model: --from MODEL"),
        (["create", "x", "--from", "demo", "--seed", "1"], "--seed is of one request"),
        (["create", "demo", "--from", "demo"], "'demo' cannot be an alias"),
        (["rm", "someone/else"], "someone/else is not here"),
        (["cp", "demo", "a/b"], "'a/b' cannot be an alias"),
    ],
)
def test_mistakes_are_told_in_one_sentence(jaxinfer, arguments, message):
    result = jaxinfer(*arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
