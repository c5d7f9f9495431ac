"""Files of draft heads: what they are told by, and one clear error for damage."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints_convert
from checkpoints_convert import CheckpointError
from jaxinfer.models import tap_names_of
from tests.oracle.head_cases import DRAFT_VOCAB, HEAD_CASES, VOCAB, kept_tokens, write_checkpoint, write_target

CASES = {case.name: case for case in HEAD_CASES}
REDUCED, BLOCKS, LATER = CASES["eagle3_llama"], CASES["dflash"], CASES["mtp_deepseek_v3"]


def damaged(folder, case, *, tensors=lambda tensors: None, config=lambda config: None):
    """The files of a case, changed."""
    write_checkpoint(folder, case, 0)
    stored, fields = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    tensors(stored)
    config(fields)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.form not in ("hub", "packed")])
def test_heads_are_told_by_their_files(tmp_path, name):
    case = CASES[name]
    write_checkpoint(tmp_path / "head", case, 0)
    assert checkpoints_convert.is_head_folder(tmp_path / "head")
    config, shapes = checkpoints_convert.abstract(tmp_path / "head")
    head = config.draft_head
    assert head is not None
    assert head.has_embedding == (case.has_embedding or case.form == "deepspec")
    assert head.has_lm_head == (case.has_head or case.form == "deepspec")
    assert ("draft_index" in shapes) == (head.vocab_size == DRAFT_VOCAB)
    if case.kind != "mtp":
        states = tuple("embed" if tap == 0 else f"layers.{tap - 1}.residual" for tap in case.taps)
        assert tap_names_of(head, case.target["num_hidden_layers"]) == states
    target = write_target(tmp_path / "target", case, 0)
    assert not checkpoints_convert.is_head_folder(target)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("dflash", ()), ("dflash_window", (0,)), ("dflash_window_both_ways", ()), ("dflash_zlab_window", (0,))],
)
def test_layers_in_which_blocks_are_causal(tmp_path, name, layers):
    """Those with a window, unless the files say otherwise."""
    write_checkpoint(tmp_path, CASES[name], 0)
    config, _ = checkpoints_convert.abstract(tmp_path)
    assert config.draft_head is not None
    assert config.draft_head.causal_layers == layers


def test_a_smaller_vocabulary_is_read_from_differences(tmp_path):
    write_checkpoint(tmp_path, REDUCED, 0)
    _, params = checkpoints_convert.load(tmp_path)
    expected = np.full(VOCAB, DRAFT_VOCAB)
    expected[kept_tokens(0)] = np.arange(DRAFT_VOCAB)
    np.testing.assert_array_equal(params["draft_index"], expected)


def change(tensors, name, values):
    tensors[name] = values(tensors[name])


DAMAGE = {
    "a token twice": (REDUCED, {"tensors": lambda t: change(t, "d2t", lambda d: np.r_[d[0], d[0] - 1, d[2:]])}, "d2t"),
    "a token beyond the target's": (REDUCED, {"tensors": lambda t: change(t, "d2t", lambda d: d + VOCAB)}, "d2t"),
    "no vocabulary": (REDUCED, {"tensors": lambda t: t.pop("d2t")}, "'d2t' .* is missing"),
    "a vocabulary of floats": (REDUCED, {"tensors": lambda t: change(t, "d2t", lambda d: d.astype("f4"))}, "d2t.*F32"),
    "a projection of fewer states": (REDUCED, {"tensors": lambda t: change(t, "fc.weight", lambda w: w[:, 32:])}, "fc"),
    "a layer is missing": (BLOCKS, {"tensors": lambda t: t.pop("layers.1.mlp.up_proj.weight")}, "up_proj.*is missing"),
    "an unknown tensor": (BLOCKS, {"tensors": lambda t: t.update(extra=np.zeros(3, "f4"))}, "'extra'.*not of this"),
    "a block of one": (BLOCKS, {"config": lambda c: c.update(block_size=1)}, "block_size=1 must be 2 to 32"),
    "a block of text": (BLOCKS, {"config": lambda c: c.update(block_size="8")}, "block_size must be an integer"),
    "no mask": (BLOCKS, {"config": lambda c: c.pop("mask_token_id")}, "mask_token_id is missing"),
    "layers of text": (
        REDUCED,
        {"config": lambda c: c.update(eagle_aux_hidden_state_layer_ids=["2"])},
        "target layer ids must be a list",
    ),
    "two kinds of norm": (
        REDUCED,
        {"config": lambda c: c.update(fc_norm=True, norm_before_fc=True)},
        "fc_norm and norm_before_fc are both true",
    ),
    "a larger vocabulary": (REDUCED, {"config": lambda c: c.update(draft_vocab_size=999)}, "999 is more than"),
    "layers of another kind": (
        REDUCED,
        {"config": lambda c: c["transformer_layer_config"].update(model_type="gpt2")},
        "gpt2",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_error(tmp_path, kind):
    case, changes, message = DAMAGE[kind]
    with pytest.raises(CheckpointError, match=message):
        checkpoints_convert.load(damaged(tmp_path, case, **changes))


def test_multi_token_prediction_needs_layers_in_the_files(tmp_path):
    write_checkpoint(tmp_path / "with", LATER, 0)
    with checkpoints_convert.open_checkpoint(tmp_path / "with", is_mtp=True) as checkpoint:
        assert checkpoint.config.draft_head is not None
    write_target(tmp_path / "without", LATER, 0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* is missing"):
        checkpoints_convert.open_checkpoint(tmp_path / "without", is_mtp=True)
    none = damaged(tmp_path / "none", LATER, config=lambda config: config.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match="no layers for multi-token prediction"):
        checkpoints_convert.open_checkpoint(none, is_mtp=True)
    write_target(tmp_path / "llama", REDUCED, 0)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        checkpoints_convert.open_checkpoint(tmp_path / "llama", is_mtp=True)
