"""The passes in which a draft model drafts a chain, with a model that adds one to each token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import SamplingParams, SamplingRow, make_batch, make_state
from jaxinfer.speculative import DraftRows, DraftSlots, chain, proposers

VOCAB, COUNT, LENGTH = 32, 3, 16


@dataclass(frozen=True)
class _Pass:
    """Stands for attention: keeps what is stored where."""

    cache: tuple

    @classmethod
    def of(cls, cache, page_tables, starts, lengths, ends, **options):
        passes = (*cache, (np.asarray(lengths).tolist(), np.asarray(ends).tolist(), options["max_query_length"]))
        return cls(passes)


class _AddsOne:
    """A model whose next token is one more than the newest."""

    is_maximal = False

    @staticmethod
    def decoder(tokens, positions, attend):
        return tokens[:, None].astype(jnp.float32)

    @staticmethod
    def logits(hidden):
        return jax.nn.one_hot(hidden[:, 0].astype(jnp.int32) + 1, VOCAB)

    mesh = None


@pytest.mark.parametrize(
    ("may_lack_one", "num_drafted", "passes"),
    [
        (True, (5, 8), [([1, 1], [6, 9], 2), ([1, 1], [7, 10], 1), ([1, 1], [8, 11], 1)]),
        (True, (4, 8), [([2, 1], [6, 9], 2), ([1, 1], [7, 10], 1), ([1, 1], [8, 11], 1)]),
        (False, (5, 8), [([1, 1], [6, 9], 1), ([1, 1], [7, 10], 1), ([1, 1], [8, 11], 1)]),
    ],
)
def test_a_chain_takes_as_many_passes_as_it_has_drafts(monkeypatch, may_lack_one, num_drafted, passes):
    monkeypatch.setattr(proposers, "attend_ragged", _Pass.of)
    sequence = jnp.asarray(np.tile(np.arange(10, 10 + LENGTH, dtype=np.int32), (2, 1)))
    sequence = sequence.at[0, 6:].set(0).at[1, 9:].set(0)  # what is not known yet
    batch = make_batch([SamplingRow(SamplingParams(temperature=0), 0)] * 2, VOCAB)
    rows = DraftRows(
        jnp.array([5, 8]), jnp.ones(2, bool), jnp.full(2, COUNT + 1), (jnp.zeros((2, 1), jnp.int32),), batch,
        make_state([None] * 2, VOCAB),
    )  # fmt: skip
    draft = DraftSlots(sequence, jnp.array(num_drafted))
    with jax.disable_jit():
        stored, after, proposal = proposers.propose_chain(
            _AddsOne(), (), draft, rows, chain(COUNT), may_lack_one=may_lack_one
        )
    assert list(stored) == passes
    assert np.asarray(after.num_drafted).tolist() == [8, 11]
    assert np.asarray(proposal.tokens).tolist() == [[15, 16, 17, 18], [18, 19, 20, 21]]
