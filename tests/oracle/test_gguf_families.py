"""Every family through GGUF: the parameters and the configuration are those of the safetensors checkpoint."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from checkpoints_convert import CheckpointError, load
from checkpoints_convert.gguf.architectures import ARCHITECTURES
from tests.checkpoints_convert.gguf.gguf_writer import write
from tests.oracle.cases import CASES, FOLDER, weights
from tests.oracle.gguf_families import CASES as GGUF_CASES
from tests.oracle.gguf_families import to_gguf, with_all_layers_alike


@cache
def made(name: str) -> dict:
    with safe_open(FOLDER / f"{name}.safetensors", "numpy") as file:
        return json.loads(file.metadata()["made"])


def checkpoint(name: str, tied: bool, seed: int = 0) -> tuple[str, dict, dict]:
    """Architecture of GGUF, config.json and tensors of a case, such that GGUF can say it."""
    architecture, changes = GGUF_CASES[name]
    kind = "tied" if tied else "untied"
    config = {**made(name)["configs"][kind], **changes}
    for key in ("layer_types", "no_rope_layers"):
        if config.get(key, ...) is None:  # the family's own pattern
            del config[key]
    rope = config.get("rope_parameters") or {}
    if "mscale_all_dim" in rope:  # GGUF has one number for both, as all models have
        config["rope_parameters"] = {**rope, "mscale": rope["mscale_all_dim"]}
    shapes = with_all_layers_alike(made(name)["shapes"][kind], config)
    tensors = {key: weights(key, tuple(shape), seed, CASES[name]) for key, shape in shapes.items()}
    return architecture, config, tensors


def save(directory, config, tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def differing(found, wanted, tolerance: float) -> list[str]:
    flat = dict(jax.tree_util.tree_leaves_with_path(wanted))
    other = dict(jax.tree_util.tree_leaves_with_path(found))
    assert flat.keys() == other.keys()
    return [
        f"{jax.tree_util.keystr(path)}: {float(jnp.abs(other[path] - leaf).max()):.2g}"
        for path, leaf in flat.items()
        if not np.allclose(other[path], leaf, rtol=0, atol=tolerance)
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_file_has_the_parameters_of_its_source(name, tmp_path):
    for tied in CASES[name].ties:
        architecture, config, tensors = checkpoint(name, tied)
        path = write(tmp_path / f"{tied}.gguf", *to_gguf(architecture, config, tensors))
        found_config, found = load(path)
        wanted_config, wanted = load(save(tmp_path / f"hf{tied}", config, tensors))
        assert found_config.to_dict() == wanted_config.to_dict()
        # Gemma's norms are stored as w + 1, which rounds.
        is_exact = not architecture.startswith("gemma")
        assert differing(found, wanted, 0.0 if is_exact else 2e-7) == []


def test_every_architecture_is_tried():
    assert {architecture for architecture, _ in GGUF_CASES.values()} == set(ARCHITECTURES)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v2", {"expert_gating_func": 2}, "is 2, sigmoid; with no bias .*only softmax"),
        ("deepseek_v2", {"expert_weights_norm": True}, "norm_topk_prob is true"),
        ("deepseek_v3", {"expert_gating_func": 1}, "is 1, softmax; with a bias .*only sigmoid"),
        ("deepseek_v3", {"expert_gating_func": None}, "is missing, which is softmax; with a bias"),
        ("deepseek_v3", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
        ("deepseek_v3", {"attention.value_length": 77}, "attention.value_length is 77, only"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
        ("gpt_oss", {"expert_gating_func": 1}, "expert_gating_func is 1, only 3"),
        ("mixtral", {"expert_weights_norm": False}, "expert_weights_norm is False, only True"),
        ("gemma2", {"embedding_scale": 3.0}, "embedding_scale is 3.0"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func is 1, only 2"),
        ("minimax_m2", {"expert_gating_func": 1}, "expert_gating_func is 1, only 2"),
        ("minimax_m2", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
        ("olmoe", {"attention.clamp_kqv": 8.0}, "attention.clamp_kqv is 8.0"),
        ("hunyuan_moe", {"expert_feed_forward_length": 48}, "expert_feed_forward_length is 48, only 96"),
        ("hunyuan_moe", {"expert_shared_count": 2}, "num_shared_expert 2 is not supported"),
    ],
)
def test_what_no_family_of_ours_computes_is_refused(name, changes, message, tmp_path):
    architecture, config, tensors = checkpoint(name, CASES[name].ties[0])
    metadata, arrays = to_gguf(architecture, config, tensors)
    metadata |= {f"{architecture}.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path / "model.gguf", metadata, arrays))


def test_blocks_for_multi_token_prediction_are_left_out(tmp_path):
    architecture, config, tensors = checkpoint("glm4_moe", CASES["glm4_moe"].ties[0])
    metadata, arrays = to_gguf(architecture, config, tensors)
    wanted = load(write(tmp_path / "model.gguf", metadata, arrays))
    count = config["num_hidden_layers"]
    later = {name.replace("blk.1.", f"blk.{count}."): array for name, array in arrays.items() if ".1." in name}
    later[f"blk.{count}.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    metadata |= {"glm4moe.block_count": count + 1, "glm4moe.nextn_predict_layers": 1}
    found = load(write(tmp_path / "later.gguf", metadata, {**arrays, **later}))
    assert found[0] == wanted[0]
    assert differing(found[1], wanted[1], 0.0) == []
    arrays["blk.0.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.nextn\.eh_proj\.weight' is not of this model"):
        load(write(tmp_path / "wrong.gguf", metadata, {**arrays, **later}))


def test_deepseek_v3_normalizes_only_where_the_file_says_so(tmp_path):
    architecture, config, tensors = checkpoint("deepseek_v3", CASES["deepseek_v3"].ties[0])
    metadata, arrays = to_gguf(architecture, config, tensors)
    del metadata["deepseek2.expert_weights_norm"]
    found, _ = load(write(tmp_path / "model.gguf", metadata, arrays))
    assert found.moe is not None
    assert not found.moe.normalize


def test_scales_and_caps_that_a_family_has_are_its_own(tmp_path):
    architecture, config, tensors = checkpoint("gemma2", CASES["gemma2"].ties[0])
    metadata, arrays = to_gguf(architecture, config, tensors)
    metadata |= {"gemma2.attention.scale": 0.125, "gemma2.final_logit_softcapping": 0.0}
    metadata |= {"gemma2.embedding_scale": float(config["hidden_size"] ** 0.5)}
    found, _ = load(write(tmp_path / "model.gguf", metadata, arrays))
    assert (found.attention_scale, found.logit_softcap) == (0.125, None)


def test_layers_that_are_not_used_are_logged_once(tmp_path, caplog):
    _, config, tensors = checkpoint("deepseek_v3", CASES["deepseek_v3"].ties[0])
    extra = {f"model.layers.{config['num_hidden_layers']}.{name}": np.zeros(4, np.float32) for name in ("a", "b")}
    load(save(tmp_path / "model", config, {**tensors, **extra}))
    (record,) = [record for record in caplog.records if "multi-token prediction" in record.getMessage()]
    assert "2 tensors of layers beyond the" in record.getMessage()


def test_deepseek_v2_with_another_scoring_is_refused_by_name(tmp_path):
    _, config, tensors = checkpoint("deepseek_v2", CASES["deepseek_v2"].ties[0])
    with pytest.raises(CheckpointError, match=r"scoring_func 'sigmoid' is not supported for DeepseekV2"):
        load(save(tmp_path / "model", {**config, "scoring_func": "sigmoid"}, tensors))
