"""Bytes that a layer of quantized experts moves when it decodes, by a chip's compiler."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from jaxinfer.chips import chips
from jaxinfer.models.experts import Experts, run_experts
from jaxinfer.quantization import quantize
from jaxinfer.quantization.on_device import laid_out
from jaxinfer.quantization.reads import MOST_READ
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram, through_cache
from tests.hbm import made_in_hbm

WIDTH, INNER = 2048, 768  # of Qwen3-30B-A3B


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def check_decoding(chip: str, recipe: str, num_tokens: int, num_experts: int, num_choices: int) -> None:
    """Asserts that a step moves at most 1.15 of the bytes of the experts that its tokens may choose, with many rows
    beside these, and that no projection of an expert is written in any form."""
    shapes = [(num_experts, WIDTH, INNER)] * 2 + [(num_experts, INNER, WIDTH)]
    stacks = [jax.eval_shape(partial(quantize, how=recipe), jax.ShapeDtypeStruct(s, jnp.bfloat16)) for s in shapes]
    with ahead_of_time.as_if_on(chip) as whole:

        def placed(one, layout):
            place = Format(layout, whole)
            return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place)  # pyright: ignore

        stacks = [laid_out(stack, "gpu" if chip.startswith("h") else "tpu", placed) for stack in stacks]
    x = jax.ShapeDtypeStruct((num_tokens, WIDTH), jnp.bfloat16)
    chosen, weights = (jax.ShapeDtypeStruct((num_tokens, num_choices), dtype) for dtype in (jnp.int32, jnp.float32))

    def layer(x, chosen, weights, *stacks):
        return run_experts(x, chosen, weights, Experts(*stacks), swiglu)

    found = ahead_of_time.compile_for(chip, layer, x, chosen, weights, *stacks)
    num_rows = num_tokens * num_choices
    num_chosen = min(num_experts, num_rows)  # a loop has a trip for each
    expert = sum(stack.num_bytes for stack in stacks) / num_experts
    program = HloProgram(found.program.as_text())
    moves = through_cache(program.moves(loop_trips=num_chosen), chips()[chip].l2_bytes or 0)
    moved = sum(move.num_bytes for move in moves)
    # Blocks of 8 rows, in float32: inputs, gate, up, and outputs of each, written and read.
    blocks = min(num_rows, num_chosen + num_rows // 8) * min(num_tokens, 8)
    rows = 2 * 4 * blocks * (2 * WIDTH + 2 * INNER)
    share, temporaries = moved / (num_chosen * expert), found.temporary_bytes / expert
    print(f"{chip} {recipe} {num_tokens} tokens, {num_choices} of {num_experts}: {share:.3f}, {temporaries:.2f} held")
    assert moved <= MOST_READ * num_chosen * expert + (rows if num_tokens > 8 else 0)
    matrices = (WIDTH, INNER), (INNER, WIDTH)
    made = made_in_hbm(program, at_least=WIDTH * INNER // 4)
    assert [one.name for one in made for array in one.results if array.shape[-2:] in matrices] == []
