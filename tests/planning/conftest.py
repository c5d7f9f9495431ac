"""Requests for models that exist as shapes only, and a compiler that answers at once."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs.speculative import Drafter
from jaxinfer.models import ModelConfig, abstract_params
from jaxinfer.planning import PlanRequest, parse_place
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import NO_DRAFT
from pallas_kernels.ahead_of_time import Compilation


@cache
def shapes(config: ModelConfig) -> Any:
    return abstract_params(config, jnp.bfloat16)


@pytest.fixture
def ask() -> Callable[..., PlanRequest]:
    """A request: a configuration and a place, with some of the engine's options."""

    def make(config: ModelConfig, place: str, params: Any = None, **options: Any) -> PlanRequest:
        mesh, draft, batches = (options.pop(name, None) for name in ("mesh", "draft", "batches"))
        options = {"max_model_len": min(1024, config.max_position_embeddings), "max_seqs": 16, **options}
        params = shapes(config) if params is None else params
        return PlanRequest(
            "model",
            config,
            params,
            parse_place(place),
            EngineOptions(**options),
            mesh,
            draft or NO_DRAFT,
            batches or (),
        )

    return make


class FakeProgram:
    """Holds its arguments, and so many bytes for each layer of the target and of the draft; by kind of layer."""

    def __init__(self) -> None:
        self.num_compiled: list[int] = []

    def __call__(self, function: Any, arguments: tuple[Any, ...]) -> Compilation:
        config = arguments[0].config
        self.num_compiled.append(config.num_layers)
        windows = sum(config.window(layer) is not None for layer in range(config.num_layers))
        experts = sum(config.experts_of(layer) is not None for layer in range(config.num_layers))
        drafted = sum(_draft_layers(one) for one in arguments[:3] if isinstance(one, Drafter))
        held = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")]
        return Compilation(
            chip="fake",
            program=None,
            seconds=1.0,
            argument_bytes=num_bytes(held),
            output_bytes=500
            + math.prod(next((one.page_tables[0].shape for one in arguments if hasattr(one, "page_tables")), ())),
            aliased_bytes=100,
            temporary_bytes=10_000 + 7 * config.num_layers + 5 * windows + 11 * experts + 3 * drafted,
            cost={"flops": 1000.0 + 10 * config.num_layers + windows},
            code_bytes=5000,
        )


def _draft_layers(drafter: Drafter) -> int:
    model = getattr(drafter.proposer, "model", None)
    return 0 if model is None else model.config.num_layers


@pytest.fixture
def fake() -> FakeProgram:
    return FakeProgram()
