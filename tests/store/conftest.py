"""A fake hub, an empty cache of the hub, and an empty store, for this process and for others."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api

from tests.cli.conftest import jaxinfer, json_lines, model, model_without_template, write_checkpoint
from tests.store.fake_hub import FakeHub, serving
from tests.store.worker import ROOT, Worker

__all__ = ["jaxinfer", "json_lines", "model", "model_without_template"]
REPOSITORY = "someone/tiny"


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, bytes]:
    """The files of a tiny model's repository, with some that are never downloaded."""
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")
    more = {"README.md": b"# tiny", "modeling_evil.py": b"1/0", "pytorch_model.bin": b"pickle"}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | more


@pytest.fixture
def hub(files, tmp_path, monkeypatch) -> Iterator[FakeHub]:
    """A hub with the tiny model, which this process uses."""
    with serving() as hub:
        hub.push(REPOSITORY, files)
        hub.repositories[REPOSITORY].license = "apache-2.0"
        for name, value in environment(hub, tmp_path).items():
            monkeypatch.setenv(name, value)
        # huggingface_hub reads its environment when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
        yield hub


def environment(hub: FakeHub, folder: Path) -> dict[str, str]:
    """For processes that use the hub, with cache and store below a folder."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "JAXINFER_HOME": str(folder / "home"),
    }


@pytest.fixture
def command(hub, tmp_path) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """command("pull", NAME): arguments and environment of a process of the command line."""

    def make(*arguments: str) -> tuple[list[str], dict[str, str]]:
        start = "from jaxinfer.cli.main import main; main()"
        variables = {**os.environ, **environment(hub, tmp_path), "PYTHONPATH": str(ROOT)}
        return [sys.executable, "-c", start, *arguments], variables

    return make


@pytest.fixture
def worker(hub, tmp_path) -> Iterator[Worker]:
    worker = Worker({**os.environ, **environment(hub, tmp_path), "PYTHONPATH": str(ROOT)})
    yield worker
    worker.close()
