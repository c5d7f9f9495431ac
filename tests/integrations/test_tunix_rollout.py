"""`JaxinferRollout` without Tunix: its module is importable, and with a stand-in for the interface it answers."""

import abc
import dataclasses
import importlib
import importlib.util
import sys
import types
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests.checkpoints_convert.trees.layouts import config_for, nested, numbered, tunix
from tests.engine.test_weights import RUN

CONFIG = SimpleNamespace(
    max_tokens_to_generate=6,
    temperature=0.0,
    top_p=None,
    top_k=None,
    seed=None,
    max_prompt_length=4,
    kv_cache_size=16,
    data_type=None,
    eos_tokens=None,
    return_logprobs=True,
)


class Rollout(abc.ABC):
    """The abstract methods of google-tunix 0.1.7's `BaseRollout`."""

    @abc.abstractmethod
    def generate(self, prompts, rollout_config, **kwargs): ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens, completion_tokens): ...

    @abc.abstractmethod
    def update_params(self, params, filter_types=None): ...

    @abc.abstractmethod
    def pad_id(self): ...

    @abc.abstractmethod
    def eos_id(self): ...

    @abc.abstractmethod
    def model(self): ...


@dataclasses.dataclass
class Output:
    text: Any
    logits: Any
    tokens: Any
    left_padded_prompt_tokens: Any
    logprobs: Any


class Letters:
    def encode(self, text):
        return [ord(letter) - 90 for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0

    def dedup_bos_ids(self, ids):
        return ids


class Model(dict):
    """A tree with the configuration of its model."""

    config = config_for("qwen3")


def imported(monkeypatch, stubs):
    for name in list(sys.modules):
        if name.split(".")[0] == "tunix" or name == "jaxinfer.integrations.tunix":
            monkeypatch.delitem(sys.modules, name)
    for name, values in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("jaxinfer.integrations.tunix")


@pytest.fixture
def module(monkeypatch):
    interface, adapter = "tunix.rl.rollout.base_rollout", "tunix.generate.tokenizer_adapter"
    stubs = {name: {"__path__": []} for name in ("tunix", "tunix.rl", "tunix.rl.rollout", "tunix.generate")}
    stubs |= {interface: {"BaseRollout": Rollout, "RolloutOutput": Output}, adapter: {"TokenizerAdapter": Letters}}
    made = imported(monkeypatch, stubs)
    yield made
    sys.modules.pop("jaxinfer.integrations.tunix", None)


@pytest.mark.skipif(importlib.util.find_spec("tunix") is not None, reason="google-tunix is installed")
def test_without_tunix_the_error_names_the_package(monkeypatch):
    made = imported(monkeypatch, {})
    with pytest.raises(ImportError, match="JaxinferRollout needs google-tunix: pip install google-tunix"):
        made.JaxinferRollout(Model(), Letters(), None, CONFIG)
    sys.modules.pop("jaxinfer.integrations.tunix", None)


def lora(params, seed):
    """A and B of every o_proj, in Tunix's axes, and the parameters with 0.5 A B added."""
    random, pairs, merged = np.random.default_rng(seed), {}, jax.tree.map(np.array, params)
    for number, layer in merged["layers"].items():
        a, b = (random.normal(0, 0.3, shape).astype(np.float32) for shape in ((4, 8, 3), (3, 32)))
        pairs |= {f"layers.{number}.attn.o_proj.w_lora_a": a, f"layers.{number}.attn.o_proj.w_lora_b": b}
        layer["attention"]["o_proj"]["weight"] += 0.5 * a.reshape(32, 3) @ b
    return nested(pairs), merged


def joined(tree, other):
    return {
        name: joined(tree[name], other[name]) if name in tree and name in other else tree.get(name, other.get(name))
        for name in {**tree, **other}
    }


def test_answers_scores_and_updates_are_those_of_the_merged_weights(module):
    config, params = Model.config, numbered(Model.config)
    pairs, merged = lora(params, 1)
    actor = Model(joined(tunix(config, params), pairs))
    ours = module.JaxinferRollout(actor, Letters(), None, CONFIG, config=config, lora_scale=0.5, **RUN)
    assert isinstance(ours, Rollout)
    assert ours.model() is None
    prompts = ["abc", "c", "abc"]
    ids = [[1, *Letters().encode(prompt)] for prompt in prompts]
    later, other = lora(params, 2)
    for number, (weights, update) in enumerate([(merged, None), (other, later)]):
        if update is not None:
            ours.update_params(update, ("the pairs",))
        assert ours.num_updates == number
        with LLM((config, weights), **RUN) as llm:
            greedy = SamplingParams(max_tokens=6, temperature=0, stop_token_ids=[2])
            expected = [answer.outputs[0].token_ids for answer in llm.generate(ids, greedy, use_tqdm=False)]
            scores = [score.raw for score in llm.score(ids, expected, use_tqdm=False)]
        output = ours.generate(prompts, CONFIG)
        assert [own.tolist() for own in output.tokens] == expected
        assert output.text == [" ".join(map(str, own)) for own in expected]
        assert output.left_padded_prompt_tokens.tolist() == [ids[0], [0, 0, *ids[1]], ids[2]]
        for own, score in zip(output.logprobs, scores, strict=True):
            np.testing.assert_allclose(own, score, atol=1e-5)
        completions = np.asarray(expected, np.int32)
        completions[1, 3:] = 0
        rows = np.asarray(ours.get_per_token_logps(output.left_padded_prompt_tokens, completions))
        np.testing.assert_allclose(rows[[0, 2]], [scores[0], scores[2]], atol=1e-5)
        np.testing.assert_allclose(rows[1, :3], scores[1][:3], atol=1e-5)
        assert not rows[1, 4:].any()
    check_sampling(ours, ids)
    with pytest.raises(ValueError, match=r"1 of its 2 arrays have no place: layers.0.attn.v"):
        ours.update_params(nested({"layers.0.attn.v": np.ones(3), "final_norm.w": np.ones(32)}))
    ours.close()


def check_sampling(ours, ids):
    """A seed gives equal prompts answers of their own, and again the same; what ends an answer is left out of it;
    log-probabilities are of the logits over the temperature."""
    warm = SimpleNamespace(**{**vars(CONFIG), "temperature": 1.5, "seed": jax.random.key(7)})
    prompts = ["abc"] * 3
    first, again = ours.generate(prompts, warm), ours.generate(prompts, warm)
    assert [own.tolist() for own in first.tokens] == [own.tolist() for own in again.tokens]
    assert len({tuple(own.tolist()) for own in first.tokens}) == 3
    own = first.tokens[0].tolist()
    scores = ours.llm.score([ids[0]], [own], SamplingParams(temperature=1.5), adapter="tunix-lora", use_tqdm=False)
    np.testing.assert_allclose(first.logprobs[0], scores[0].processed, atol=1e-6)
    assert abs(scores[0].processed[0] - scores[0].raw[0]) > 1e-3
    ending = SimpleNamespace(**{**vars(warm), "eos_tokens": own[2:3]})
    place = own.index(own[2])
    assert ours.generate(prompts, ending).tokens[0].tolist() == own[:place]
    assert len(ours.generate(prompts, ending).logprobs[0]) == place
    with pytest.raises(TypeError, match="unexpected keywords images"):
        ours.generate(prompts, warm, images=1)
