"""Heads written here in the speculators library, and its own here, live: `make test-oracle`."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_convert
from jaxinfer.training.head_start import with_embedding
from tests.oracle.speculators_cases import (
    KINDS,
    PYTHON,
    TARGET,
    TOLERANCE,
    WRITTEN,
    differ,
    form,
    library,
    logits,
    opened_by_library,
    states_in,
    target_params,
    write_target,
)
from tests.training import test_heads

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.slow,
    pytest.mark.optimized,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"no speculators in {PYTHON}: make test-oracle"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("targets") / "target")


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_trained_here_opens_there(tmp_path, kind):
    result = test_heads.run(tmp_path / "work", replace(test_heads.KINDS[kind], taps=(1, 2, 3)))
    own = test_heads.TARGET, test_heads.target_params()
    verifier = checkpoints_convert.save_huggingface(*own, tmp_path / "target", "float32")
    config, params = result.config, result.params
    if kind == "eagle3":
        config, params = with_embedding(config, params, own[1])
    folder = tmp_path / "head"
    checkpoints_convert.save_huggingface(config, params, folder, "float32", speculators=form(verifier))
    _, tensors = opened_by_library(folder)
    assert differ(logits(result.config, result.params, own), tensors["logits"]) <= TOLERANCE


@pytest.mark.parametrize("name", WRITTEN)
def test_random_heads_open_there(tmp_path, target, name):
    config, params = WRITTEN[name].make()
    folder = tmp_path / "head"
    checkpoints_convert.save_huggingface(config, params, folder, "float32", speculators=form(target))
    _, tensors = opened_by_library(folder)
    state = states_in(tensors)
    for tensor, values in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(values, state[tensor])
    assert differ(logits(config, params, (TARGET, target_params())), tensors["logits"]) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_the_library_trains_opens_here(tmp_path, target, kind):
    before, after = json.loads(library("train", kind, target, tmp_path / "head"))
    assert after < before
    _, tensors = opened_by_library(tmp_path / "head")
    config, params = checkpoints_convert.load(tmp_path / "head", dtype="float32")
    assert differ(logits(config, params, (TARGET, target_params())), tensors["logits"]) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_converts_the_published_form(tmp_path, target, kind):
    """An EAGLE-3 head with its embedding: in place of a missing one the library leaves random values."""
    config, params = WRITTEN[kind].make()
    checkpoints_convert.save_huggingface(config, params, tmp_path / "published", "float32")
    library("convert", kind, tmp_path / "published", target, tmp_path / "head")
    _, tensors = opened_by_library(tmp_path / "head")
    assert differ(logits(config, params, (TARGET, target_params())), tensors["logits"]) <= TOLERANCE
    again = checkpoints_convert.load(tmp_path / "head", dtype="float32")
    assert differ(logits(*again, (TARGET, target_params())), tensors["logits"]) <= TOLERANCE
    if kind == "eagle3":
        jax.tree.map(np.testing.assert_array_equal, again[1], params)
