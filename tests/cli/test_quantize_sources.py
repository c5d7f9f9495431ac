"""What a source has beside its weights, or instead of them: scales of the cache, and weights quantized already."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints_convert
from checkpoints_convert import LayerKVScales
from jaxinfer.calibration import LayerReport
from jaxinfer.cli.quantize_files import adjusted_kv_scales


def changed(model: str, path: Path, change) -> Path:
    """A copy of a checkpoint whose tensors `change` has changed."""
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def with_scales(model, tmp_path_factory) -> Path:
    """With scales of an 8-bit cache: one number for keys, one per head for values."""

    def add(tensors):
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = np.array([0.5 + layer], np.float32)
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = np.array([0.02, 0.03], np.float32)

    return changed(model, tmp_path_factory.mktemp("scales") / "source", add)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"the weights of token {number} are small; " for number in range(60)))
    return path


@pytest.mark.matrix
@pytest.mark.parametrize(
    "method", [["rtn"], ["gptq"], ["smoothquant"], ["awq", "--keep", "*.o_proj"], ["auto", "--max-kl", 10]]
)
def test_scales_of_the_cache_are_kept(jaxinfer, with_scales, text, tmp_path, method):
    of_text = [] if method == ["rtn"] else ["--calibration", text, "--samples", 8, "--length", 16]
    size = [] if method == ["smoothquant"] else ["--group-size", 16]
    result = jaxinfer("quantize", with_scales, tmp_path / "out", "--method", *method, *of_text, *size)
    assert result.exit_code == 0, result.stderr
    assert "warning" not in result.stderr
    assert checkpoints_convert.kv_scales(tmp_path / "out") == checkpoints_convert.kv_scales(with_scales) != ()
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert scheme["strategy"] == "attn_head"


@pytest.mark.slow
def test_scales_of_values_that_were_divided_by_channel_are_dropped(jaxinfer, with_scales, text, tmp_path):
    arguments = ["--method", "awq", "--calibration", text, "--samples", 8, "--length", 16, "--group-size", 16]
    result = jaxinfer("quantize", with_scales, tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "'model.layers.0.self_attn.v_scale' and 1 more: dropped, 1 is written in its place" in result.stderr
    found, original = (checkpoints_convert.kv_scales(path) for path in (tmp_path / "out", with_scales))
    assert [layer.k for layer in found] == [layer.k for layer in original]
    assert [layer.v for layer in found] == [(1.0, 1.0)] * 2


def test_scales_follow_values_that_were_divided_by_head():
    layers = [
        LayerReport(number, {}, None, divisors)
        for number, divisors in enumerate([(), (2.0, 2.0), (2.0, 4.0), (2.0, None)])
    ]
    one, two = LayerKVScales((0.5,), (1.0,)), LayerKVScales((0.5,), (1.0, 3.0))
    assert adjusted_kv_scales([one] * 4, layers) == (
        (one, LayerKVScales((0.5,), (0.5,)), LayerKVScales((0.5,), (0.5, 0.25)), one), [3],
    )  # fmt: skip
    found, lost = adjusted_kv_scales([two] * 4, layers)
    assert [layer.v for layer in found] == [(1.0, 3.0), (0.5, 1.5), (0.5, 0.75), (1.0, 1.0)]
    assert lost == [3]


def nf4(tensors):
    """Rows of 32 are no whole blocks of 64, so that reading makes floats of it."""
    name, weight = "model.layers.0.mlp.up_proj.weight", tensors.pop("model.layers.0.mlp.up_proj.weight")
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors[name] = np.zeros((weight.size // 2, 1), np.uint8)
    tensors[f"{name}.absmax"] = np.ones(weight.size // 64, np.float32)
    tensors[f"{name}.quant_map"] = np.linspace(-1, 1, 16, dtype=np.float32)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compressed-tensors", "native", "bitsandbytes"])
def test_a_quantized_source_is_refused_before_anything_is_done(jaxinfer, model, tmp_path, kind, text):
    source = tmp_path / "source"
    if kind == "bitsandbytes":
        changed(model, source, nf4)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (source / "config.json").write_text(json.dumps(config))
        assert isinstance(checkpoints_convert.load(source)[1]["layers"]["0"]["mlp"]["up_proj"]["weight"].ndim, int)
        tensor, others = "model.layers.0.mlp.up_proj.weight", ""
    else:
        quantized = tmp_path / "quantized"
        assert jaxinfer("quantize", model, quantized, "--method", "rtn").exit_code == 0
        if kind == "native":
            checkpoints_convert.convert(quantized, source, progress=False)
            shutil.rmtree(quantized)
            tensor = "layers.0.attention.k_proj.weight"
        else:
            quantized.rename(source)
            tensor = "model.layers.0.self_attn.k_proj.weight_packed"
        others = ", and 13 other weights are"
    for method in (["rtn"], ["gptq", "--calibration", text]):
        result = jaxinfer("quantize", source, tmp_path / "out", "--method", *method)
        assert (result.exit_code, result.stdout) == (1, "")
        assert (
            f"{source}: tensor '{tensor}' is quantized already{others}: quantize the original checkpoint"
            in result.stderr
        )
        assert list(tmp_path.iterdir()) == [source]
