"""Gemma 3 270M, Q4_K_M with a tied head of Q8_0 and windows of 512 tokens: loss, answers, windows."""

import pytest

from tests.real.requests import greedy, opened, texts
from tests.real.texts import HELD_OUT, LICENSE, LONG, LONG_START

pytestmark = [pytest.mark.real, pytest.mark.optimized]
WINDOW = 512


@pytest.fixture(scope="module")
def llm(model_path):
    with opened(model_path("gemma3-270m"), max_model_len=768, max_seqs=2) as llm:
        yield llm


def mean_loss(llm, ids, start):
    score = llm.score([ids[:start]], [ids[start:]], use_tqdm=False)[0]
    return -score.raw_total / (len(ids) - start)


def test_the_loss_is_that_of_llama_cpp(llm, golden):
    ids = llm.tokenizer.encode(HELD_OUT)
    assert mean_loss(llm, ids, 1) == pytest.approx(golden["gemma3-270m"]["loss"], abs=0.03)


def test_greedy_answers(llm):
    """Those of llama.cpp: it is a base model."""
    prompts = ["The capital of France is", "1, 2, 3, 4, 5, 6,"]
    assert texts(llm, prompts, greedy(4)) == [" the capital of the", " 7, "]


def test_the_loss_beyond_the_windows_is_that_of_llama_cpp(llm, golden):
    """Of tokens after more than a window: layers with windows see their last 512 tokens, the others all."""
    ids = llm.tokenizer.encode(LICENSE.read_text(encoding="utf-8"))[:LONG]
    assert LONG_START > WINDOW
    assert mean_loss(llm, ids, LONG_START) == pytest.approx(golden["gemma3-270m"]["long_loss"], abs=0.03)
