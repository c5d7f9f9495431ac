"""What trained heads keep and draft in an engine follows from the tokens alone: after chunks, plain steps, rounds,
prefix hits, preemption, refused tokens and host memory, their pages hold what the target's states give, and as many
drafts are accepted as a head without a cache would have right. Oracle: tests/speculative/tiny_heads.py."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import bind_draft_head
from jaxinfer.speculative import HeadDraft
from pallas_kernels.paged_attention.layout import gather, page_shape
from tests.engine.fitted_heads import Heads
from tests.engine.test_heads import OPTIONS, PROMPTS, expect_cheap_drafts, full
from tests.pallas_kernels.quick import quick
from tests.speculative import tiny_heads

LENGTH = 128
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def heads():
    with LLM(full(), **OPTIONS) as llm:
        answers = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
        return Heads(llm, full(), [(p, a.outputs[0].token_ids) for p, a in zip(PROMPTS, answers, strict=False)])


def open_llm(head, **options: Any) -> LLM:
    return LLM(full(), draft=head, **{**OPTIONS, "num_draft_tokens": 4, **options})


def padded(llm: LLM, tokens: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The tokens and the tapped states of a sequence, with zeros up to one length."""
    draft = llm.engine.spec.draft
    states = llm.engine.runner.hidden_states(tokens, draft.taps)
    room = [(0, LENGTH + 1 - len(tokens))]
    return np.pad(np.array(tokens, np.int32), room), [np.pad(states[name], [*room, (0, 0)]) for name in draft.taps]


def head_of(llm: LLM) -> tuple[Any, Any]:
    """The configuration and parameters of the head with what it takes from the target."""
    draft, (config, params) = llm.engine.spec.draft, full()
    concrete = jax.tree.unflatten(
        jax.tree.structure(draft.models(config, params)[0][1]), llm.engine.runner.draft_weights.value
    )
    return draft.models(config, params)[0][0], concrete


@partial(jax.jit, static_argnums=(0,))
def wanted_pages(config, params, tokens, taps):
    head = bind_draft_head(config, params)
    return tiny_heads.stored(head, tokens, head.states(taps)[:LENGTH])


def largest_error(llm: LLM) -> float:
    """The most that a key or value in the head's pages differs from what the tokens of a running sequence give."""
    llm.engine._commit_all()
    draft, own, size = llm.engine.spec.draft, llm.engine.runner._draft_cache, llm.engine.spec.page_size
    config, params = head_of(llm)
    largest = 0.0
    for sequence in llm.engine.scheduler.running:
        tokens = sequence.tokens
        if llm.engine.spec.ends_prompts:  # an answer sees less than what is computed here
            tokens = tokens[: sequence.num_prompt + 1]
        count = len(tokens) - 1 - draft.num_ahead  # the newest token is not in the cache
        if not sequence.is_decoding or count < 1:
            continue
        ids = np.zeros(LENGTH // size, np.int32)  # one number of pages: `gather` is compiled once
        ids[: -(-count // size)] = sequence.pages[: -(-count // size)]
        for pages, (keys, values) in zip(own.layers, wanted_pages(config, params, *padded(llm, tokens)), strict=True):
            found = gather(pages, ids, page_shape(pages, config.num_kv_heads, config.head_dim))
            for one, other in [(found.k, keys)] + ([] if found.v is None else [(found.v, values)]):
                one = np.asarray(one, np.float32).reshape(-1, *one.shape[-2:])[:count]
                largest = max(largest, float(np.abs(one - np.asarray(other)[:count]).max()))
    return largest


def run_together(llm: LLM, prompts, params=None) -> float:
    """Generates answers to prompts, some of which end early; the largest error on the way."""
    for number, prompt in enumerate(prompts):
        usual = SamplingParams(max_tokens=40 // (1 + number % 3), temperature=0.7, seed=3)
        llm.submit(llm.prepare(prompt, params or usual))
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
    "short of pages": {"num_pages": 24, "max_seqs": 4},
    "host memory": {"host_cache_gib": 0.01, "num_pages": 40, "max_seqs": 2},
    "snapkv": {"kv_policy": "snapkv(40)", "prefill_chunk": 16},
    "deterministic": {"deterministic": True},
    "a window": {"kv_policy": "sinks(4)+window(16)"},
}
ALL = [*((name, "short of pages") for name in tiny_heads.KINDS)]
ALL += [(name, case) for name in ("eagle3 wide", "dflash") for case in CASES if case != "short of pages"]
ALL.remove(("eagle3 wide", "a window"))  # an answer's states are of what it sees
ALL.remove(("dflash", "a window"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "case"), quick(ALL, ("dflash", "together")))
def test_pages_follow_from_the_tokens(heads, name, case):
    with open_llm(heads[name], **CASES[case]) as llm:
        expect_cheap_drafts(llm)
        scheduler = llm.engine.scheduler
        if case == "short of pages":
            scheduler._num_spare = lambda: [0] * len(scheduler.pools.all)  # admits too many
        assert run_together(llm, [*PROMPTS, *PROMPTS[:3]]) < 1e-3
        counters, stats = llm.engine.scheduler.counters, llm.speculation_stats()
        assert counters.reused_tokens > 0
        assert (counters.num_preemptions > 0) == (case == "short of pages")
        assert case != "host memory" or counters.host_hit_tokens > 0
        assert 0 < stats.accepted < stats.proposed


@pytest.mark.parametrize("num_ahead", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_a_page_is_found_where_the_token_after_it_is_the_same(heads, monkeypatch, num_ahead):
    """The last pair of a page has that token. Inverse: were pages found without it, their last keys would be wrong."""
    first, second = ([*range(24), *range(number, number + 20)] for number in (30, 60))
    if num_ahead is not None:
        monkeypatch.setattr(HeadDraft, "num_ahead", num_ahead)
    with open_llm(heads["eagle3 wide"]) as llm:
        run_together(llm, [first])
        error = run_together(llm, [second])
        assert llm.engine.scheduler.counters.reused_tokens == (16 if num_ahead is None else 24)
    assert (error < 1e-3) == (num_ahead is None)


# What is accepted.


@partial(jax.jit, static_argnums=0)
def greedy_drafts(config, params, tokens, taps, root, num_nodes):
    head = bind_draft_head(config, params)

    def choose(number, logits, carry):
        return jnp.argmax(logits).astype(jnp.int32), carry

    return tiny_heads.drafts(head, tokens, head.states(taps), root, num_nodes, choose, ())[0]


def counted(llm: LLM, head, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """Drafted and accepted tokens of an answer, by what the head drafts without a cache from the weights given."""
    ((config, params),) = HeadDraft("head", *head, ()).models(*full())
    whole = [*prompt, *answer]
    tokens, taps = padded(llm, whole)
    root, proposed, accepted = len(prompt), 0, 0
    while root < len(whole) - 1:
        num_nodes = min(5, len(whole) - 1 - root)
        drafts = greedy_drafts(config, params, tokens, taps, np.int32(root), np.int32(num_nodes)).tolist()
        right = [draft == token for draft, token in zip(drafts[: num_nodes - 1], whole[root + 1 :], strict=False)]
        num_right = [*right, False].index(False)
        proposed, accepted, root = proposed + num_nodes - 1, accepted + num_right, root + num_right + 1
    return proposed, accepted


@pytest.mark.parametrize("name", quick(tiny_heads.KINDS, "mtp"))
def test_as_many_drafts_are_accepted_as_the_head_has_right(heads, name):
    with open_llm(heads[name]) as llm:
        total = np.zeros(2, int)
        for prompt in PROMPTS[:4]:
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            total += counted(llm, heads[name], prompt, output.outputs[0].token_ids)
            stats = llm.speculation_stats()
            assert (stats.proposed, stats.accepted) == tuple(total)
        assert 0 < total[1] < total[0]
