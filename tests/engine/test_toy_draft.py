"""A draft in one file, plugged in without a change of the product: the proof of `Draft` and `Proposer`.

"taps:N" is a head as EAGLE-3's: it observes hidden states of three layers in every pass of the target, and stores keys
of its own of each state beside the token after it. One answer, whatever else happens; and what its pages hold follows
from the tokens alone: chunks, plain steps, rounds, prefix hits, preemption, moved slots, host memory.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_ragged
from jaxinfer.models import decoder
from jaxinfer.sampling import advance, mask_inactive_rows
from jaxinfer.speculative import (
    BoundProposer,
    Draft,
    DraftState,
    ObservedRows,
    Proposal,
    Proposer,
    draft_tokens_of,
    register_draft,
)
from jaxinfer.speculative import drafts as kinds
from pallas_kernels.paged_attention.layout import gather, page_shape
from tests.engine.test_policies import NUM_PROMPTS, PROMPTS, answers, check_everything, model_of, open_llm
from tests.engine.test_windows import check_idle
from tests.pallas_kernels.quick import quick

DRAFT, MAX_PAGES, TAPS = "taps:3", 32, ("layers.0.residual", "layers.1.residual", "layers.2.residual")


def head_params(config, seed: int) -> dict[str, Any]:
    width, keys = config.hidden_size, config.num_kv_heads * config.head_dim
    queries = config.num_heads * config.head_dim
    shapes = {"embed": (config.vocab_size, width), "fc": (3 * width, width), "o": (queries, width)}
    shapes |= {"q": (2 * width, queries), "k": (2 * width, keys), "v": (2 * width, keys)}
    shapes |= {"out": (3 * width, config.vocab_size)}
    numbers = np.random.default_rng(seed)
    found = {name: jnp.asarray(numbers.normal(0, size[0] ** -0.5, size), "float32") for name, size in shapes.items()}
    return {**found, "final_norm": {"weight": jnp.ones(width)}}


@dataclass(frozen=True, eq=False)
class TapsDraft(Draft):
    config: Any
    params: Any

    lengths: ClassVar[tuple[int, ...]] = (2, 4)
    has_branches: ClassVar[bool] = False
    observes: ClassVar[bool] = True
    num_ahead: ClassVar[int] = 1

    name = "taps"

    @property
    def own(self):
        return ((self.config, self.params),)

    def with_params(self, make):
        return TapsDraft(*make(self.config, self.params))

    def carried(self, num_slots: int) -> Any:
        state = jax.ShapeDtypeStruct((num_slots, self.config.hidden_size), jnp.float32)
        return {"state": state, "end": jax.ShapeDtypeStruct((num_slots,), jnp.int32)}

    def proposer(self, *models: Any) -> Proposer:
        return TapsProposer(models[0])


@dataclass(frozen=True)
class TapsProposer(Proposer):
    model: Any

    taps = TAPS

    def bind(self, weights, vocab_size: int, is_maximal: bool) -> BoundProposer:
        return BoundTaps(self.model.config, jax.tree.unflatten(self.model.structure, weights), is_maximal)


class BoundTaps(BoundProposer):
    """Slot i of its pages pairs state i with token i + 1."""

    def __init__(self, config, params, is_maximal: bool = False):
        self.config, self.params, self.is_maximal = config, params, is_maximal

    def states(self, taps) -> jax.Array:
        return jnp.concatenate([taps[name] for name in TAPS], axis=-1) @ self.params["fc"]

    def inputs(self, tokens, states) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The input, and its queries, keys and values."""
        x = jnp.concatenate([self.params["embed"][tokens], states], axis=-1)
        parts = (x @ self.params[name] for name in "qkv")
        return x, *(part.reshape(*part.shape[:-1], -1, self.config.head_dim) for part in parts)

    def observe(self, own, rows: ObservedRows):
        states, numbers = self.states(rows.taps), jnp.arange(rows.tokens.shape[0])
        inside = (numbers >= rows.starts[:, None]) & (numbers < (rows.starts + rows.lengths)[:, None])
        sequence = jnp.argmax(inside, axis=0)
        first = rows.positions.at[rows.starts].get(mode="clip")
        carried = jax.tree.map(lambda leaf: leaf[rows.slots], own.states)
        # Without its state, the slot before the first token stays as an earlier sequence left it.
        lacks = ((first == rows.num_found) | (carried["end"] != first)).astype(jnp.int32) * (rows.lengths > 0)
        is_first = numbers == rows.starts[sequence]
        before = jnp.where(is_first[:, None], carried["state"][sequence], jnp.roll(states, 1, axis=0))
        _, q, k, v = self.inputs(rows.tokens, before)
        lengths = rows.lengths - lacks
        table, ends = (rows.page_table,), jnp.where(lengths > 0, first + rows.lengths - 1, 0)
        attend = attend_ragged(replace(own, states=None), table, rows.starts + lacks, lengths, ends)
        attend(0, q, k, v, None)
        last = states.at[rows.starts + rows.lengths - 1].get(mode="clip")
        slots = jnp.where(rows.lengths > 0, rows.slots, own.states["end"].shape[0])
        new = {"state": last, "end": first + rows.lengths}
        kept = {name: leaf.at[slots].set(new[name], mode="drop") for name, leaf in own.states.items()}
        return replace(attend.cache, states=kept)

    def propose(self, state: DraftState, rows, tree):
        own, history, count = state.own, rows.history, rows.positions.shape[0]
        slots, scores = jnp.arange(count), []
        token = state.slots.sequence[slots, rows.positions]
        found, pages, hidden = [token], replace(own, states=None), own.states["state"][:count]
        for number in range(tree.num_nodes - 1):
            is_drafting = rows.is_active & (rows.num_nodes > number + 1)
            ends = jnp.where(is_drafting, rows.positions + number, 0)
            lengths = (is_drafting & (ends > 0)).astype(jnp.int32)
            attend = attend_ragged(pages, rows.page_tables[:1], slots, lengths, ends, max_query_length=1)
            hidden, logits = self.step(token, hidden, lambda *qkv, attend=attend: attend(0, *qkv, None))
            pages = attend.cache
            drafting = rows._replace(batch=mask_inactive_rows(rows.batch, is_drafting), history=history)
            tokens, transformed = draft_tokens_of(
                rows.positions + number + 1, logits, drafting, 1, is_maximal=self.is_maximal
            )
            token = tokens[:, 0]
            history = advance(history, token, is_drafting, rows.tables)
            found.append(token)
            scores.append(transformed)
        proposal = Proposal(jnp.stack(found, 1), rows.num_nodes, jnp.stack(scores, 1) if self.is_maximal else None)
        return DraftState(state.cache, replace(own, layers=pages.layers), state.slots), proposal

    def step(self, tokens, states, attend) -> tuple[jax.Array, jax.Array]:
        x, q, k, v = self.inputs(tokens, states)
        attended = attend(q, k, v).reshape(*x.shape[:-1], -1)
        hidden = states + attended @ self.params["o"]
        return hidden, jnp.concatenate([x, hidden], axis=-1) @ self.params["out"]


def pairs(llm: LLM, params, tokens: list[int]) -> np.ndarray:
    """The head's input [len(tokens) - 2, 2 D] of each state beside the token after it; by NumPy, which compiles nothing
    for each length."""
    taps = llm.engine.runner.hidden_states(tokens, TAPS)
    states = np.concatenate([taps[name] for name in TAPS], axis=-1) @ np.asarray(params["fc"])
    return np.concatenate([np.asarray(params["embed"])[tokens[1:-1]], states[:-2]], axis=-1)


def fitted(llm: LLM, config, params, sequences: list[list[int]]) -> Any:
    """The head with outputs that fit the sequences: without accepted drafts, little would be seen."""
    rows, targets = [], []
    for tokens in sequences:
        inputs = pairs(llm, params, tokens)
        rows.append(np.concatenate([inputs, inputs[:, config.hidden_size :]], axis=-1))
        targets += tokens[2:]
    features = np.concatenate(rows)
    wanted = np.eye(config.vocab_size)[targets]
    ridge = features.T @ features + 0.1 * np.eye(features.shape[1])
    return {**params, "out": jnp.asarray(np.linalg.solve(ridge, features.T @ wanted), "float32")}


@pytest.fixture(scope="module")
def model():
    return model_of((None, None, None))


@pytest.fixture(scope="module")
def plain(model):
    with open_llm(model, kv_policy=None, prefill_chunk=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(plain):
    return [answers(plain, [number])[0] for number in range(NUM_PROMPTS)]


@pytest.fixture(scope="module", autouse=True)
def registered(model, plain, expected):
    config = model[0].with_layers([0])
    pairs = zip(PROMPTS, expected, strict=True)
    params = fitted(plain, config, head_params(config, 3), [[*prompt, *one] for prompt, all_ in pairs for one in all_])
    register_draft("taps:", lambda text, target, weights: TapsDraft(config, params))
    yield
    kinds._KINDS.pop("taps:")


def open_toy(model, **options) -> LLM:
    return open_llm(model, **{"kv_policy": None, "draft": DRAFT, "num_draft_tokens": 3, **options})


VARIANTS = {
    "as it is": {},
    "adaptive, chunks of 16": {"num_draft_tokens": "auto", "prefill_chunk": 16},
    "a step a dispatch, chunks of 5": {"steps_per_dispatch": 1, "prefill_chunk": 5},
    "deterministic": {"deterministic": True},
    "without prefix reuse": {"prefix_cache": False},
    "bfloat16 pages of its own": {"draft_kv_dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "adaptive, chunks of 16"))
def test_one_answer(model, expected, variant):
    with open_toy(model, **VARIANTS[variant]) as llm:
        check_everything(llm, expected)
        stats = llm.speculation_stats()
        if llm.engine.spec.options.is_adaptive:  # how often it drafts depends on what the machine has to do
            assert stats.proposed > 0 < stats.num_plain_tokens
        else:
            assert stats.accepted > 0.1 * stats.proposed > 20
        check_idle(llm)


@pytest.mark.slow
def test_taps_between_layers_trace_no_layer_again(model, monkeypatch):
    """The first layer of a kind is traced where it stands, and once more for all others."""
    traced, bind_layer = [], decoder.bind_layer
    monkeypatch.setattr(decoder, "bind_layer", lambda *given: traced.append(given[1]) or bind_layer(*given))
    with open_toy(model, max_seqs=5) as llm:
        llm.engine.runner._lower_decode(5)
    assert 1 <= len(traced) <= 2 < len(TAPS)


def stored_keys(llm: LLM, sequence, count: int) -> np.ndarray:
    """Keys [count, Hkv, K] of a running sequence in the draft's own pages."""
    own, size = llm.engine.runner._draft_cache, llm.engine.spec.page_size
    (config, _), pages = llm.engine.spec.draft.own[0], own.layers[0]
    ids = np.zeros(MAX_PAGES, np.int32)
    ids[: -(-count // size)] = sequence.pages[: -(-count // size)]
    keys = gather(pages, ids, page_shape(pages, config.num_kv_heads, config.head_dim)).k
    return np.asarray(keys, np.float32).reshape(-1, config.num_kv_heads, config.head_dim)[:count]


def largest_error(llm: LLM) -> float:
    """The most that a key in the draft's pages differs from what the tokens of a running sequence give."""
    errors = []
    llm.engine._commit_all()
    params = llm.engine.runner._observer[0].bind(llm.engine.spec.config.vocab_size).params
    for sequence in llm.engine.scheduler.running:
        tokens = sequence.tokens
        if llm.engine.spec.ends_prompts:  # an answer sees less than what is computed here
            tokens = tokens[: sequence.num_prompt + 1]
        if sequence.is_decoding and len(tokens) > 2:
            keys = pairs(llm, params, tokens) @ np.asarray(params["k"])
            stored = stored_keys(llm, sequence, len(tokens) - 2)
            errors.append(np.abs(stored - keys.reshape(stored.shape)).max())
    return max(errors, default=0.0)


def run_together(llm: LLM, prompts) -> float:
    """Generates answers to prompts, some of which end early; the largest error on the way."""
    for number, prompt in enumerate(prompts):
        llm.submit(llm.prepare(prompt, SamplingParams(max_tokens=40 // (1 + number % 3), temperature=0.7, seed=3)))
    largest, num_looked = 0.0, 0
    while llm.engine.has_work:
        llm.step(2)
        num_looked += 1
        if num_looked % 4 == 0:
            largest = max(largest, largest_error(llm))
    return largest


CASES = {
    "together": {},
    "adaptive, chunks of 7": {"num_draft_tokens": "auto", "prefill_chunk": 7},
    "short of pages": {"num_pages": 32, "max_seqs": 4},
    "host memory": {"host_cache_gib": 0.01, "num_pages": 40, "max_seqs": 2},
    "snapkv": {"kv_policy": "snapkv(40)", "prefill_chunk": 16},
    "deterministic": {"deterministic": True},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", quick(CASES, "short of pages", "snapkv"))
def test_its_pages_follow_from_the_tokens(model, case):
    with open_toy(model, **CASES[case]) as llm:
        assert run_together(llm, [*PROMPTS, *PROMPTS[:3]]) < 1e-3
        counters = llm.engine.scheduler.counters
        assert counters.reused_tokens > 0
        assert case != "host memory" or counters.host_hit_tokens > 0


@pytest.mark.slow
def test_a_page_is_found_where_the_token_after_it_is_the_same(model, monkeypatch):
    """Its last slot pairs a state with that token."""
    first, second = ([*range(24), *range(number, number + 20)] for number in (30, 60))
    with open_toy(model) as llm:
        run_together(llm, [first])
        assert run_together(llm, [second]) < 1e-3
        assert llm.engine.scheduler.counters.reused_tokens == 16
    monkeypatch.setattr(TapsDraft, "num_ahead", 0)
    with open_toy(model) as llm:
        run_together(llm, [first])
        assert run_together(llm, [second]) > 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["snapkv(40)", "sinks(4)+window(16)"])
def test_one_answer_under_policies(model, policy):
    with open_llm(model, kv_policy=policy, prefill_chunk=128) as llm:
        alone = [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]
    with open_toy(model, kv_policy=policy) as llm:
        assert answers(llm, range(NUM_PROMPTS)) == alone
