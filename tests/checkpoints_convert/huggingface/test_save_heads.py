"""Heads are written as those who publish them do: EAGLE-3 in SGLang's form, DFlash in z-lab's."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_convert
from checkpoints_convert import CheckpointError
from tests.oracle.head_cases import DRAFT_VOCAB, HEAD_CASES, VOCAB, kept_tokens, write_checkpoint

CASES = {case.name: case for case in HEAD_CASES}


def saved(folder, name):
    """The files of a head, what was read of them, and the files that were written of that."""
    write_checkpoint(folder / "first", CASES[name], 0)
    config, params = checkpoints_convert.load(folder / "first", dtype="float32")
    checkpoints_convert.save_huggingface(config, params, folder / "second", "float32")
    data = json.loads((folder / "second" / "config.json").read_text())
    return (config, params), data, load_file(folder / "second" / "model.safetensors")


@pytest.mark.matrix("eagle3_llama", "eagle3_norms", "dflash", "dflash_reduced")
@pytest.mark.parametrize(
    "name",
    [
        *("eagle3_llama", "eagle3_llama_full", "eagle3_qwen3", "eagle3_norms", "eagle3_norm_before_fc"),
        *("eagle3_norm_before_residual", "eagle3_two_layers", "dflash", "dflash_reduced", "dflash_zlab"),
    ],
)
def test_what_is_written_is_read_again(tmp_path, name):
    (config, params), data, tensors = saved(tmp_path, name)
    again = checkpoints_convert.load(tmp_path / "second", dtype="float32")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    nested = data["dflash_config"]["target_layer_ids"] if name.startswith("dflash") else None
    if nested is not None:  # numbers of layers whose outputs are read
        assert nested == [tap - 1 for tap in config.draft_head.tap_layers]
    else:
        assert "midlayer.self_attn.q_proj.weight" in tensors
        assert ("eagle_config" in data) == bool(config.draft_head.tap_layers)
    if config.draft_head.has_draft_index:
        np.testing.assert_array_equal(tensors["d2t"] + np.arange(DRAFT_VOCAB), kept_tokens(0))
        np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), kept_tokens(0))
        assert (tensors["d2t"].dtype, tensors["t2d"].shape) == ("int64", (VOCAB,))


@pytest.mark.parametrize("name", ["dflash_window", "dflash_from_anchor"])
def test_what_has_no_field_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="DFlashDraftModel cannot express draft_head"):
        saved(tmp_path, name)
