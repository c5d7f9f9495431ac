"""Implementations, the oracle and the interpreter as fixtures."""

import pytest

from tests.pallas_kernels.flash_attention import harness
from tests.pallas_kernels.tpu_interpreter import interpreted_tpu


@pytest.fixture(params=["xla", "pallas_tpu", pytest.param("pallas_gpu", marks=pytest.mark.slow)])
def attend(request, monkeypatch):
    """Runs (shape, arguments) with one implementation; the test is repeated for each."""
    return harness.HARNESSES[request.param](monkeypatch)


@pytest.fixture
def race_check():
    """The context in which the TPU kernels run."""
    return interpreted_tpu


@pytest.fixture
def attend_xla(monkeypatch):
    return harness.Xla(monkeypatch)


@pytest.fixture
def expected():
    """The dense reference in float64."""
    return harness.exact
