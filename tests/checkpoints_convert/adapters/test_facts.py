"""Facts of an adapter's folder without its base."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints_convert import CheckpointError
from checkpoints_convert.adapters import adapter_facts, is_adapter

CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "owner/base",
    "r": 4,
    "lora_alpha": 8,
    "rank_pattern": {"v_proj": 2},
    "target_modules": ["q_proj", "v_proj"],
}
LAYER = "base_model.model.model.layers.0."
PAIRS = {
    f"{LAYER}self_attn.{name}.lora_{kind}.weight": shape
    for name, rank in (("q_proj", 4), ("v_proj", 2))
    for kind, shape in (("A", (rank, 6)), ("B", (6, rank)))
}


def write(folder, tensors, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def test_ranks_modules_and_bytes_are_the_headers(tmp_path):
    folder = write(tmp_path / "a", PAIRS, alora_invocation_tokens=[5, 7])
    assert is_adapter(folder)
    assert adapter_facts(folder) == {
        "type": "LORA",
        "base model": "owner/base",
        "rank": 4,
        "alpha": 8.0,
        "scales": [2.0, 4.0],
        "modules": {"q_proj": 1, "v_proj": 1},
        "parts": [],
        "invocation tokens": [5, 7],
        "tensors": 4,
        "tensor bytes": 2 * 2 * 6 * (4 + 2),
        "dtype": "F16",
        "refused": [],
    }
    (folder / "config.json").write_text("{}")
    assert not is_adapter(folder)  # a model that has an adapter beside it


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embed"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head"),
        (f"{LAYER}self_attn.q_proj.lora_magnitude_vector", "dora"),
        (f"{LAYER}self_attn.q_proj.lora_B.bias", "bias"),
        (f"{LAYER}self_attn.q_proj.base_layer.bias", "bias"),
        (f"{LAYER}mlp.experts.base_layer.lora_A.weight", "experts"),
        (f"{LAYER}mlp.experts.3.up_proj.lora_A.weight", "experts"),
        ("base_model.model.model.embed_tokens.weight", "saved_embed"),
        ("base_model.model.lm_head.weight", "saved_lm_head"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "tokens:3"),
        ("base_model.model.score.weight", "whole score"),
    ],
)
def test_parts_are_those_that_need_room(tmp_path, name, part):
    assert adapter_facts(write(tmp_path / "a", {**PAIRS, name: (3, 4)}))["parts"] == [part]


def test_what_is_refused_is_told_beside_the_facts(tmp_path):
    folder = write(tmp_path / "a", PAIRS, use_bdlora=True, r=0)
    facts = adapter_facts(folder)
    assert (facts["rank"], facts["tensors"]) == (0, 4)
    assert facts["refused"] == ["use_bdlora (block-diagonal pairs) is not supported, and is True"]
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    facts = adapter_facts(folder)
    assert (facts["tensors"], facts["dtype"], len(facts["refused"])) == (0, None, 2)
    assert "is not opened, since a pickled file can run code" in facts["refused"][1]


def test_what_is_no_json_and_no_safetensors_is_an_error(tmp_path):
    folder = write(tmp_path / "a", PAIRS)
    (folder / "adapter_model.safetensors").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="too short for the 8-byte header"):
        adapter_facts(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        adapter_facts(folder)
