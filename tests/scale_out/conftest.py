"""Tests of many devices: `make test` runs them in a process with eight virtual devices."""

import jax
import pytest

NUM_DEVICES = 8


@pytest.fixture(autouse=True)
def _eight_devices():
    if jax.device_count() < NUM_DEVICES:
        pytest.skip(f"{jax.device_count()} devices, {NUM_DEVICES} are needed: JAX_NUM_CPU_DEVICES={NUM_DEVICES}")
