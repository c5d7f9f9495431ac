"""The parameters of an LLM refuse changes, and are a pytree like any other nested dict."""

import copy
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import abstract_params, bind, init_params
from jaxinfer.param_dict import ParamDict
from tests.tiny import TINY

CHANGES = {
    "[...] =": lambda params: operator.setitem(params, "weight", 0),
    "del": lambda params: operator.delitem(params, "weight"),
    "|=": lambda params: operator.ior(params, {"weight": 0}),
    "update": lambda params: params.update(weight=0),
    "setdefault": lambda params: params.setdefault("weight", 0),
    "pop": lambda params: params.pop("weight"),
    "popitem": lambda params: params.popitem(),
    "clear": lambda params: params.clear(),
}


@pytest.fixture(scope="module")
def own():
    return init_params(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def llm(own):
    with LLM((TINY, own), max_seqs=2, max_model_len=32) as llm:
        yield llm


def loss(params):
    tokens = jnp.arange(8)[None]
    decoder = bind(TINY, params)
    logits = decoder.logits(decoder(tokens, tokens, attend_without_cache))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_raises_at_every_depth_and_says_what_works(llm, change):
    before = jax.tree.leaves(llm.params)
    for part in (llm.params, llm.params["final_norm"], llm.params["layers"]["0"]["mlp"]["up_proj"]):
        with pytest.raises(TypeError, match=r"cannot be changed .*params = llm\.params\.copy\(\)"):
            CHANGES[change](part)
    with pytest.raises(TypeError, match=r"^llm\.params = "):
        llm.params = {}
    assert all(map(operator.is_, jax.tree.leaves(llm.params), before))


def test_they_are_the_arrays_that_were_given(llm, own):
    assert llm.params == own
    assert all(map(operator.is_, jax.tree.leaves(llm.params), jax.tree.leaves(own)))
    paths = [[path for path, _ in jax.tree_util.tree_leaves_with_path(one)] for one in (llm.params, own)]
    assert paths[0] == paths[1]


def test_a_dict_that_is_changed_later_does_not_reach_the_engine(own):
    given = {**own, "layers": dict(own["layers"])}
    with LLM((TINY, given), max_seqs=2, max_model_len=32) as llm:
        given["layers"]["0"] = given["layers"]["1"]
        assert llm.params == own
        assert llm.engine.spec.params["layers"]["0"] is not llm.engine.spec.params["layers"]["1"]


@pytest.mark.slow
def test_gradients_and_optax_take_them_and_give_what_can_be_changed(llm):
    optimizer = optax.sgd(0.1)
    gradients = jax.jit(jax.grad(loss))(llm.params)
    updates, _ = optimizer.update(gradients, optimizer.init(llm.params), llm.params)
    trained: Any = optax.apply_updates(llm.params, updates)
    assert loss(trained) < loss(llm.params)
    trained["embed"] = trained["embed"] * 2
    trained["layers"]["0"]["mlp"].clear()


def test_copies_are_plain(llm, own):
    copied = llm.params.copy()
    assert jax.tree.structure(copied) == jax.tree.structure(own) == jax.tree.structure(abstract_params(TINY))
    assert all(map(operator.is_, jax.tree.leaves(copied), jax.tree.leaves(own)))
    deep = copy.deepcopy(llm.params)
    assert type(deep) is type(deep["layers"]["0"]["mlp"]) is dict
    jax.tree.map(np.testing.assert_array_equal, own, deep)


@pytest.mark.slow
def test_a_changed_copy_makes_a_new_llm(llm):
    prompt, greedy = [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids
    changed = llm.params.copy()
    changed["embed"] = changed["embed"][::-1]
    answers = []
    for params in (changed, {**llm.params, "embed": changed["embed"]}):
        with LLM((llm.config, params), max_seqs=2, max_model_len=32) as other:
            answers.append(other.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids)
            assert type(other.engine.spec.params) is type(other.engine.spec.params["layers"]) is dict
    assert answers[0] == answers[1] != before
    assert llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids == before


def test_an_exported_function_takes_them(llm):
    exported = jax.export.export(jax.jit(optax.global_norm))(llm.params)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(llm.params), optax.global_norm(llm.params), rtol=1e-6)


def test_what_is_flattened_comes_back():
    tree = ParamDict.read_only({"b": {"x": 1}, "a": 2})
    leaves, structure = jax.tree.flatten(tree)
    again = jax.tree.unflatten(structure, leaves)
    assert (leaves, again, type(again), type(again["b"])) == ([2, 1], tree, ParamDict, ParamDict)
