"""Decoding with quantized weights as the TPU's compiler makes it: 64 sequences of Llama-3-8B read every weight once, as
it is stored, and write none."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import parallel
from jaxinfer.cache import abstract_paged_cache
from jaxinfer.engine.abstract_work import abstract_decode_work, abstract_step_work
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.spec import placed_params
from jaxinfer.models import ModelConfig, abstract_params
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from tests.engine.test_compiled import CONTEXT, LLAMA_3_8B, MAX_STEPS, NARROW, PAGE, SLOTS, abstract_slots, has_rows
from tests.hbm import made_in_hbm

STEP_TOKENS = 512


@dataclass(frozen=True)
class Case:
    """A program over weights of a format, None for bfloat16, on some chips."""

    chip: str
    recipe: str | None
    num_layers: int = 2
    program: str = "decode"
    num_devices: int = 1
    model: ModelConfig = LLAMA_3_8B

    def __str__(self) -> str:
        devices = "" if self.num_devices == 1 else f"x{self.num_devices}"
        return f"{self.chip}{devices}-{self.recipe}-{self.program}-{self.num_layers}"

    @property
    def config(self) -> ModelConfig:
        return replace(self.model, num_layers=self.num_layers)

    @cached_property
    def mesh(self):
        return ahead_of_time.mesh(self.chip, self.num_devices, parallel.MODEL) if self.num_devices > 1 else None

    @cached_property
    def params(self):
        params = abstract_params(self.config, jnp.bfloat16)
        if self.recipe is not None:
            params = jax.eval_shape(partial(quantize_params, how=self.recipe), params)
        return placed_params(self.config, params, self.mesh)

    def bytes_of_rows(self, num_tokens: int) -> int:
        """What the layers' activations in bfloat16 take: each written once and read once or twice, and none fused."""
        config = self.config
        return self.num_layers * num_tokens * 2 * (12 * config.hidden_size + 6 * config.intermediate_size)

    def compile(self) -> tuple[ahead_of_time.Compilation, Any]:
        model, weights = program_model(self.config, self.params, self.mesh)
        pages = CONTEXT // PAGE
        cache = abstract_paged_cache(self.config, SLOTS * pages + 1, PAGE, jnp.bfloat16, "interleaved", self.mesh)
        slots, batch = abstract_slots(self.config, SLOTS, self.mesh)
        if self.program == "decode":
            work = (slots, batch, abstract_decode_work(SLOTS, pages), MAX_STEPS)
        else:
            work = (slots, abstract_step_work(STEP_TOKENS, SLOTS, pages))
        program = getattr(paged_programs, self.program)
        return ahead_of_time.compile_for(self.chip, program, model, weights, cache, *work, chip_mesh=self.mesh), cache


# What the sampler and the logits move besides: rows of [64, vocabulary] in float32.
WIDE_ARRAYS = 5.5
CASES = [
    pytest.param(Case("v6e", "int4-g128", 1, model=NARROW), marks=pytest.mark.slow),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            *(Case(chip, recipe) for chip in ("v6e", "v5e") for recipe in (None, "int8")),
            *(Case(chip, "int4-g128") for chip in ("v6e", "v5e")),
            *(Case("v6e", recipe) for recipe in ("w8a8", "fp8-block", "int4-g128-asym")),
            *(Case("v6e", recipe, program="step") for recipe in ("int8", "int4-g128")),
            *(Case("v6e", recipe, 32) for recipe in ("int8", "int4-g128")),
            *(Case("v5e", recipe, 32, num_devices=4) for recipe in ("int8", "int4-g128")),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.timeout(900)
def test_a_step_reads_each_weight_once_as_it_is_stored(case):
    if (reason := ahead_of_time.missing_compiler(case.chip)) is not None:
        pytest.skip(reason)
    found, cache = case.compile()
    program = HloProgram(found.program.as_text())
    embedding = num_bytes(case.params["embed"])
    weights, pages = num_bytes(case.params) - embedding, num_bytes(cache)
    moves = program.moves()
    kernels = sum(move.num_bytes for move in moves if move.instruction.opcode == "custom-call")
    # A sequence's pages are read by one of a step's two kinds of kernels.
    moved = sum(move.num_bytes for move in moves) - (kernels // 2 if case.program == "step" else 0)
    print(
        f"{case}: {found.seconds:.1f} s to compile; {weights:,} bytes of weights beside the embedding, {pages:,} of "
        f"pages; {moved:,} moved ({moved - kernels:,} beside the kernels), {moved / (weights + pages):.4f} of ideal, "
        f"{(moved - kernels) / weights:.4f} of the weights; {found.temporary_bytes:,} temporaries"
    )
    # Nothing of a weight's size is written, in any dtype; rows of tokens and of slots are.
    smallest = min(num_bytes(leaf) for leaf in jax.tree.leaves(case.params["layers"]) if leaf.size > 2**19)
    large = made_in_hbm(program, at_least=smallest)
    assert [i.name for i in large if not has_rows(i, SLOTS, STEP_TOKENS)] == []
    assert found.aliased_bytes >= pages
    if case.program == "step":  # of many tokens, whose own arrays count
        assert moved <= 1.10 * (weights + pages) + case.bytes_of_rows(STEP_TOKENS)
        return
    assert moved <= 1.10 * (weights + pages)
    # The bound is tight for the layers alone too: the head, which stays in bfloat16, and the sampler hide nothing.
    wide = 4 * SLOTS * case.config.vocab_size // case.num_devices
    layers, head = num_bytes(case.params["layers"]), num_bytes(case.params["lm_head"])
    assert moved - kernels - head - WIDE_ARRAYS * wide <= 1.05 * layers + case.bytes_of_rows(SLOTS)
