"""The engine's programs for Llama-3-8B as the TPU's compiler makes them: what they hold and move in HBM.

64 sequences of 2,048 tokens in bfloat16: 16.06 GB of weights and 17.19 GB of pages. One v6e of 32 GiB holds both; a v5e
has 16 GiB, so four share them. And its speculative rounds of 16 sequences, with Llama-3.2-1B as the draft.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import parallel
from jaxinfer.cache import abstract_paged_cache
from jaxinfer.engine import spec as abstract
from jaxinfer.engine.abstract_work import (
    abstract_array,
    abstract_decode_work,
    abstract_rounds,
    abstract_step_work,
    abstract_tables,
)
from jaxinfer.engine.compiling import LargeProgram
from jaxinfer.engine.programs import ProgramModel, program_model
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.engine.programs.speculative import Drafter, speculate, verify
from jaxinfer.models import ModelConfig, abstract_params
from jaxinfer.quantization.tree import num_bytes as _num_bytes
from jaxinfer.sampling import sample
from jaxinfer.speculative import DraftRows, ModelProposer, Proposal, TokenTree, chain
from jaxinfer.speculative.packing import all_rows
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram, Instruction
from tests.hbm import made_in_hbm
from tests.planning.plan_models import LLAMA_3_8B

LLAMA_3_1B = replace(
    LLAMA_3_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope=replace(LLAMA_3_8B.rope, rotary_dim=64, factor=32.0),
    tie_word_embeddings=True,
)
# What `make test` compiles, in half the time: the same programs of narrower layers and a smaller vocabulary.
NARROW = replace(LLAMA_3_8B, vocab_size=8192, hidden_size=2048, intermediate_size=4096, num_heads=16, num_kv_heads=4)
NARROW_DRAFT = replace(
    LLAMA_3_1B, vocab_size=8192, hidden_size=1024, intermediate_size=2048, num_heads=16, num_kv_heads=4
)
SLOTS, PAGE, CONTEXT, STEP_TOKENS, MAX_STEPS = 64, 64, 2048, 512, 8
SPECULATING_SLOTS, MAX_ROUNDS, CHAIN = 16, 4, chain(4)
# As many as fit beside both models. Of fewer, a layer of the draft's fits in vector memory, and the compiler brings it
# there and back, by way of another 67 MB of HBM.
SPECULATING_PAGES = {"v6e": 1100, "v5e": 4200}
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
    model: ModelConfig = field(default=LLAMA_3_8B, repr=False)

    @cached_property
    def config(self) -> ModelConfig:
        return replace(self.model, num_layers=self.num_layers)

    @cached_property
    def mesh(self):
        return ahead_of_time.mesh(self.chip, self.num_devices, parallel.MODEL) if self.num_devices > 1 else None

    @property
    def num_rows(self) -> int:
        return SLOTS if self.program == "decode" else STEP_TOKENS

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The program's arguments, from the weights on, as abstract arrays."""
        model, weights, cache = abstract_model(self.config, SLOTS * PAGES + 1, self.mesh)
        slots, batch = abstract_slots(self.config, SLOTS, self.mesh)
        if self.program == "step":
            return model, weights, cache, slots, abstract_step_work(STEP_TOKENS, SLOTS, PAGES)
        return model, weights, cache, slots, batch, abstract_decode_work(SLOTS, PAGES), MAX_STEPS


@dataclass(frozen=True)
class Found:
    """What was compiled, in bytes of one chip."""

    compilation: ahead_of_time.Compilation
    program: HloProgram
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
        program=HloProgram(found.program.as_text()),
        weights=_num_bytes(weights),
        smallest_weight=min(matrices),
        embedding=max(matrices),
        pages=_num_bytes(cache),
        slots=_num_bytes(slots),
    )


CASES = [
    Case("v6e", 1, "decode", num_layers=1, model=NARROW),
    pytest.param(Case("v4", 1, "decode", num_layers=1, model=NARROW), marks=pytest.mark.slow),
    *(pytest.param(Case(*chips, "decode", num_layers=2), marks=pytest.mark.slow) for chips in (("v6e", 1), ("v5e", 4))),
    *(
        pytest.param(Case(chip, num_devices, program), marks=pytest.mark.slow)
        for program in ("decode", "step")
        for chip, num_devices in (("v6e", 1), ("v5e", 4))
    ),
]


@pytest.mark.slow
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
    large = made_in_hbm(found.program, at_least=found.smallest_weight)
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


@dataclass(frozen=True)
class Speculation:
    """Llama-3-8B and the draft, with some of the layers of each, on some chips."""

    chip: str
    num_devices: int
    num_layers: int = LLAMA_3_8B.num_layers
    num_draft_layers: int = LLAMA_3_1B.num_layers
    tree: TokenTree = CHAIN
    models: tuple[ModelConfig, ModelConfig] = (LLAMA_3_8B, LLAMA_3_1B)

    def __str__(self) -> str:
        layers = f"{self.num_layers}+{self.num_draft_layers}"
        return f"{self.chip}x{self.num_devices}-{layers}-{'.'.join(map(str, self.tree.widths))}"

    @cached_property
    def mesh(self):
        return ahead_of_time.mesh(self.chip, self.num_devices, parallel.MODEL) if self.num_devices > 1 else None

    @cached_property
    def config(self) -> ModelConfig:
        return replace(self.models[0], num_layers=self.num_layers)

    @property
    def draft_config(self) -> ModelConfig:
        return replace(self.models[1], num_layers=self.num_draft_layers)

    def model(self, config: ModelConfig):
        return abstract_model(config, SPECULATING_PAGES[self.chip], self.mesh)

    def slots(self, draft_length: int | None = None):
        return abstract_slots(self.config, SPECULATING_SLOTS, self.mesh, draft_length)

    def compile(self, function, *arguments) -> tuple[ahead_of_time.Compilation, HloProgram]:
        if (reason := ahead_of_time.missing_compiler(self.chip)) is not None:
            pytest.skip(reason)
        found = ahead_of_time.compile_for(self.chip, function, *arguments, chip_mesh=self.mesh)
        return found, HloProgram(found.program.as_text())


SPECULATIONS = [
    *(
        pytest.param(speculation, marks=pytest.mark.slow)
        for speculation in (
            Speculation("v6e", 1, 1, 1, chain(2), (NARROW, NARROW_DRAFT)),
            Speculation("v6e", 1, 2, 1),
            Speculation("v5e", 4, 2, 1),
            Speculation("v6e", 1, 2, 1, TokenTree((2, 2))),
            Speculation("v5e", 4, 2, 1, TokenTree((2, 2))),
            Speculation("v6e", 1),
            Speculation("v5e", 4),
        )
    ),
]


@pytest.mark.parametrize("case", SPECULATIONS, ids=str)
@pytest.mark.timeout(900)
def test_a_speculative_round_is_one_program_that_updates_all_in_place(case):
    """Drafting, verifying, accepting and going back lower as one call; nothing is made but rows of tokens."""
    (model, weights, cache), slots = case.model(case.config), case.slots(draft_length=CONTEXT)
    draft, draft_weights, draft_cache = case.model(case.draft_config)
    work = abstract_rounds(SPECULATING_SLOTS, PAGES)
    drafter = Drafter(ModelProposer(draft), case.tree)
    operands = (model, weights, drafter, draft_weights, cache, draft_cache, *slots, work, MAX_ROUNDS)
    memory, program = case.compile(speculate, *operands)
    carried = _num_bytes((cache, draft_cache, slots[0]))
    sizes = " and ".join(f"{_num_bytes(leaves):,}" for leaves in (weights, draft_weights))
    pages = " and ".join(f"{_num_bytes(leaves):,}" for leaves in (cache, draft_cache))
    print(
        f"{memory.seconds:.1f} s to compile; bytes of one chip: {sizes} of weights, {pages} of pages; "
        f"{memory.aliased_bytes:,} aliased, {memory.temporary_bytes:,} temporaries"
    )
    assert memory.aliased_bytes >= carried
    smallest_pages = min(_num_bytes(layer) for layer in (*cache.layers, *draft_cache.layers))
    smallest = min(smallest_pages, *(_num_bytes(leaf) for leaf in weights if leaf.ndim == 2))
    num_rows = SPECULATING_SLOTS * case.tree.num_nodes
    large = [i for i in made_in_hbm(program, at_least=smallest) if not has_rows(i, SPECULATING_SLOTS, num_rows)]
    assert [i.name for i in large if not is_eviction(i)] == []
    wide = 4 * SPECULATING_SLOTS * case.config.vocab_size // case.num_devices
    rows = 2 * num_rows * (case.config.hidden_size + case.config.intermediate_size // case.num_devices)
    # Beside the sampler's arrays the logits of all nodes, and what the compiler counts for each layer: 1.5 MB where, as
    # seen above, nothing large is made.
    num_layers = case.num_layers + case.num_draft_layers
    assert memory.temporary_bytes < (WIDE_ARRAYS + case.tree.num_nodes) * wide + 8 * rows + 2**21 * num_layers


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("chip", "num_devices"), [("v6e", 1), ("v5e", 4)])
def test_verifying_moves_little_more_than_decoding_one_token(chip, num_devices):
    """The target's pass over 5 tokens of each of 16 sequences, and choosing at each of the 5 nodes, against a step of
    plain decoding: the same weights and pages are read once."""
    case = Speculation(chip, num_devices)
    (model, weights, cache), slots = case.model(case.config), case.slots()
    counts, tables = abstract_array(jnp.int32, SPECULATING_SLOTS), abstract_tables(SPECULATING_SLOTS, PAGES, 1)
    work = abstract_decode_work(SPECULATING_SLOTS, PAGES)
    decoding = case.compile(paged_programs.decode, model, weights, cache, *slots, work, MAX_STEPS)
    tokens = abstract_array(jnp.int32, SPECULATING_SLOTS, case.tree.num_nodes)
    operands = (model, weights, Drafter(ModelProposer(model), case.tree), cache, *slots, tokens, counts, counts, tables)
    verifying = case.compile(verify_and_choose, *operands)
    # The choice at the nodes is the one loop.
    step, verified = (
        sum(move.num_bytes for move in program.moves(loop_trips=trips))
        for (_, program), trips in ((decoding, 1), (verifying, case.tree.num_nodes))
    )
    print(f"bytes of one chip: {step:,} moved by a step, {verified:,} by verifying: {verified / step:.4f}")
    assert verified <= 1.05 * step
    embedding = max(_num_bytes(leaf) for leaf in weights if leaf.ndim == 2)
    read_bytes = _num_bytes(cache) * SPECULATING_SLOTS * PAGES // SPECULATING_PAGES[chip]
    assert step > _num_bytes(weights) - embedding + read_bytes


@partial(jax.jit, static_argnums=(0, 2), donate_argnums=3)
def verify_and_choose(model: ProgramModel, weights, drafter, cache, slots, batch, tokens, num_nodes, positions, tables):
    """The target's part of a round: all nodes in one pass, then at each the logits and the sampler."""
    target = model.bind(weights)
    rows = DraftRows(positions, num_nodes > 0, num_nodes, tables, batch, slots.history)
    nodes = all_rows(num_nodes, tokens.shape[1])
    attend, hidden, _ = verify(target, model, cache, Proposal(tokens, num_nodes), rows, nodes, drafter)
    logits = target.logits(hidden).reshape(*tokens.shape, -1)

    def choose(node, chosen):
        samples = sample(logits[:, node], positions + node + 1, batch, slots.history)
        return chosen.at[node].set(samples.tokens)

    count = jnp.max(num_nodes)  # not a constant, so that the compiler does not unroll the loop
    return attend.cache, jax.lax.fori_loop(0, count, choose, jnp.zeros(tokens.shape[::-1], jnp.int32))


def is_eviction(instruction: Instruction) -> bool:
    """Whether it copies from vector memory back to HBM what the compiler kept there over a loop, as it does with a
    small weight or two of models of few layers."""
    return instruction.opcode == "copy-start" and not instruction.results[1].in_hbm


def has_rows(instruction: Instruction, *counts: int) -> bool:
    return all(array.shape[:1] in [(count,) for count in counts] for array in instruction.results if array.hbm_bytes)


def abstract_model(config: ModelConfig, num_pages: int, mesh=None):
    """The model, its weights and its pages in bfloat16, as a program takes them."""
    params = abstract.placed_params(config, abstract_params(config, jnp.bfloat16), mesh)
    cache = abstract_paged_cache(config, num_pages, PAGE, jnp.bfloat16, "interleaved", mesh)
    return *program_model(config, params, mesh), cache


def abstract_slots(config: ModelConfig, num_slots: int, mesh=None, draft_length: int | None = None):
    """Slots and sampling parameters."""
    return abstract.abstract_slots(num_slots, config.vocab_size, mesh, draft_length)


def test_the_weights_of_a_loop_keep_their_tiles():
    """Otherwise each dispatch copies every bfloat16 weight."""
    if (reason := ahead_of_time.missing_compiler("tpu7x")) is not None:
        pytest.skip(reason)

    def steps(rows, weight, num_steps):
        return jax.lax.fori_loop(0, num_steps, lambda _, rows: jnp.tanh(rows @ weight), rows)

    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    arguments = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16), weight, jax.ShapeDtypeStruct((), jnp.int32)
    found = ahead_of_time.compile_for("tpu7x", LargeProgram(steps), *arguments)
    assert found.temporary_bytes < 2**20
