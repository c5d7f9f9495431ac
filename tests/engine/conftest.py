"""A tiny random model whose greedy answers vary, shared by the engine's tests."""

import jax
import pytest

from jaxinfer.models import init_params
from tests.tiny import CONTIGUOUS_OPTIONS, OPTIONS, TINY


@pytest.fixture(scope="session")
def tiny():
    """(config, params) with weights large enough that the logits are far from flat."""
    params = init_params(TINY, jax.random.key(0))
    return TINY, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.fixture(scope="session", params=[OPTIONS, CONTIGUOUS_OPTIONS], ids=["paged", "contiguous"])
def options(request):
    """What runs over either cache is tested over both."""
    return request.param


@pytest.fixture(scope="session")
def llm(tiny, options):
    from jaxinfer import LLM

    with LLM(tiny, seed=11, **options) as llm:
        yield llm
