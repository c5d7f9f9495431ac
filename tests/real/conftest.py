"""The published models of `make models`, by name. Asked for by --real, they must be there: nothing is skipped."""

import json
from pathlib import Path

import pytest

from benchmarks.real.models import MODELS
from jaxinfer.store import StoreError, find_path

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden" / "real_models.json"


@pytest.fixture(scope="session")
def model_path():
    """Where a model lies, by its name."""

    def find(name: str) -> Path:
        try:
            path = find_path(name)
        except (StoreError, ValueError, OSError) as error:
            pytest.fail(f"--real needs {name} ({error}): make models", pytrace=False)
        if (num_bytes := path.stat().st_size) != MODELS[name].num_bytes:
            pytest.fail(f"{path} has {num_bytes:,} bytes, not {MODELS[name].num_bytes:,}: make models", pytrace=False)
        return path

    return find


@pytest.fixture(scope="session")
def golden():
    """What llama.cpp makes of the models (tests/oracle/make_real_golden.py)."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))
