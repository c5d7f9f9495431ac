"""A pass over the states of all slots as a GPU's compiler makes it: 64 sequences of Qwen3-Next, or of Mamba 2."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from pallas_kernels.recurrence import RaggedBatch, RecurrentTokens, linear_recurrence

SLOTS = 64
# Key heads, heads, and their width; keys have 128.
HEADS = {"gated_delta": (16, 32, 128), "ssd": (8, 128, 64)}
# Bytes moved over those of states that are read and written once, by the tokens of a sequence: products read states
# once and the update reads and writes them, 1.5; the rest are the tokens, and results before they are joined.
MOST_MOVED = {("gated_delta", 1): 1.6, ("ssd", 1): 1.6, ("gated_delta", 4): 2.1}


def moved_states(chip: str, kind: str, num_tokens: int) -> tuple[float, float]:
    """Bytes that the program moves and holds as temporaries, of those of states that are read and written once."""
    num_key_heads, num_heads, width = HEADS[kind]
    rows = SLOTS * num_tokens

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    keys, values, heads = array(rows, num_key_heads, 128), array(rows, num_heads, width), array(rows, num_heads)
    tokens = RecurrentTokens(keys, keys, values, heads, heads if kind == "gated_delta" else None)
    state = array(SLOTS, num_key_heads, 128, num_heads // num_key_heads * width)
    batch = RaggedBatch(*[array(SLOTS, dtype=jnp.int32)] * 3)
    run = partial(linear_recurrence, max_query_length=num_tokens, short_tokens=num_tokens)
    found = ahead_of_time.compile_for(chip, run, tokens, state, batch, donate_argnums=1)
    least = 2 * 4 * state.size
    moved = sum(move.num_bytes for move in HloProgram(found.program.as_text()).moves())
    return moved / least, found.temporary_bytes / least
