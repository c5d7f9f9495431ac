"""The history: advancing it is the same as building it, rewinding the same as never having advanced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling.state import NUM_RECENT, advance, make_state, rewind

S, V, K = 3, 11, 4
step = jax.jit(advance)
back = jax.jit(rewind)
tokens = st.integers(0, V - 1)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(tokens, max_size=5), min_size=S, max_size=S),
    st.lists(st.lists(tokens, max_size=25), min_size=S, max_size=S),
)
def test_advancing_gives_the_state_built_from_all_tokens(prompts, outputs):
    """Rows of different lengths: a row that is done stays as it is."""
    state = make_state(prompts, V)
    for i in range(max(map(len, outputs))):
        is_active = np.array([i < len(output) for output in outputs])
        # The token of an inactive row is arbitrary, even one that no row may have.
        next_tokens = np.array([output[i] if i < len(output) else V + 3 for output in outputs], np.int32)
        state = step(state, next_tokens, is_active)
    assert equal(state, make_state(prompts, V, outputs))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(tokens, max_size=20), min_size=S, max_size=S),
    st.lists(st.lists(tokens, min_size=K, max_size=K), min_size=S, max_size=S),
    st.lists(st.integers(0, K), min_size=S, max_size=S),
    st.lists(st.integers(0, K), min_size=S, max_size=S),
)
def test_rewinding_gives_the_state_of_the_tokens_kept(outputs, drafts, num_drafts, num_kept):
    """Rows with fewer drafts than others, some with none, as in a mixed batch."""
    num_kept = [min(pair) for pair in zip(num_kept, num_drafts, strict=True)]
    earlier = state = make_state([[1]] * S, V, outputs)
    padded = np.array([d[:n] + [V] * (K - n) for d, n in zip(drafts, num_drafts, strict=True)], np.int32)
    for i in range(K):
        state = step(state, padded[:, i], padded[:, i] < V)
    state = back(state, earlier, padded, np.array(num_kept, np.int32))
    kept = [output + d[:n] for output, d, n in zip(outputs, drafts, num_kept, strict=True)]
    assert equal(state, make_state([[1]] * S, V, kept))


def test_a_state_is_what_it_says():
    state = make_state([[1, 1, 2], None], V, [[3, 3, 4], []])
    assert np.flatnonzero(state.prompt_mask[0]).tolist() == [1, 2]
    assert {i: int(n) for i, n in enumerate(state.output_counts[0]) if n} == {3: 2, 4: 1}
    assert state.num_output.tolist() == [3, 0]
    assert state.recent[0].tolist() == [V] * (NUM_RECENT - 3) + [3, 3, 4]
    assert not state.prompt_mask[1].any()
    assert not state.output_counts[1].any()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"int32", "bool"}


@pytest.mark.parametrize(("prompts", "outputs"), [([[V]], None), ([[-1]], None), ([[0]], [[V]])])
def test_a_token_outside_the_vocabulary_raises(prompts, outputs):
    with pytest.raises(ValueError, match="the vocabulary has 11 tokens"):
        make_state(prompts, V, outputs)


def test_prompts_and_outputs_must_be_as_many():
    with pytest.raises(ValueError, match="2 prompts and 1 outputs"):
        make_state([[0], [1]], V, [[0]])


def test_advancing_is_in_place():
    tokens, is_active = jnp.zeros(S, jnp.int32), jnp.ones(S, bool)
    in_place = jax.jit(advance, donate_argnums=0)
    state = in_place(jax.device_put(make_state([[0]] * S, V)), tokens, is_active)
    address = state.output_counts.unsafe_buffer_pointer()
    state = in_place(state, tokens, is_active)
    assert state.output_counts.unsafe_buffer_pointer() == address
    memory = in_place.lower(state, tokens, is_active).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state))
