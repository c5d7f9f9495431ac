"""The engine's programs for Llama-3-8B as the TPU's compiler makes them: what they hold and move in HBM.

64 sequences of 2,048 tokens in bfloat16: 16.06 GB of weights and 17.19 GB of pages. One v6e of 32 GiB holds both; a v5e
has 16 GiB, so four share them.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import parallel
from jaxinfer.cache import abstract_paged_cache
from jaxinfer.engine import paged_programs
from jaxinfer.engine.paged_programs import DecodeWork, StepWork
from jaxinfer.engine.programs import program_model
from jaxinfer.models import ModelConfig, RopeConfig, abstract_params
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import Instruction, Program

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig("llama3", 500_000.0, 128, factor=8.0, original_length=8192),
    max_position_embeddings=131_072,
    dtype="bfloat16",
)
SLOTS, PAGE, CONTEXT, STEP_TOKENS, MAX_STEPS = 64, 64, 2048, 512, 8
PAGES = CONTEXT // PAGE
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Arrays of [slots, vocabulary] that live at once where a row asks for top-p: the logits as they were and as they are,
# their keys, and three digits of their weights, with the compiler's gaps between them.
WIDE_ARRAYS = 7


@dataclass(frozen=True)
class Case:
    """A program, by its name in `paged_programs`, on some chips."""

    chip: str
    num_devices: int
    program: str
    num_layers: int = 32

    @cached_property
    def config(self) -> ModelConfig:
        return replace(LLAMA_3_8B, num_layers=self.num_layers)

    @cached_property
    def mesh(self):
        return ahead_of_time.mesh(self.chip, self.num_devices, parallel.MODEL) if self.num_devices > 1 else None

    @property
    def num_rows(self) -> int:
        return SLOTS if self.program == "decode" else STEP_TOKENS

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The program's arguments, from the weights on, as abstract arrays."""
        params = abstract_params(self.config, jnp.bfloat16)
        slots, batch = jax.eval_shape(lambda: paged_programs.init_slots(SLOTS, self.config.vocab_size))
        if self.mesh is not None:
            params = _placed(params, parallel.parameter_shardings(self.mesh, self.config))
            axes = paged_programs.slot_axes(slots, batch)
            slots, batch = _placed((slots, batch), parallel.shardings(self.mesh, axes))
        model, weights = program_model(self.config, params, self.mesh)
        num_pages = SLOTS * PAGES + 1
        cache = abstract_paged_cache(self.config, num_pages, PAGE, jnp.bfloat16, "interleaved", self.mesh)
        return model, weights, cache, slots, batch, *self._work()

    def _work(self) -> tuple[Any, ...]:
        def whole(dtype, *shape):
            return jax.ShapeDtypeStruct(shape, dtype)

        table, counts, flags = whole(jnp.int32, SLOTS, PAGES), whole(jnp.int32, SLOTS), whole(jnp.bool_, SLOTS)
        if self.program == "decode":
            return DecodeWork(is_held=flags, page_table=table, num_steps=whole(jnp.int32)), MAX_STEPS
        rows = whole(jnp.int32, STEP_TOKENS)
        return (StepWork(rows, rows, counts, counts, counts, flags, flags, counts, table),)


@dataclass(frozen=True)
class Found:
    """What was compiled, in bytes of one chip."""

    compilation: ahead_of_time.Compilation
    program: Program
    weights: int
    smallest_weight: int
    embedding: int
    pages: int
    slots: int

    @property
    def needed(self) -> int:
        """What one pass must read: the weights, but of the embedding only rows, and the pages."""
        return self.weights - self.embedding + self.pages

    @cached_property
    def kernels(self) -> list[int]:
        """What each attention kernel moves, if all sequences are as long as the table."""
        return [move.num_bytes for move in self.program.moves() if move.instruction.opcode == "custom-call"]

    def moved(self, **options) -> int:
        return sum(move.num_bytes for move in self.program.moves(**options))


def compiled(case: Case) -> Found:
    if (reason := ahead_of_time.missing_compiler(case.chip)) is not None:
        pytest.skip(reason)
    program = getattr(paged_programs, case.program)
    found = ahead_of_time.compile_for(case.chip, program, *case.arguments, chip_mesh=case.mesh)
    _, weights, cache, slots, *_ = case.arguments
    matrices = [_num_bytes(leaf) for leaf in weights if leaf.ndim == 2]
    return Found(
        compilation=found,
        program=Program(found.program.as_text()),
        weights=_num_bytes(weights),
        smallest_weight=min(matrices),
        embedding=max(matrices),
        pages=_num_bytes(cache),
        slots=_num_bytes(slots),
    )


CASES = [
    Case("v6e", 1, "decode", num_layers=2),
    Case("v5e", 4, "decode", num_layers=2),
    *(
        pytest.param(Case(chip, num_devices, program), marks=pytest.mark.slow)
        for program in ("decode", "step")
        for chip, num_devices in (("v6e", 1), ("v5e", 4))
    ),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.chip}x{case.num_devices}-{case.program}-{case.num_layers}"
)
def test_a_step_of_llama_3_8b_holds_and_moves_what_it_must(case):
    found = compiled(case)
    memory, config = found.compilation, case.config
    moved, kernels = found.moved(), sum(found.kernels)
    print(
        f"{memory.seconds:.1f} s to compile; bytes of one chip: {found.weights:,} weights, {found.pages:,} pages; "
        f"{memory.argument_bytes:,} arguments, {memory.aliased_bytes:,} of them aliased, "
        f"{memory.temporary_bytes:,} temporaries; {moved:,} moved ({moved - kernels:,} beside the kernels), "
        f"{found.moved(takes_branches=True):,} if rows need every branch (loops once), "
        f"XLA counts {memory.cost['bytes accessed']:,.0f}; needed {found.needed:,}"
    )
    # The cache and the slots are updated where they are.
    assert memory.aliased_bytes >= found.pages + found.slots
    # Nothing of a weight's or of a layer's pages' size is made, only rows of tokens and of slots.
    large = found.program.made_in_hbm(at_least=found.smallest_weight)
    assert [i.name for i in large if not has_rows(i, SLOTS, case.num_rows)] == []
    wide = 4 * SLOTS * config.vocab_size // case.num_devices
    rows = 2 * case.num_rows * (config.hidden_size + config.intermediate_size // case.num_devices)
    assert memory.temporary_bytes < WIDE_ARRAYS * wide + 8 * rows
    # One kernel of each kind for each layer; a sequence's pages are read by one kind.
    num_kinds = 1 if case.program == "decode" else 2
    assert len(found.kernels) == num_kinds * config.num_layers
    assert moved - kernels + kernels / num_kinds <= 1.10 * found.needed
    # Between chips go hidden states, and from the sampler less: no weights, pages or logits.
    exchanged = [i for i in found.program.instructions if i.opcode.removesuffix("-start") in COLLECTIVES]
    largest = 2 * case.num_rows * config.hidden_size
    assert all(array.num_bytes <= largest for instruction in exchanged for array in instruction.results)
    assert bool(exchanged) == (case.num_devices > 1)


def has_rows(instruction: Instruction, *counts: int) -> bool:
    return all(array.shape[:1] in [(count,) for count in counts] for array in instruction.results if array.hbm_bytes)


def _placed(arrays: Any, shardings: Any) -> Any:
    def placed(array, sharding):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(placed, arrays, shardings)


def _num_bytes(arrays: Any) -> int:
    """Bytes that one device holds."""
    return sum(
        math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )
