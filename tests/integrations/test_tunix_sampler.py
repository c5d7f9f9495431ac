"""`JaxinferSampler`, by the text of a Protocol that is not released: answers, errors, weights in the request."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.integrations.tunix_sampler import JaxinferSampler
from tests.checkpoints_convert.trees.layouts import config_for, numbered, tunix
from tests.engine.test_weights import RUN
from tests.integrations.test_tunix_rollout import Letters

ONE_STEP = {**RUN, "steps_per_dispatch": 1}  # as `AsyncEngine`, so that both have the same programs
# Of tunix/experimental/rollout/sampler.py.
METHODS = (
    *("initialize", "start", "stop", "pause", "resume", "get_mesh", "sample", "bind_weight_sync"),
    *("get_weight_sync_metadata", "pre_weight_sync", "weight_sync", "post_weight_sync", "get_transfer_status"),
    *("migrate_kv_cache", "get_load_info"),
)


def request(name, prompt, **given):
    params = {"max_tokens": 6, "temperature": 0.0, "top_p": None, "top_k": None, "seed": None, "beam_size": None}
    params |= {"return_logprobs": True, "return_logits": False, **given}
    return SimpleNamespace(request_id=name, prompt=prompt, sampling_params=SimpleNamespace(**params))


def test_the_life_of_a_sampler():
    config = config_for("qwen3")
    old, new = numbered(config), numbered(config, seed=1)
    ids, greedy = [1, *Letters().encode("abc")], SamplingParams(max_tokens=6, temperature=0, logprobs=0)
    expected = []
    for params in (old, new):
        with LLM((config, params), **ONE_STEP) as llm:
            expected.append(llm.generate([ids], greedy, use_tqdm=False)[0].outputs[0])

    async def live():
        sampler = JaxinferSampler((config, tunix(config, old)), Letters(), **ONE_STEP)
        assert all(callable(getattr(sampler, name)) for name in METHODS)
        with pytest.raises(RuntimeError, match="the sampler is not initialized, or was stopped"):
            await sampler.sample(request("a", "abc"))
        await sampler.start()
        batch = [request("a", "abc"), request("b", ids), request("c", [1] * 999), request("d", "a", beam_size=2)]
        answers = [await sampler.sample(batch)]
        running = asyncio.ensure_future(sampler.sample(request("e", "abc", max_tokens=40)))
        await asyncio.sleep(0)
        await sampler.bind_weight_sync()
        await sampler.pre_weight_sync()
        assert await sampler.get_transfer_status("e") == "PENDING"
        sync = SimpleNamespace(weights=tunix(config, new), policy_version=7)
        with pytest.raises(ValueError, match="needs the weights in the request"):
            await sampler.weight_sync(SimpleNamespace(weights=None))
        await sampler.weight_sync(sync)
        assert await sampler.post_weight_sync(sync) == "7"
        assert await sampler.get_transfer_status("e") == "SUCCESS"
        answers.append(await sampler.sample([request("f", "abc")]))
        assert (await running).metadata["policy_versions"][-1] == "7"
        load = await sampler.get_load_info()
        assert (load.num_requests_waiting, load.num_requests_running) == (0, 0)
        assert 0 <= load.kv_cache_usage_perc <= 1
        assert await sampler.migrate_kv_cache("a", "b", ids) is False
        await sampler.stop()
        await sampler.stop()
        return answers

    (first, second, long, beam), (after,) = asyncio.run(live())
    for answer, wanted, version in ((first, expected[0], "0"), (second, expected[0], "0"), (after, expected[1], "7")):
        assert answer.token_ids.tolist() == wanted.token_ids
        assert answer.prompt_token_ids.tolist() == ids
        assert answer.finish_reason == "length"
        assert answer.text == Letters().decode(wanted.token_ids)
        scores = [at[token].logprob for token, at in zip(wanted.token_ids, wanted.logprobs, strict=True)]
        np.testing.assert_allclose(answer.logprobs, scores, atol=1e-5)
        assert answer.metadata == {"policy_versions": [version]}
    assert (first.request_id, second.request_id, long.finish_reason) == ("a", "b", "error")
    assert (long.error.error_type, "999" in long.error.message) == ("RequestTooLargeError", True)
    assert beam.error.message == "beam_size is not supported"
