"""Trained heads without an engine: what they store and draft in pages is what the tokens and the target's states give,
however passes cut them. Oracle: dense attention (tests/speculative/tiny_heads.py). Inverse tests plant faults."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import init_paged_cache
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import DraftHeadConfig, abstract_params, bind_draft_head, init_params
from jaxinfer.models.draft_head import DraftHead, Markov, Selector
from jaxinfer.sampling import (
    SamplingParams,
    SamplingRow,
    advance,
    choose_several,
    make_batch,
    make_state,
    sample,
    transform,
)
from jaxinfer.speculative import DraftRows, DraftSlots, DraftState, HeadDraft, ObservedRows, chain, head_for, heads
from jaxinfer.speculative.maximal import DRAFT_STREAM
from pallas_kernels.paged_attention.layout import gather, page_shape
from tests.pallas_kernels.quick import quick
from tests.speculative import tiny_heads
from tests.speculative.tiny_heads import KINDS, MASK, TOKENS, config_of, random_params
from tests.tiny import TINY

TARGET = replace(TINY, num_layers=3)
PAGE, LENGTH, COUNT = 4, 48, 4  # tokens of a page and of the longest sequence; drafts of a round
TREE = chain(COUNT)
PARAMS = (
    SamplingParams(temperature=0, frequency_penalty=2.0),
    SamplingParams(temperature=0.9, seed=5, logit_bias={3: 2.0}),
    SamplingParams(temperature=1.2, seed=6, allowed_token_ids=TOKENS[:30]),
)
SEEDS = (0, 5, 6)


@cache
def target_params() -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(TARGET, jax.random.key(1)))


def draft_of(name: str, **more: Any) -> HeadDraft:
    config = config_of(name, TARGET, **more)
    own, taps = head_for(config, TARGET)
    return HeadDraft(name, own, random_params(config), taps)


class Pages:
    """A head's pages, of three sequences with random tokens and states. The third begins as the first, whose pages it
    has found."""

    num_shared = 2 * PAGE + 1  # the pair of the shared pages' last state has the token after it

    def __init__(self, draft: HeadDraft, *, is_maximal: bool = False):
        numbers = np.random.default_rng(3)
        self.draft, self.is_maximal = draft, is_maximal
        ((self.config, self.params),) = draft.models(TARGET, target_params())
        self.tokens = numbers.integers(0, TARGET.vocab_size, (3, LENGTH)).astype(np.int32)
        self.tokens[2, : self.num_shared] = self.tokens[0, : self.num_shared]
        self.taps = {
            name: numbers.normal(0, 1, (3, LENGTH, TARGET.hidden_size)).astype(np.float32) for name in draft.taps
        }
        for values in self.taps.values():
            values[2, : self.num_shared - 1] = values[0, : self.num_shared - 1]
        per_sequence = LENGTH // PAGE
        self.table = numbers.permutation(3 * per_sequence).astype(np.int32).reshape(3, per_sequence) + 1
        self.table[2, : self.num_shared // PAGE] = self.table[0, : self.num_shared // PAGE]
        carried = draft.carried(5)  # more slots than run
        # As an earlier sequence left them that ended where the third one begins.
        states: Any = jax.tree.map(lambda leaf: jnp.full(leaf.shape, self.num_shared - 1, leaf.dtype), carried)
        self.own = replace(init_paged_cache(self.config, 3 * per_sequence + 1, PAGE, "float32"), states=states)
        self.lengths, self.found = np.array([0, 0, self.num_shared - 1], np.int32), (0, 0, self.num_shared - 1)
        model, self.weights = program_model(self.config, self.params)
        proposer = draft.proposer(model)

        def bind(weights):
            return proposer.bind(weights, TARGET.vocab_size, is_maximal)

        self._observe = jax.jit(lambda weights, own, rows: bind(weights).observe(own, rows))
        self._propose = jax.jit(lambda weights, state, rows: bind(weights).propose(state, rows, TREE))

    def observe(self, *counts: int, order: tuple[int, ...] = (0, 1, 2), num_rows: int = 40) -> None:
        """Passes so many more tokens of each sequence, in this order."""
        tokens, positions = np.zeros((2, num_rows), np.int32)
        taps = {name: np.full((num_rows, TARGET.hidden_size), 9, np.float32) for name in self.taps}
        starts, row = np.zeros(3, np.int32), 0
        for place, sequence in enumerate(order):
            start, count = self.lengths[sequence], counts[sequence]
            here, there = slice(row, row + count), slice(start, start + count)
            tokens[here], positions[here] = self.tokens[sequence, there], np.arange(start, start + count)
            for name, values in self.taps.items():
                taps[name][here] = values[sequence, there]
            starts[place], row = row, row + count
        by_place = list(order)
        self.own = self._observe(
            self.weights,
            self.own,
            ObservedRows(
                *(tokens, positions, starts, np.array(counts, np.int32)[by_place], np.array(order, np.int32)),
                *(np.array(self.found, np.int32)[by_place], self.table[by_place], taps),
            ),
        )
        self.lengths += np.array(counts, np.int32)

    def propose(self, *num_nodes: int):
        """Drafts of all sequences after what they have, int32 [3, COUNT], and their scores."""
        batch = make_batch([SamplingRow(one, seed) for one, seed in zip(PARAMS, SEEDS, strict=True)], TARGET.vocab_size)
        state = DraftState(None, self.own, DraftSlots(self.tokens, np.array(self.found, np.int32)))
        rows = DraftRows(
            self.lengths, np.array(num_nodes) > 0, np.array(num_nodes, np.int32), (self.table,), batch, self.history
        )
        (_, self.own, _), proposal = self._propose(self.weights, state, rows)
        assert np.array_equal(proposal.num_nodes, num_nodes)
        assert np.array_equal(proposal.tokens[:, 0], self.tokens[np.arange(3), self.lengths])
        self.chances = proposal.chances
        return np.asarray(proposal.tokens)[:, 1:], proposal.scores

    @property
    def history(self):
        prompts = [row[: end + 1].tolist() for row, end in zip(self.tokens, self.lengths, strict=True)]
        return make_state([one[:1] for one in prompts], TARGET.vocab_size, [one[1:] for one in prompts])

    def expected(self, sequence: int, num_nodes: int):
        """The draft tokens, and their scores, that tokens and states alone give."""
        row = SamplingRow(PARAMS[sequence], SEEDS[sequence])
        history = jax.tree.map(lambda leaf: leaf[sequence : sequence + 1], self.history)
        taps = [values[sequence] for values in self.taps.values()]
        given = self.tokens[sequence], taps, self.lengths[sequence], np.int32(num_nodes)
        batch = make_batch([row], TARGET.vocab_size)
        tokens, scores = _expected(self.config, self.is_maximal, self.params, *given, batch, history)
        return tokens[: num_nodes - 1], scores[: num_nodes - 1]

    def stored_errors(self) -> float:
        """The most that a key or a value in the pages differs from what tokens and states give."""
        shape = self.config.num_kv_heads, self.config.head_dim
        largest = 0.0
        for sequence, length in enumerate(self.lengths):
            count = length - self.draft.num_ahead  # the newest state has no token after it
            taps = [values[sequence] for values in self.taps.values()]
            wanted = _stored(self.config, self.params, self.tokens[sequence], taps, self.draft.num_ahead)
            for pages, (keys, values) in zip(self.own.layers, wanted, strict=True):
                found = gather(pages, self.table[sequence], page_shape(pages, *shape))
                pairs = [(found.k, keys)] if found.v is None else [(found.k, keys), (found.v, values)]
                for one, other in pairs:
                    one = np.asarray(one).reshape(-1, *one.shape[-2:])[:count]
                    largest = max(largest, float(np.abs(one - np.asarray(other)[:count]).max()))
        return largest


@partial(jax.jit, static_argnums=(0, 1))
def _expected(config, is_maximal, params, tokens, taps, root, num_nodes, batch, history):
    head = bind_draft_head(config, params)

    def choose(number, logits, carry):
        history, all_scores = carry
        scores, position = transform(logits[None], batch, history), (root + number + 1)[None]
        if is_maximal:
            token = choose_several(scores, position, batch, 1, stream=DRAFT_STREAM)[:, 0]
        else:
            token = sample(logits[None], position, batch, history).tokens
        return token[0], (advance(history, token, jnp.ones(1, bool)), all_scores.at[number].set(scores[0]))

    carry = history, jnp.zeros((COUNT, TARGET.vocab_size))
    found, (_, scores) = tiny_heads.drafts(head, tokens, head.states(taps), root, num_nodes, choose, carry)
    return found, scores


@partial(jax.jit, static_argnums=(0, 4))
def _stored(config, params, tokens, taps, num_ahead):
    head = bind_draft_head(config, params)
    states = head.states(taps)
    return tiny_heads.stored(head, tokens, states[: len(states) - num_ahead])


def num_wrong(pages: Pages) -> int:
    """Runs passes and rounds; the wrong drafts of all rounds. Prompts come in pieces, then some drafts are accepted."""
    wrong, num_drafts = 0, 0
    pages.observe(13, 1, 0)
    pages.observe(1, 9, 12, order=(2, 0, 1))
    # Drafts of each row in a round, and what the target has of them afterwards with its own next token.
    for num_nodes, accepted in (((5, 5, 5), (1, 5, 3)), ((5, 3, 1), (4, 1, 1)), ((2, 0, 5), (1, 0, 2))):
        drafted, scores = pages.propose(*num_nodes)
        for sequence, nodes in enumerate(num_nodes):
            if nodes < 2:
                continue
            tokens, wanted = pages.expected(sequence, nodes)
            is_wrong = drafted[sequence, : nodes - 1] != tokens
            if pages.is_maximal:
                is_wrong |= ~np.isclose(scores[sequence, : nodes - 1], wanted, rtol=1e-3, atol=1e-3).all(axis=1)
            wrong += int(is_wrong.sum())
            num_drafts += nodes - 1
        pages.observe(*accepted)
    pages.observe(3, 3, 3, order=(1, 2, 0))
    assert num_drafts == 23
    return wrong


@pytest.mark.matrix("eagle3 wide", "mtp", "dflash", "dflash mutual window", "dflash2", "dspark rnn")
@pytest.mark.parametrize("name", KINDS)
def test_drafts_scores_and_pages_follow_from_tokens_and_states(name):
    pages = Pages(draft_of(name), is_maximal=True)
    assert num_wrong(pages) == 0
    assert pages.stored_errors() < 1e-4


@pytest.mark.parametrize("name", quick(KINDS, "eagle3 wide"))
def test_drafts_have_the_noise_of_the_targets_tokens(name):
    assert num_wrong(Pages(draft_of(name))) == 0


def test_a_head_tells_how_likely_each_draft_is_accepted():
    """By its state and the token before: with weights for that alone, the chances follow from the tokens."""
    draft = draft_of("dspark rnn")
    own = dict(draft.params)
    width, weight = draft.config.hidden_size, own["confidence_proj"]["weight"]
    own["confidence_proj"] = {"weight": weight.at[:width].set(0) * 40, "bias": jnp.full((1,), 0.5)}
    pages = Pages(replace(draft, params=own))
    pages.observe(13, 9, 12)
    drafted, _ = pages.propose(5, 5, 5)
    before = np.concatenate([pages.tokens[np.arange(3), pages.lengths][:, None], drafted[:, :-1]], axis=1)
    embeddings = np.asarray(pages.params["markov"]["embed"])[before]
    logits = embeddings @ np.asarray(own["confidence_proj"]["weight"])[width:, 0] + 0.5
    wanted = 1 / (1 + np.exp(-logits))
    assert np.std(wanted) > 0.05
    np.testing.assert_allclose(pages.chances, wanted, atol=1e-5)
    other = Pages(draft_of("dflash2"))
    other.observe(13, 9, 12)
    other.propose(5, 5, 5)
    assert other.chances is None


# Inverse tests: what would be wrong.


def exchange(observe, **changed):
    """`observe` of rows with some fields changed."""
    return lambda self, own, rows: observe(self, own, rows._replace(**{k: f(rows) for k, f in changed.items()}))


def plant_states_of_other_tokens(monkeypatch):
    def shifted(rows):
        return {name: jnp.roll(values, 1, axis=0) for name, values in rows.taps.items()}

    for kind in (heads._BoundPairs, heads._BoundBlocks):
        monkeypatch.setattr(kind, "observe", exchange(kind.observe, taps=shifted))


def plant_pairs_with_their_own_token(monkeypatch):
    kind = heads._BoundPairs
    monkeypatch.setattr(kind, "observe", exchange(kind.observe, tokens=lambda rows: jnp.roll(rows.tokens, 1)))


def plant_places_that_are_ids(monkeypatch):
    def of_target(head, logits):
        missing = head.config.vocab_size - logits.shape[-1]
        return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)

    monkeypatch.setattr(DraftHead, "of_target", of_target)


def plant_causal_blocks(monkeypatch):
    attention = heads.PagedAttention
    monkeypatch.setattr(heads, "PagedAttention", lambda *args, ancestors=None, **kwargs: attention(*args, **kwargs))


def plant_a_memory_without_the_root(monkeypatch):
    call, is_first = Markov.__call__, iter([True])

    def forgetful(self, state, before, hidden):
        following, bias = call(self, state, before, hidden)
        return (state if next(is_first, False) else following), bias

    monkeypatch.setattr(Markov, "__call__", forgetful)


def plant_the_root_before_each_draft(monkeypatch):
    """The selector has the root for the token before, whichever draft it chooses."""
    call, roots, newest = Selector.__call__, heads._roots, []
    monkeypatch.setattr(heads, "_roots", lambda state, rows: newest.append(roots(state, rows)) or newest[-1])
    monkeypatch.setattr(Selector, "__call__", lambda self, logits, states, _: call(self, logits, states, newest[-1]))


FAULTS = {
    plant_states_of_other_tokens: "eagle3 wide",
    plant_pairs_with_their_own_token: "mtp",
    plant_places_that_are_ids: "eagle3 wide",
    plant_causal_blocks: "dflash",
    plant_a_memory_without_the_root: "dspark rnn",
    plant_the_root_before_each_draft: "dflash2",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_noticed(plant, monkeypatch):
    pages = Pages(draft_of(FAULTS[plant]), is_maximal=True)
    pages.expected(0, 5)  # traces what is right
    plant(monkeypatch)
    assert num_wrong(pages) > 3


# What a head is to an engine.


def test_what_a_draft_says_of_its_head():
    pairs, block, rooted = (draft_of(name) for name in ("eagle3", "dflash", "dspark"))
    assert (pairs.max_drafts, block.max_drafts, rooted.max_drafts) == (None, 4, 4)
    assert (pairs.lengths, block.lengths, rooted.lengths) == ((2, 4, 8), (2, 4), (2, 4))
    assert (pairs.num_ahead, block.num_ahead) == (1, 0)
    assert (pairs.drafts_at_once, block.drafts_at_once) == (False, True)
    assert all(draft.observes and not draft.has_branches for draft in (pairs, block, rooted))
    assert (pairs.taps, draft_of("mtp").taps) == (
        ("embed", "layers.1.residual", "layers.2.residual"),
        ("final_norm",),
    )
    carried = pairs.carried(7)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in carried.items()} == {
        "state": ((7, TARGET.hidden_size), jnp.float32),
        "end": ((7,), jnp.int32),
    }
    assert block.carried(7) is None


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_a_head_lacks_is_the_targets(is_tied):
    target = replace(TARGET, tie_word_embeddings=is_tied)
    params = init_params(target, jax.random.key(0))
    own, taps = head_for(config_of("eagle3"), target)
    ((config, whole),) = HeadDraft("head", own, random_params(own), taps).models(target, params)
    assert config.tie_word_embeddings == is_tied
    assert whole["embed"] is params["embed"]
    assert ("lm_head" in whole) == (not is_tied)
    tokens, states = jnp.arange(5), jnp.ones((4, TARGET.hidden_size))
    head = bind_draft_head(config, whole)
    hidden, _ = head.pairs(tokens[1:], states, jnp.arange(4), tiny_heads.Causal())
    wanted = hidden @ (params["embed"].T if is_tied else params["lm_head"])
    np.testing.assert_allclose(head.of_target(head.logits(hidden)), wanted, rtol=1e-5, atol=1e-5)


def test_only_tokens_of_its_vocabulary_are_drafted():
    """Logits of the others are -inf, and each of its own is at the token that it is of."""
    ((config, params),) = draft_of("dflash at root").models(TARGET, target_params())
    logits = jnp.arange(1.0, len(TOKENS) + 1)[None]
    wanted = np.full((1, TARGET.vocab_size), -np.inf)
    wanted[0, TOKENS] = logits[0]
    np.testing.assert_array_equal(bind_draft_head(config, params).of_target(logits), wanted)


def test_logits_are_scaled_as_the_targets():
    target = replace(TARGET, logit_scale=0.5, logit_softcap=3.0)
    own, _ = head_for(config_of("eagle3"), target)
    assert (own.logit_scale, own.logit_softcap) == (0.5, 3.0)


TIED = replace(TARGET, tie_word_embeddings=True)
OTHERS = {
    "width": ("eagle3", replace(TARGET, hidden_size=48), r"width 32, .* 48"),
    "own width": ("eagle3 narrow", TARGET, r"takes the target's embedding and head, of width 32, .* own width is 24"),
    "tokens": ("eagle3", replace(TARGET, vocab_size=99), r"for 97 tokens, and the target has 99"),
    "layers": ("eagle3", replace(TARGET, num_layers=2), r"layers 0, 2, 3 .* the target has layers 0 to 1"),
    "tied head": ("eagle3 embedding", TIED, r"own embedding and takes the target's head"),
    "no head": ("none", TARGET, r"LlamaForCausalLM is no head that drafts"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_head_for_another_target_is_refused(name):
    kind, target, message = OTHERS[name]
    config = config_of("eagle3", TARGET)
    if kind == "eagle3 narrow":
        config = replace(config, hidden_size=24)
    elif kind == "eagle3 embedding":
        config = replace(config, draft_head=replace(config.draft_head, has_embedding=True))
    elif kind == "none":
        config = TARGET
    with pytest.raises(ValueError, match=message):
        head_for(config, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "eagle2"}, "kind must be one of eagle3, mtp, dflash, got 'eagle2'"),
        ({"kind": "dflash", "markov_kind": "lstm"}, "markov_kind must be one of vanilla, gated, rnn"),
        ({"kind": "eagle3", "tap_layers": (1, 2)}, "2 tap_layers, and num_taps=3"),
        ({"kind": "eagle3", "tap_size": 0}, "tap_size=0 and num_taps=3 must be at least 1"),
        ({"kind": "dflash", "block_size": 1, "mask_token": MASK}, "block_size=1 must be 2 to 32"),
        ({"kind": "dflash", "block_size": 33, "mask_token": MASK}, "block_size=33 must be 2 to 32"),
        ({"kind": "dflash", "block_size": 4}, "needs a mask_token"),
        ({"kind": "dflash", **tiny_heads.BLOCK, "conv_size": 6}, "conv_size=6 is more than block_size=5"),
        (
            {"kind": "dflash", **tiny_heads.BLOCK, "confidence_has_token": True},
            "needs has_confidence and a markov_rank",
        ),
    ],
)
def test_a_head_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DraftHeadConfig(**{"tap_size": 32, **fields})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tree": (2, 2)}, r"draft='dflash' drafts a chain, it cannot fill draft_tree=\(2, 2\)"),
        ({"num_draft_tokens": 5}, r"num_draft_tokens=5: draft='dflash' drafts at most 4 tokens"),
        ({"draft_lengths": (2, 6)}, r"draft_lengths=6: draft='dflash' drafts at most 4 tokens"),
    ],
)
def test_what_an_engine_cannot_draft_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineSpec(TARGET, abstract_params(TARGET), EngineOptions(**options), "cpu", draft=draft_of("dflash"))
