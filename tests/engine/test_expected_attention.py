"""One answer where a prompt's queries are computed once more, in several blocks: alone and together, however it is
cut.

Oracle: dense attention under a mask by head (tests/engine/dense_prompt_policy.py), chosen by the moments of all queries
at once.
"""

from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.cache.policy.prompt_budget import BLOCK
from tests.engine.dense_prompt_policy import dense_logits
from tests.engine.mixed_requests import random_prompts
from tests.engine.test_policies import model_of
from tests.engine.test_windows import check_idle
from tests.pallas_kernels.quick import quick

POLICY, PAGE, MAX_TOKENS, LENGTH = "expected_attention(200)", 16, 12, 1152
OPTIONS = {"max_seqs": 2, "max_model_len": LENGTH, "page_size": PAGE, "prefill_chunk": 256, "kv_policy": POLICY}
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
VARIANTS = {
    "two of them": {},
    "all": {},
    "chunks of 16": {"prefill_chunk": 16, "steps_per_dispatch": 2},
    "chunks of 64, ngram": {"prefill_chunk": 64, "draft": "ngram", "num_draft_tokens": 4},
    "a model drafts": {"draft": (None,), "num_draft_tokens": 3},
    "deterministic": {"deterministic": True},
    "host memory": {"host_cache_gib": 0.002, "num_pages": 120},
    "without prefix reuse": {"prefix_cache": False},
}


def prompts() -> list[list[int]]:
    """Of hardly more than a block and the last tokens, just these, more than two blocks, and one that begins like the
    first."""
    numbers = [token for prompt in random_prompts(80, 97, seed=2) for token in prompt]
    lengths = BLOCK + 33, BLOCK + 32, 2 * BLOCK + 70
    found = [numbers[start * 900 :][:length] for start, length in enumerate(lengths)]
    return [*found, [*found[0][:500], *found[1][:190]]]


def open_llm(model, **options) -> LLM:
    if isinstance(windows := options.get("draft"), tuple):
        options["draft"] = model_of(windows, 2048, seed=6)
    return LLM(model, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def model():
    return model_of((None, None), 2048)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "two of them"))
def test_answers_are_those_of_dense_attention(model, variant):
    config, params = model
    chosen = prompts()[: 2 if variant == "two of them" else None]
    with open_llm(model, **VARIANTS[variant]) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(chosen, GREEDY)]
        again = [llm.generate(one, GREEDY)[0] for one in chosen[1:]]
        assert [one.outputs[0].token_ids for one in again] == found[1:]
        assert (max(one.num_cached_tokens for one in again) >= BLOCK - PAGE) == llm.engine.spec.reuses_prefixes
        check_idle(llm)
    for prompt, tokens in zip(chosen, found, strict=True):
        row, length = np.array([*prompt, *tokens]), len(prompt)
        logits = dense_logits(config, params, parse_policy(POLICY), PAGE, row, length)[0]
        assert np.asarray(logits)[length - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_preempted(model, num_steps):
    """Within a prompt, and after it was compacted: it is compacted again."""
    with open_llm(model, steps_per_dispatch=1) as llm:
        engine: Any = llm.engine
        wanted = [one.outputs[0].token_ids for one in llm.generate(prompts()[2:], GREEDY)]
        sequences = [llm.submit(llm.prepare(prompt, GREEDY))[0] for prompt in prompts()[2:]]
        for _ in range(num_steps):
            llm.step()
        engine._commit_all()
        for sequence in sequences:
            if sequence.slot is not None:
                engine.scheduler.preempt(sequence)
        while engine.has_work:
            llm.step()
        assert [one.output for one in sequences] == wanted
        assert engine.scheduler.counters.num_preemptions
        check_idle(llm)


@pytest.mark.slow
def test_another_prompt_keeps_other_tokens(model):
    """Else equal answers would tell little: the queries of the first block matter."""
    config, params = model
    prompt = prompts()[2]
    rows = [[*prompt, 5], [*prompt[:10], *reversed(prompt[10:500]), *prompt[500:], 5]]
    kept = [dense_logits(config, params, parse_policy(POLICY), PAGE, np.array(row), len(prompt))[1] for row in rows]
    after = [[set(np.asarray(head)[np.asarray(head) > 500].tolist()) for head in layers[0]] for layers in kept]
    assert all(one != other for one, other in zip(*after, strict=True))
