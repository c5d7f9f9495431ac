"""Heads in the speculators library's form: what is written here opens there, and what it trained opens here.

What the library found is in tests/oracle/golden/speculators (`make golden-heads`). It is run again in
tests/oracle/test_speculators_live.py.
"""

import json
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_convert
from checkpoints_convert import CheckpointError
from tests.oracle.head_cases import DRAFT_VOCAB, HEAD_CASES, kept_tokens, write_checkpoint
from tests.oracle.speculators_cases import (
    KINDS,
    TARGET,
    TOLERANCE,
    VERIFIER,
    WRITTEN,
    checksums,
    differ,
    form,
    logits,
    read_tensors,
    target_params,
    trained_path,
)

CASES = {case.name: case for case in HEAD_CASES}
TOLD_BY_FILES = {"has_embedding": False, "has_lm_head": False, "has_draft_index": False}
# Parts of the target, from which the library trains, and what it takes of the target for blocks.
VERIFIER_STATE = {"verifier_norm.weight", "verifier_lm_head.weight"}
SHARED = {"embed_tokens.weight": "embed", "lm_head.weight": "lm_head"}


def write(folder, config, params):
    return checkpoints_convert.save_huggingface(config, params, folder, "float32", speculators=form(VERIFIER))


@pytest.mark.parametrize("name", WRITTEN)
def test_the_library_opens_what_is_written(tmp_path, name):
    case = WRITTEN[name]
    config, params = case.make()
    made, tensors = read_tensors(case.path)
    folder = write(tmp_path / "head", config, params)
    assert json.loads((folder / "config.json").read_text()) == made["written"]
    assert made["class"] == {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel"}[case.kind]
    assert made["taps"] == [1, 2, 3]
    files, state = checksums(load_file(folder / "model.safetensors")), made["state"]
    assert files == {name: state[name] for name in files}
    borrowed = set(state) - set(files) - VERIFIER_STATE
    taken = {"embed_tokens.weight"} if case.is_reduced else set(SHARED)
    assert borrowed == (taken if case.kind == "dflash" else set())
    for name in borrowed:
        array = np.asarray(target_params()[SHARED[name]])
        array = array if name == "embed_tokens.weight" else np.ascontiguousarray(array.T)
        assert state[name] == checksums({name: array})[name]
    assert differ(logits(config, params, (TARGET, target_params())), tensors["logits"]) <= TOLERANCE


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_library_saves_again_is_the_same_head(tmp_path, name):
    config, params = WRITTEN[name].make()
    folder = write(tmp_path / "head", config, params)
    again = checkpoints_convert.load(folder, dtype="float32")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    saved = checkpoints_convert.model_config(read_tensors(WRITTEN[name].path)[0]["config"])
    heads = [replace(one.draft_head, **TOLD_BY_FILES) for one in (saved, config) if one.draft_head is not None]
    assert heads[0] == heads[1]
    ours, theirs = (asdict(replace(one, draft_head=None)) for one in (config, saved))
    assert ours == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_the_library_trained_draft_the_same(tmp_path, kind):
    made, tensors = read_tensors(trained_path(kind))
    before, after = made["losses"]
    assert after < 0.5 * before
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(tensors[name].tobytes())
    config, params = checkpoints_convert.load(tmp_path, dtype="float32")
    assert config.draft_head is not None
    assert config.draft_head.kind == kind
    drafted = np.flatnonzero(np.asarray(params["draft_index"]) < DRAFT_VOCAB)
    np.testing.assert_array_equal(drafted, kept_tokens(0))
    assert differ(logits(config, params, (TARGET, target_params())), tensors["logits"]) <= TOLERANCE


@pytest.mark.matrix("eagle3_qwen3", "dflash_from_anchor")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind in KINDS])
def test_tensors_have_the_names_that_they_were_read_by(tmp_path, name):
    """Every golden head of these kinds, also where it was read in the form of its authors."""
    case = CASES[name]
    config, params = checkpoints_convert.load(write_checkpoint(tmp_path / "first", case, 0), dtype="float32")
    folder = write(tmp_path / "second", config, params)
    again = checkpoints_convert.load(folder, dtype="float32")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    wanted = load_file(write_checkpoint(tmp_path / "library", CASES[case.like or name], 0) / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert wanted.keys() == found.keys()
    for tensor in wanted:
        np.testing.assert_array_equal(wanted[tensor], found[tensor])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dspark_vanilla", "DFlashDraftModel in the speculators library's form cannot express draft_head"),
        ("dflash2", "DFlashDraftModel in the speculators library's form cannot express draft_head"),
        ("mtp_qwen3_5_speculators", "form is not written for heads of kind mtp"),
    ],
)
def test_other_kinds_are_refused(tmp_path, name, words):
    config, params = checkpoints_convert.load(write_checkpoint(tmp_path / "first", CASES[name], 0))
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path / "second", config, params)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("name", "fields", "head", "words"),
    [
        ("eagle3", {}, {"tap_layers": (1, 1, 2)}, "reads no state of a target twice, as 1,1,2 does"),
        ("eagle3", {}, {"tap_size": 48}, "cannot express draft_head"),
        ("dflash", {"embedding_multiplier": 4.0}, {}, "form cannot express embedding_multiplier=4.0, only 1.0"),
        ("dflash", {"logit_softcap": 30.0}, {}, "form cannot express logit_softcap=30.0, only None"),
    ],
)
def test_what_the_library_does_not_compute_is_refused(name, fields, head, words):
    config, _ = WRITTEN[name].make()
    assert config.draft_head is not None
    config = replace(config, **fields, draft_head=replace(config.draft_head, **head))
    with pytest.raises(CheckpointError, match=words):
        checkpoints_convert.huggingface_config(config, form(VERIFIER))


def test_a_model_is_no_head():
    with pytest.raises(CheckpointError, match="form is not written for LlamaForCausalLM"):
        checkpoints_convert.huggingface_config(TARGET, form(VERIFIER))
