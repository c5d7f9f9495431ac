"""SmolLM2 with drafts: the tokens of plain decoding, and some of the drafted ones accepted."""

import pytest

from jaxinfer import SamplingParams
from tests.real.requests import QUESTION, greedy, needle_prompt, opened

pytestmark = [pytest.mark.real, pytest.mark.optimized]
NUM_TOKENS = 24


def answers(llm):
    """Token ids of a question, of a text that repeats itself, and of a story."""
    prompts = [llm.chat_prompt(QUESTION), needle_prompt(7), "Once upon a time"]
    outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(model_path):
    with opened(model_path("smollm2")) as llm:
        return answers(llm)


@pytest.mark.parametrize("draft", ["ngram", "layers:15"])
def test_tokens_are_those_without_drafts(model_path, plain, draft):
    with opened(model_path("smollm2"), draft=draft, num_draft_tokens=3) as llm:
        assert answers(llm) == plain
        stats = llm.speculation_stats()
    assert stats is not None
    assert stats.accepted > 0
    assert stats.accepted < stats.proposed


# Each with its seed. The second repeats its prompt for a while, then leaves it: at 0.8 all drafts of "ngram" are
# accepted. The last one's tokens depend on what came before.
SAMPLED = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, **more)
    for seed, (temperature, more) in enumerate([(0.8, {"top_p": 0.9}), (1.0, {}), (1.0, {"frequency_penalty": 0.5})])
]


def sampled(llm):
    prompts = [llm.chat_prompt(QUESTION), needle_prompt(7), "Once upon a time"]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, SAMPLED, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain_sampled(model_path):
    with opened(model_path("smollm2")) as llm:
        return sampled(llm)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", [2, 5])
@pytest.mark.parametrize("draft", ["ngram", "layers:15"])
def test_sampled_tokens_are_those_without_drafts(model_path, plain, plain_sampled, draft, num_draft_tokens):
    """Requests of seeds and temperatures; they are not the greedy ones."""
    assert plain_sampled != plain
    with opened(model_path("smollm2"), draft=draft, num_draft_tokens=num_draft_tokens) as llm:
        assert sampled(llm) == plain_sampled
        stats = llm.speculation_stats()
    assert stats is not None
    assert 0 < stats.accepted < stats.proposed
