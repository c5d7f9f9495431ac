"""Heavy hitters of a prompt against kvpress's observed attention, from golden/policy_heavy.safetensors."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.request import SequenceState
from tests.engine.dense_heavy import DenseHeavy, dense_logits
from tests.oracle.policy_cases import (
    CONFIG,
    HEAVY,
    HEAVY_ANSWER,
    HEAVY_BUDGETS,
    HEAVY_PROMPT,
    PAGE_SIZE,
    SEEDS,
    tensors,
    tokens,
)

TOLERANCE = 1e-4
QUICK = [(1, 16), (2, 40), (3, 72)]
CASES = [
    pytest.param(seed, budget, marks=() if (seed, budget) in QUICK else pytest.mark.slow)
    for seed in SEEDS
    for budget in HEAVY_BUDGETS
]
OPTIONS: dict[str, Any] = {"max_seqs": 2, "page_size": PAGE_SIZE, "max_model_len": 128, "prefill_chunk": 50}


@cache
def golden() -> dict[str, np.ndarray]:
    return load_file(HEAVY)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with the checkpoint of a seed."""

    @cache
    def make(seed: int):
        folder = tmp_path_factory.mktemp(f"heavy-{seed}")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file(tensors(seed), folder / "model.safetensors")
        return folder

    return make


def forced(llm: LLM, seed: int, count: int) -> SequenceState:
    """The state of an engine after a prompt and the first `count` tokens after it, as if they were its answer so far: a
    sequence of which the next token is chosen, and that is still there."""
    row, params = tokens(seed).tolist(), SamplingParams(max_tokens=20, temperature=0, logprobs=20, ignore_eos=True)
    sequence = SequenceState(llm.prepare(row[:HEAVY_PROMPT], params), tokens=row[: HEAVY_PROMPT + count])
    llm.engine.add(sequence)
    while len(sequence.tokens) == HEAVY_PROMPT + count:
        llm.engine.step(1)
        llm.engine._commit_all()
    return sequence


def stored(llm: LLM, sequence: SequenceState) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each layer, keys [tokens, Hkv, K] and sums [tokens, Hkv] in the order of the sequence's pages."""
    kept, pages = llm.engine.runner._cache, np.array(sequence.pages)
    keys = [np.asarray(layer.pages.k)[pages] for layer in kept.layers]
    sums = [np.asarray(layer.leaves)[pages].swapaxes(1, 2) for layer in kept.layers]
    return [x.reshape(-1, *x.shape[2:]) for x in keys], [x.reshape(-1, x.shape[2]) for x in sums]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("seed", "budget"), CASES)
def test_the_same_positions_are_kept_and_logits_agree(checkpoint, seed, budget):
    wanted = {name: golden()[f"{seed}.{budget}.{name}"] for name in ("kept", "observed", "logits")}
    count = wanted["kept"].shape[-1]
    with LLM(checkpoint(seed), kv_policy="h2o(112)", **OPTIONS) as llm:  # longer than the prompt: nothing is dropped
        whole, sums = stored(llm, forced(llm, seed, 0))
        attend = DenseHeavy(HEAVY_PROMPT, PAGE_SIZE, budget)
        row = tokens(seed)[: HEAVY_PROMPT + HEAVY_ANSWER]
        dense = dense_logits(llm.config, llm.params, row, attend)[HEAVY_PROMPT:]
    with LLM(checkpoint(seed), kv_policy=f"h2o({budget})", **OPTIONS) as llm:
        cut, _ = stored(llm, forced(llm, seed, 0))
        found = [forced(llm, seed, number + 1).logprobs[0] for number in range(HEAVY_ANSWER - 1)]

    queries = HEAVY_PROMPT - np.arange(HEAVY_PROMPT)[:, None]
    for layer, (all_keys, keys, total) in enumerate(zip(whole, cut, sums, strict=True)):
        order = np.argsort(-total[:HEAVY_PROMPT] / queries, axis=0, kind="stable")[:count]
        assert np.sort(order, axis=0).T.tolist() == wanted["observed"][layer].tolist()
        for head, kept in enumerate(wanted["kept"][layer].tolist()):
            distance = np.abs(keys[:count, None, head] - all_keys[None, :HEAVY_PROMPT, head]).max(-1)
            assert distance.argmin(axis=1).tolist() == kept
            assert distance.min(axis=1).max() <= 1e-5
            assert np.flatnonzero(attend.kept[layer, head][HEAVY_PROMPT - 1]).tolist() == kept

    assert np.abs(dense - wanted["logits"]).max() <= TOLERANCE
    logits = wanted["logits"]
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for own, step in zip(logprobs[:-1], found, strict=True):
        assert len(step) >= 20
        assert max(abs(own[token] - one.logprob) for token, one in step.items()) <= TOLERANCE


def test_the_golden_files_tell_a_mistake():
    """Other budgets keep other tokens, and the last tokens are not what observed attention alone keeps."""
    for seed in SEEDS:
        rows = [golden()[f"{seed}.{budget}.kept"] for budget in HEAVY_BUDGETS]
        assert all((row[0, 0] != row[0, 1]).any() for row in rows)
        assert any((golden()[f"{seed}.{b}.observed"] != golden()[f"{seed}.{b}.kept"]).any() for b in HEAVY_BUDGETS)
        logits = [golden()[f"{seed}.{budget}.logits"] for budget in HEAVY_BUDGETS]
        assert np.abs(logits[0] - logits[1]).max() > 100 * TOLERANCE
