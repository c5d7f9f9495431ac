"""SmolLM2 with each dtype of keys and values under each policy: a number that the policy keeps is found."""

import pytest

from jaxinfer.cache.kv_dtype import KV_DTYPES
from tests.real.requests import NEEDLE_ANSWER, NEEDLE_TOKENS, greedy, needle_prompt, opened, texts
from tests.real.test_policies import FOUND

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.optimized]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("policy", FOUND)
def test_a_number_that_is_kept_is_found(model_path, policy, kv_dtype):
    """Its first three digits, after the place where float32 has the most: 4 bits are enough to tell them."""
    place = max(FOUND[policy], key=FOUND[policy].__getitem__)
    with opened(model_path("smollm2"), kv_policy=policy, kv_dtype=kv_dtype) as llm:
        shown = str(llm.explain())
        assert policy in shown
        assert kv_dtype in shown
        (found,) = texts(llm, [needle_prompt(place)], greedy(NEEDLE_TOKENS))
    assert found.startswith(NEEDLE_ANSWER[:4])
