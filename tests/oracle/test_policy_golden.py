"""Sinks and a window against kvpress's StreamingLLM, from golden/policies.safetensors (`make_policy_golden`)."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, SamplingParams
from tests.engine.dense_policy import dense_logits, is_seen
from tests.oracle.policy_cases import BUDGETS, CONFIG, GOLDEN, NUM_TOKENS, PAGE_SIZE, SEEDS, name_of, tensors, tokens

TOLERANCE = 1e-4
CASES = [(seed, budget, is_relative) for seed in SEEDS for budget in BUDGETS for is_relative in (False, True)]
QUICK = [(1, (4, 16), False), (2, (8, 8), True), (3, (16, 40), True)]


@cache
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with the checkpoint of a seed, trained for sequences of so many tokens."""

    def make(seed: int, length: int):
        folder = tmp_path_factory.mktemp(f"policies-{seed}-{length}")
        (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": length}))
        save_file(tensors(seed), folder / "model.safetensors")
        return folder

    return make


@pytest.mark.matrix("2-budget9-True")
@pytest.mark.parametrize(
    ("seed", "budget", "is_relative"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_the_same_positions_are_kept_and_logits_agree(checkpoint, seed, budget, is_relative):
    name, prompt = name_of(seed, budget, is_relative), tokens(seed)
    # Once a page is dropped, tokens are beyond what the model was trained for.
    pages = sum(-(-tokens // PAGE_SIZE) for tokens in budget) + 1
    policy = f"sinks({budget[0]})+window({budget[1]})"
    length = pages * PAGE_SIZE if is_relative else 512
    options: Any = {"max_seqs": 2, "page_size": PAGE_SIZE, "max_model_len": 128, "prefill_chunk": 50}
    with LLM(checkpoint(seed, length), kv_policy=policy, **options) as llm:
        (output,) = llm.generate(
            [prompt.tolist()], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=20, ignore_eos=True)
        )
        spec, kept = llm.engine.spec, llm.engine.spec.policy
        dense = np.asarray(dense_logits(llm.config, llm.params, kept, prompt))[7::8]
    assert (kept.trained is not None) == is_relative

    seen, group = is_seen(kept, NUM_TOKENS), spec.groups[0]
    for page, found in enumerate(golden()[f"{name}.kept"][:-1]):
        end = (page + 1) * PAGE_SIZE
        wanted = found[found >= 0].tolist()
        assert np.flatnonzero(seen[end, :end]).tolist() == wanted
        first = max(group.first_needed(end, PAGE_SIZE), group.num_sinks)
        stay = [*range(min(group.num_sinks, page + 1)), *range(first, page + 1)]
        assert [at for number in stay for at in range(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)] == wanted

    logits = golden()[f"{name}.logits"]
    assert np.abs(dense - logits).max() <= TOLERANCE
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    steps: Any = (output.prompt_logprobs or [])[8::8]
    for row, step in zip(logprobs[:-1], steps, strict=True):
        assert len(step) >= 20
        assert max(abs(row[token] - one.logprob) for token, one in step.items()) <= TOLERANCE


def test_the_golden_files_tell_a_mistake():
    """Other budgets, and positions of another kind, give logits that are far apart."""
    first, *others = (
        golden()[f"{name_of(1, budget, relative)}.logits"] for budget in BUDGETS for relative in (False, True)
    )
    assert all(np.abs(first - other).max() > 100 * TOLERANCE for other in others)
