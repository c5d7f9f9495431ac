"""Features that other tests try one by one, put together: types of the cache under policies, with windows, drafts and
prompts that are cut, for requests of every kind. Answers are those of each request alone without drafts."""

from dataclasses import replace

import jax
import pytest

from jaxinfer import LLM
from jaxinfer.models import init_params
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.tiny import TINY

OPTIONS = {"max_seqs": 4, "max_model_len": 128, "page_size": 8}
PROMPTS = random_prompts(5, 100, seed=4)
PARAMS = [replace(mixed_params(number), max_tokens=8, ignore_eos=True) for number in range(len(PROMPTS))]
NGRAMS = {"draft": "ngram", "num_draft_tokens": 3}
FULL = (None, None)
# Windows of the layers, options of both engines, and what the second one has besides.
COMBINATIONS = {
    "sinks int8": ((8, None), {"kv_policy": "sinks(4)+window(16)", "kv_dtype": "int8"}, NGRAMS),
    "h2o int8": (FULL, {"kv_policy": "h2o(32)", "kv_dtype": "int8"}, {}),
    "snapkv int4": (FULL, {"kv_policy": "snapkv(40)", "kv_dtype": "int4"}, NGRAMS),
    "keydiff": (FULL, {"kv_policy": "keydiff(40)"}, NGRAMS),
    "pyramidkv": (FULL, {"kv_policy": "pyramidkv(40)"}, {}),
}


def model_of(windows: tuple[int | None, ...]):
    config = replace(TINY, sliding_windows=windows)
    params = init_params(config, jax.random.key(3))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_together_with_drafts_and_cut_prompts_answers_are_those_alone(name):
    windows, options, more = COMBINATIONS[name]
    model = model_of(windows)
    with LLM(model, **OPTIONS, **options) as llm:
        alone = [
            llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
    with LLM(model, **OPTIONS, **options, **more, prefill_chunk=16) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
