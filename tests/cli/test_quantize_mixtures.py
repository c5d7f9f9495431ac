"""`jaxinfer quantize` of mixtures of experts and latent attention: written expert by expert, and opened again."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints_convert
from jaxinfer.calibration import driver
from jaxinfer.cli.quantize import summary
from jaxinfer.models import MLAConfig, ModelConfig, MoEConfig, RopeConfig, abstract_params
from jaxinfer.quantization.tree import is_quantized

TEXT = ["--samples", 32, "--length", 32]
MIXTRAL = ModelConfig(
    architecture="MixtralForCausalLM",
    vocab_size=260,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(rotary_dim=16),
    moe=MoEConfig(4, 2, 32, (0, 1)),
)
DEEPSEEK = replace(
    MIXTRAL,
    architecture="DeepseekV3ForCausalLM",
    num_kv_heads=1,
    head_dim=32,
    rope=RopeConfig(rotary_dim=8),
    attention_scale=0.25,
    moe=MoEConfig(
        4, 2, 32, (0, 1), "sigmoid", scale=2.5, group_score="top2_sum", has_correction_bias=True, shared_size=32
    ),
    mla=MLAConfig(latent_size=24, rope_size=8, nope_size=8, value_size=16, query_rank=32),
)
GPT_OSS = replace(
    MIXTRAL,
    architecture="GptOssForCausalLM",
    qkv_bias=True,
    output_bias=True,
    has_sinks=True,
    norm="rms_float32",
    sliding_windows=(24, None),
    rope=RopeConfig("yarn", rotary_dim=16, factor=32.0, original_length=4096, truncate=False),
    moe=MoEConfig(
        4, 2, 32, (0, 1), "softmax_of_chosen", has_router_bias=True, has_expert_bias=True, clamp=7.0, clamp_slope=1.702
    ),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    random = np.random.default_rng(0)
    path.write_text("".join(random.choice(["the ", "of ", "model ", "weight ", "\n", "token ", "in "], 400)))
    return path


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    """Writes a checkpoint of random weights with the tokenizer of the tiny one."""

    def write(config: ModelConfig) -> Path:
        random = np.random.default_rng(0)

        def one(path, leaf):
            if leaf.ndim == 1:
                return jnp.asarray(random.uniform(0.5, 1.5, leaf.shape), jnp.float32)
            return jnp.asarray(random.normal(0, 2 / np.sqrt(leaf.shape[-2]), leaf.shape), jnp.float32)

        params = jax.tree_util.tree_map_with_path(one, abstract_params(config))
        files = [Path(model) / name for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")]
        path = tmp_path_factory.mktemp("mixture") / "source"
        return checkpoints_convert.save_huggingface(config, params, path, "float32", extra_files=files)

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "method"),
    [
        pytest.param(DEEPSEEK, "gptq", marks=pytest.mark.slow),
        pytest.param(MIXTRAL, "awq", marks=pytest.mark.slow),
        (MIXTRAL, "smoothquant"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.architecture[:4],
)
def test_a_mixture_is_written_and_opens(jaxinfer, json_lines, source, text, tmp_path, config, method, monkeypatch):
    path, original = source(config), driver.quantize_layer
    size = [] if method == "smoothquant" else ["--group-size", 16]
    arguments = ["--method", method, "--calibration", text, *TEXT, *size, "--json"]

    def interrupt(program, number, *rest):
        if number == 1:
            raise KeyboardInterrupt
        return original(program, number, *rest)

    result = jaxinfer("quantize", path, tmp_path / "whole", *arguments)
    assert result.exit_code == 0, result.stderr
    with monkeypatch.context() as interrupted:
        interrupted.setattr(driver, "quantize_layer", interrupt)
        assert jaxinfer("quantize", path, tmp_path / "out", *arguments).exit_code == 130
    again = jaxinfer("quantize", path, tmp_path / "out", *arguments)
    assert again.exit_code == 0, again.stderr
    reports = [json_lines(each.stdout)[0] for each in (result, again)]
    assert [report["num_resumed"] for report in reports] == [0, 1]
    assert reports[0]["layers"] == reports[1]["layers"]
    whole, out = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert whole == out
    report = reports[0]
    assert report["max_logit_difference"] < 1e-3
    down = report["layers"][1]["linears"]["mlp.experts.down_proj"]
    assert down["num_experts"] == 4
    if method != "smoothquant":
        assert down["error"] <= 1.0001 * down["rounded"]
    found, params = checkpoints_convert.load(tmp_path / "out")
    assert found.moe == config.moe
    stack = params["layers"]["1"]["mlp"]["experts"]["down_proj"]["weight"]
    assert is_quantized(stack)
    assert stack.scheme.activations == ("int8" if method == "smoothquant" else None)


@pytest.mark.slow
def test_bits_of_mixtures_are_chosen(jaxinfer, json_lines, source, text, tmp_path):
    arguments = ["--method", "auto", "--max-kl", 0.01, "--bits", 3, "--calibration", text, *TEXT, "--group-size", 16]
    result = jaxinfer("quantize", source(MIXTRAL), tmp_path / "out", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    [report] = json_lines(result.stdout)
    assert report["quality"]["kl"] <= 0.01
    assert set(report["auto"]["bits"]) == {
        f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attention", "mlp")
    }


def test_what_was_left_out_is_told():
    note = "mlp.experts.up_proj: 2 of 64 experts had fewer than 512 tokens: rounded to nearest"
    layers = [{"layer": number, "linears": {}, "notes": [note]} for number in range(9)]
    report = {"path": "out", "method": "gptq", "schemes": {}, "num_bytes": 1, "source_bytes": 2, "num_resumed": 0,
              "quality": None, "max_logit_difference": 0.0, "layers": layers}  # fmt: skip
    lines = [" ".join(line.split()) for line in summary(report).splitlines()]
    assert f"layer 5 {note}" in lines
    assert any(line.startswith("and 3 more") for line in lines), lines
    assert sum(note in line for line in lines) == 6


@pytest.mark.slow
def test_experts_in_one_tensor_are_refused_before_anything_is_done(jaxinfer, source, text, tmp_path):
    path = source(GPT_OSS)
    for method in (["rtn"], ["gptq", "--calibration", text, *TEXT]):
        result = jaxinfer("quantize", path, tmp_path / "out", "--method", *method, "--group-size", 16)
        assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
        assert "experts.down_proj.weight: all experts are one tensor in this family" in result.stderr
        assert "--keep '*.experts'" in result.stderr
    kept = ["--method", "rtn", "--group-size", 16, "--keep", "*.experts"]
    result = jaxinfer("quantize", path, tmp_path / "out", *kept)
    assert result.exit_code == 0, result.stderr
