"""Tests of many devices, and of other processes: `make test-scale-out` gives them eight virtual devices."""

import sys
from pathlib import Path

import jax
import pytest

NUM_DEVICES = 8
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # mixed_requests


@pytest.fixture(autouse=True)
def _eight_devices(request):
    if request.node.get_closest_marker("any_devices") is None and jax.device_count() < NUM_DEVICES:
        pytest.skip(f"{jax.device_count()} devices, {NUM_DEVICES} are needed: make test-scale-out")
