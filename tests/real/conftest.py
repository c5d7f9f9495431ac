"""The published models of `make models`, by name. Asked for by --real, they must be there: nothing is skipped."""

import json
from pathlib import Path

import pytest

from benchmarks.real.models import MODELS, ModelFetchError, fetched_path
from jaxinfer.store import StoreError

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden" / "real_models.json"


@pytest.fixture(scope="session")
def model_path():
    """Where a model lies, by its name."""

    def find(name: str) -> Path:
        try:
            path = fetched_path(name)
        except (ModelFetchError, StoreError) as error:
            pytest.fail(f"--real needs {name} ({error}): make models", pytrace=False)
        if (num_bytes := path.stat().st_size) != MODELS[name].num_bytes:
            pytest.fail(f"{path} has {num_bytes:,} bytes, not {MODELS[name].num_bytes:,}: make models", pytrace=False)
        return path

    return find


@pytest.fixture(scope="session")
def golden():
    """What llama.cpp makes of the models (tests/oracle/make_real_golden.py)."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))
