"""Bytes of a round of trained heads for Llama-3-8B, as the chips' compilers make it; and what is kept of taps."""

import re
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM
from jaxinfer.engine.abstract_work import abstract_rounds
from jaxinfer.engine.compiling import LargeProgram
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import DraftHeadConfig, ModelConfig, abstract_params
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import DraftRows, DraftState, HeadDraft, ObservedRows, head_for
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from tests.engine.test_policies import model_of
from tests.planning.plan_models import LLAMA_3_8B
from tests.speculative.tiny_heads import config_of, random_params

SLOTS, CONTEXT, LENGTH, WIDE_ARRAYS = 4, 1024, 4, 16
_BASE = replace(LLAMA_3_8B, num_layers=1, tie_word_embeddings=False)
EAGLE3 = replace(_BASE, draft_head=DraftHeadConfig("eagle3", tap_size=4096, vocab_size=32000, has_lm_head=True))
DFLASH = replace(
    _BASE,
    num_layers=5,
    qk_norm=True,
    draft_head=DraftHeadConfig("dflash", tap_size=4096, block_size=LENGTH + 1, mask_token=5),
)
# Narrow ones for `make test`.
NARROW = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
NARROW |= {"vocab_size": 16384, "rope": replace(LLAMA_3_8B.rope, rotary_dim=64)}


def narrowed(config: ModelConfig) -> ModelConfig:
    head: Any = config.draft_head
    size = {} if head is None else {"draft_head": replace(head, tap_size=1024, vocab_size=head.vocab_size and 8192)}
    return replace(config, **NARROW, **size)


def spec_of(head: ModelConfig, target: ModelConfig, chip: str) -> EngineSpec:
    own: Any = head.draft_head
    config, taps = head_for(replace(head, draft_head=replace(own, has_draft_index=own.vocab_size is not None)), target)
    draft = HeadDraft("head", config, abstract_params(config, "bfloat16"), taps)
    options = EngineOptions(max_seqs=SLOTS, max_model_len=CONTEXT, num_draft_tokens=LENGTH)
    platform = "gpu" if chip == "h100" else "tpu"
    return EngineSpec(target, abstract_params(target, "bfloat16"), options, platform, draft=draft, chip=chip)


@partial(LargeProgram, static_argnums=(0, 1), donate_argnums=3)
def drafting(drafter, vocab_size, weights, own, slots, batch, work):
    """The draft's part of a round: what it proposes."""
    proposer = drafter.proposer.bind(weights, vocab_size, False)
    rows = DraftRows(slots.positions, slots.is_active, 1 + work.num_drafts, work.page_tables, batch, slots.history)
    state, proposal = proposer.propose(DraftState(own, own, slots.draft), rows, drafter.tree)
    return state.own, proposal.tokens


@partial(LargeProgram, static_argnums=(0, 1), donate_argnums=3)
def observing(drafter, vocab_size, weights, own, tokens, positions, starts, lengths, slots, tables, taps):
    """The draft's part of a round after it: what it stores of the accepted tokens."""
    rows = ObservedRows(tokens, positions, starts, lengths, slots, starts, tables, taps)
    return drafter.proposer.bind(weights, vocab_size, False).observe(own, rows)


def moved(chip: str, function, *arguments, trips: int) -> int:
    """Bytes that one run moves, without an array that a TPU fetches to its vector memory before the program begins: of
    an embedding that fits there, rows are read."""
    found = ahead_of_time.compile_for(chip, function, *arguments)
    moves = HloProgram(found.program.as_text()).moves(loop_trips=trips)
    return sum(move.num_bytes for move in moves if "cross_program_prefetch_index" not in move.instruction.text)


@pytest.mark.slow
@pytest.mark.matrix("v6e-eagle3-narrow", "h100-dflash-narrow")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", ["narrow", pytest.param("8b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", [EAGLE3, DFLASH], ids=["eagle3", "dflash"])
@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_a_round_reads_the_head_once_for_each_token_or_block(chip, head, size):
    """At most 1.05 of the head's weights for each token that it drafts, or for a block, with the vocabulary's."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    target, head = (LLAMA_3_8B, head) if size == "8b" else (narrowed(LLAMA_3_8B), narrowed(head))
    spec = spec_of(head, target, chip)
    ((config, params),) = spec.draft_models
    model, weights = program_model(config, spec.placed_draft)
    drafter, own = spec.drafters(model)[len(spec.trees) - 1], spec.draft_cache
    slots, batch = spec.slots
    work = abstract_rounds(SLOTS, spec.pages_per_sequence, 1, False)
    is_block = head.draft_head.is_block
    count = LENGTH if not is_block else 1
    read = num_bytes(params["layers"]) + num_bytes(params["final_norm"])
    vocabulary = num_bytes(params["lm_head"])
    pages = num_bytes(own) * SLOTS * spec.pages_per_sequence // spec.num_pages
    total = moved(chip, drafting, drafter, config.vocab_size, weights, own, slots, batch, work, trips=count)
    needed = count * (read + vocabulary)
    rows, shape = SLOTS * (LENGTH + 1), jax.ShapeDtypeStruct
    numbers = [shape((size,), jnp.int32) for size in (rows, rows, SLOTS, SLOTS, SLOTS)]
    taps = {name: shape((rows, target.hidden_size), jnp.bfloat16) for name in drafter.proposer.taps}
    tables = shape((SLOTS, spec.pages_per_sequence), jnp.int32)
    stored = moved(chip, observing, drafter, config.vocab_size, weights, own, *numbers, tables, taps, trips=1)
    # The projection of the taps, keys and values, on a GPU queries which lie beside them, and rows: nothing of the
    # cache is copied.
    names = ("k_proj", "v_proj", *(("q_proj",) if chip == "h100" else ()))
    layers = [layer["attention"] for layer in params["layers"].values()]
    projected = num_bytes((params["taps_proj"], [layer[name] for layer in layers for name in names]))
    # Arrays of the sampler over the vocabulary, which beside a narrow model are not small.
    wide = 0 if size == "8b" else 4 * WIDE_ARRAYS * SLOTS * target.vocab_size * LENGTH
    print(
        f"{chip}: drafting moves {total:,} for {needed:,} of weights ({(total - count * pages) / needed:.3f} without "
        f"{count * pages:,} of pages), observing {stored:,} for {projected:,}"
    )
    assert total <= 1.05 * needed + count * pages + wide
    assert stored <= 1.05 * projected + 2 * rows * (8 * len(taps) + 4 * config.num_layers) * target.hidden_size


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_no_copy_of_taps_is_larger_than_a_round(kind):
    """Hidden states and their concatenation have a row for each token of a round, [slots, drafts + 1, states * D]."""
    target, num_slots = model_of((None, None, None)), 8
    width, config = target[0].hidden_size, config_of(kind, target[0])
    options = {"max_seqs": num_slots, "num_draft_tokens": LENGTH, "max_model_len": 128, "page_size": 8}
    with LLM(target, draft=(config, random_params(config)), **options) as llm:
        name = f"speculation of {LENGTH + 1} tokens, {num_slots} slots"
        (program,) = [one for one in llm.engine.runner.all_programs if one.name == name]
        text = program.lower().as_text()
    shapes = {tuple(map(int, shape.split("x")[:-1])) for shape in re.findall(r"tensor<((?:\d+x)+)f32>", text)}
    # An embedding has as many rows as there are tokens.
    sizes = {shape: prod(shape) for shape in shapes if shape[-1] in (width, 3 * width)}
    sizes = {shape: size for shape, size in sizes.items() if shape[0] != target[0].vocab_size}
    assert max(sizes.values()) == num_slots * (LENGTH + 1) * 3 * width, sizes
    assert max(size for shape, size in sizes.items() if len(shape) == 2 and shape[-1] == width) < max(sizes.values())
