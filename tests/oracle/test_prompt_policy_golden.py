"""Compacted prompts against kvpress's presses, from golden/prompt_policies.safetensors (`make_policy_golden`)."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache.policy.kinds import parse_policy
from tests.engine.dense_prompt_policy import dense_logits
from tests.oracle.policy_cases import ANSWER, COMPACTED, CONFIG, EVERY, NUM_TOKENS, PROMPTS, SEEDS, tensors, tokens

TOLERANCE = 1e-4
CASES = [(seed, method, budget) for seed in SEEDS for method, (_, budgets) in PROMPTS.items() for budget in budgets]
QUICK = [(1, "snapkv", 56), (2, "keydiff", 40), (3, "pyramidkv", 60), (2, "expected_attention", 56)]


@cache
def golden() -> dict[str, np.ndarray]:
    return load_file(COMPACTED)


def positions(rows: np.ndarray) -> list[list[list[int]]]:
    """By layer and head, without the padding."""
    return [[head[head >= 0].tolist() for head in layer] for layer in rows]


@pytest.mark.matrix("1-snapkv-56", "2-expected_attention-56")
@pytest.mark.parametrize(
    ("seed", "method", "budget"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_the_same_positions_are_kept_and_answers_agree(tmp_path, seed, method, budget):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(seed), tmp_path / "model.safetensors")
    name, prompt, page_size = f"{seed}.{method}.{budget}", tokens(seed).tolist(), PROMPTS[method][0]
    wanted, policy = positions(golden()[f"{name}.kept"]), f"{method}({budget})"
    options: Any = {"max_seqs": 2, "page_size": page_size, "max_model_len": 160, "prefill_chunk": 50}
    with LLM(tmp_path, kv_policy=policy, **options) as llm:
        params = SamplingParams(max_tokens=ANSWER, temperature=0, logprobs=20, ignore_eos=True)
        request = llm.prepare(prompt, params)
        (sequence,) = llm.submit(request)
        while sequence.num_output < 2:
            llm.step()
        # What lies in the pages of the answer's sequence is what lay at these positions.
        row = np.array([*prompt, *golden()[f"{name}.answer"]])
        dense, kept, keys = dense_logits(llm.config, llm.params, parse_policy(policy), page_size, row, NUM_TOKENS)
        assert [np.asarray(one).tolist() for one in kept] == wanted
        stored = llm.engine.runner.caches.cache
        for layer, (found, heads) in enumerate(zip(keys, wanted, strict=True)):
            table = sequence.tables[stored.group_of(layer)]
            pages: Any = stored.layers[layer]
            cached = np.asarray(pages.k)[[page for page in table if page]].reshape(-1, *found.shape[1:])
            for head, places in enumerate(heads):
                np.testing.assert_allclose(cached[: len(places), head], np.asarray(found)[places, head], atol=1e-5)
        while not sequence.is_finished:
            llm.step()
        (output,) = llm.generate([prompt], params)

    answer = output.outputs[0]
    assert answer.token_ids == golden()[f"{name}.answer"].tolist() == sequence.output
    logits = golden()[f"{name}.logits"]
    rows = np.arange(NUM_TOKENS - 1, NUM_TOKENS + ANSWER - 1)[EVERY - 1 :: EVERY]
    assert np.abs(np.asarray(dense)[rows] - logits).max() <= TOLERANCE
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for row, step in zip(logprobs, (answer.logprobs or [])[EVERY - 1 :: EVERY], strict=True):
        assert len(step) >= 20
        assert max(abs(row[token] - one.logprob) for token, one in step.items()) <= TOLERANCE


def test_the_golden_files_tell_a_mistake():
    """Methods, budgets and heads keep other positions."""
    kept = {
        name: golden()[f"1.{name}.kept"].tobytes()
        for name in (f"{method}.{budget}" for method in PROMPTS if method != "pyramidkv" for budget in (40, 56))
    }
    assert len(set(kept.values())) == 6
    assert (golden()["1.snapkv.56.kept"][0, 0] != golden()["1.snapkv.56.kept"][0, 1]).any()
    layers = positions(golden()["1.pyramidkv.60.kept"])
    assert [len(layer[0]) for layer in layers] == [88, 32]
    assert [len(layer[0]) for layer in positions(golden()["1.pyramidkv.40.kept"])] == [40, 40]
