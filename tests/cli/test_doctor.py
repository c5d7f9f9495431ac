"""`jaxinfer doctor` reports, whatever is missing."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from jaxinfer.cli.doctor import EXTRAS, REQUIRED
from jaxinfer.extras import install_hint

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_report(jaxinfer, json_lines):
    result = jaxinfer("doctor", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    [data] = json_lines(result.stdout)
    assert data["problems"] == []
    assert data["devices"]["default backend"] == "cpu"
    assert data["devices"]["count"] == len(data["devices"]["devices"]) >= 1
    assert data["packages"]["jax"] == importlib.metadata.version("jax")
    assert data["attention"]["implementation"] == "xla"
    assert data["compilation cache"]["permissions"].startswith("drwx")
    assert data["kept files"]["tokenizers folder"].endswith("tokenizers")
    assert 0 <= data["kept files"]["tokenizers bytes"] <= data["kept files"]["tokenizers bytes at most"]
    assert set(data["embedded models"]) == {"demo", "demo-draft"}
    assert data["system"]["cpu cores usable"] >= 1


def test_report_for_people(jaxinfer):
    result = jaxinfer("doctor")
    assert result.exit_code == 0
    assert result.stdout.endswith("no problems found\n")
    assert "\x1b" not in result.stdout
    for words in ("python", "jaxlib", "cpu:0", "attention", "compilation cache", "embedded models"):
        assert words in result.stdout


def test_a_missing_package_is_a_finding(jaxinfer, json_lines, monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("orbax-checkpoint", "torch"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = jaxinfer("doctor", "--json")
    assert result.exit_code == 1
    [data] = json_lines(result.stdout)
    assert data["packages"]["orbax-checkpoint"] == "missing"
    assert data["problems"] == [f"packages: orbax-checkpoint is missing: {install_hint()} installs it"]
    assert data["extras"]["oracle"] == f"not installed: {install_hint('oracle')}"


def test_jax_that_does_not_start_is_a_finding(jaxinfer, monkeypatch):
    def fail(*_):
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr("jax.devices", fail)
    result = jaxinfer("doctor")
    assert result.exit_code == 1
    assert "problem: devices: Unable to initialize backend 'tpu'" in result.stdout
    assert "embedded models" in result.stdout


def test_jax_that_is_not_installed_is_a_finding(jaxinfer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jax", None)
    result = jaxinfer("doctor")
    assert result.exit_code == 1
    assert "problem: devices: " in result.stdout


def test_a_cache_that_others_may_write_is_a_finding(jaxinfer, monkeypatch):
    def fail():
        raise PermissionError("/cache is writable by others (mode drwxrwxrwx)")

    monkeypatch.setattr("jaxinfer.compilation_cache.enable", fail)
    result = jaxinfer("doctor")
    assert result.exit_code == 1
    assert "problem: compilation cache: /cache is writable by others" in result.stdout


@pytest.mark.skipif(not PYPROJECT.exists(), reason="no pyproject.toml: not a source tree")
def test_names_are_those_of_pyproject():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"])
    assert set(REQUIRED) == {re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]}
