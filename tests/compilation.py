"""Quicker compilation, for tests whose programs run for less time than they take to compile."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Halves the time to compile a program; imported by the `conftest.py` of a folder, it holds for its modules."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def full_optimization(quick_compilation):
    """For a test about what XLA's optimizations do to a program."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
