"""SmolLM2 with each dtype of keys and values: a number is found, a question answered."""

import pytest

from jaxinfer.cache.kv_dtype import KV_DTYPES
from tests.real.requests import ANSWER, NEEDLE_ANSWER, QUESTION, greedy, needle_prompt, opened, texts

pytestmark = [pytest.mark.real, pytest.mark.optimized]


@pytest.mark.parametrize(
    "kv_dtype", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("float16", "fp8_e5m2"))) for name in KV_DTYPES]
)
def test_numbers_are_found_and_questions_answered(model_path, kv_dtype):
    with opened(model_path("smollm2"), kv_dtype=kv_dtype) as llm:
        assert kv_dtype in str(llm.explain())
        found = texts(llm, [needle_prompt(7), llm.chat_prompt(QUESTION)], greedy(10))
    assert found[0].startswith(NEEDLE_ANSWER)
    # The answer's first token leads by 0.08 nats, less than 4 bits change.
    assert found[1] == ANSWER or "int4" in kv_dtype
