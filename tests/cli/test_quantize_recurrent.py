"""`jaxinfer quantize` and `jaxinfer convert` of models with recurrent layers: rounded to nearest, written, opened and
converted; what needs activations is refused before a text is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints_convert.load import open_checkpoint
from jaxinfer import LLM, SamplingParams
from jaxinfer.calibration import CalibrationOptions, FloatModel, quantize_model
from tests.checkpoints_convert.recurrent_files import FAMILIES, write
from tests.pallas_kernels.quick import quick

PROMPTS = [np.random.default_rng(size).integers(0, 256, size).tolist() for size in (5, 30, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BITS = {4: ["--bits", 4, "--group-size", 4], 8: ["--bits", 8]}


@pytest.fixture(scope="module", params=quick(FAMILIES, "lfm2"))
def source(request, tmp_path_factory):
    return write(request.param, tmp_path_factory.mktemp("recurrent"))


def answers(model) -> list[list[int]]:
    with LLM(model, max_model_len=128, max_seqs=3, page_size=8) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def convert_and_back(jaxinfer, source, folder) -> None:
    """To folder/native, and from there to folder/back."""
    for start, end, form in ((source, "native", "native"), (folder / "native", "back", "huggingface")):
        result = jaxinfer("convert", start, folder / end, "--to", form)
        assert result.exit_code == 0, result.stderr


@pytest.mark.slow
def test_there_and_back_again_gives_the_same_answers(jaxinfer, source, tmp_path):
    convert_and_back(jaxinfer, source, tmp_path)
    expected = answers(source)
    assert len({tuple(one) for one in expected}) == len(PROMPTS)
    assert answers(tmp_path / "native") == answers(tmp_path / "back") == expected


@pytest.mark.slow
@pytest.mark.parametrize("bits", quick(BITS, 4))
def test_what_is_written_answers_as_what_was_rounded(jaxinfer, source, tmp_path, bits):
    result = jaxinfer("quantize", source, tmp_path / "out", "--method", "rtn", *BITS[bits])
    assert result.exit_code == 0, result.stderr
    with LLM(source, max_model_len=128) as llm:
        config, params = llm.config, jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), llm.params)
    options = CalibrationOptions("rtn", bits, 4 if bits == 4 else "auto", dtype="float32")
    rounded = quantize_model(FloatModel.of(config, params), options).params
    expected = answers((config, rounded))
    assert bits == 8 or expected != answers((config, params))
    assert answers(tmp_path / "out") == expected
    convert_and_back(jaxinfer, tmp_path / "out", tmp_path)
    assert answers(tmp_path / "native") == answers(tmp_path / "back") == expected


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant", "auto"])
def test_methods_that_need_activations_are_refused_before_a_text_is_read(jaxinfer, source, tmp_path, method):
    more = ["--max-kl", 1] if method == "auto" else []
    result = jaxinfer("quantize", source, tmp_path / "out", "--method", method, "--calibration", "no/such/text", *more)
    name = "gptq" if method == "auto" else method
    assert result.exit_code == 1
    assert f"{name} is not supported for" in result.stderr
    assert "which has recurrent layers; rounding to nearest (rtn) is" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "attention", "layer"),
    quick(
        [
            ("lfm2", "model.layers.1.self_attn", 1),
            ("nemotron_h", "model.layers.2.mixer", 2),
            ("qwen3_5", "model.layers.1.self_attn", 1),
        ],
        ("nemotron_h", "model.layers.2.mixer", 2),
    ),
)
def test_scales_of_the_cache_are_of_the_layers_with_attention(jaxinfer, tmp_path, caplog, family, attention, layer):
    scales = {f"{attention}.k_scale": 0.03, f"{attention}.v_scale": 0.02}
    source, found = write(family, tmp_path, scales), {}
    result = jaxinfer("quantize", source, tmp_path / "out", "--method", "rtn", *BITS[8])
    assert result.exit_code == 0, result.stderr
    convert_and_back(jaxinfer, tmp_path / "out", tmp_path)
    for name in (family, "out", "native", "back"):
        with open_checkpoint(tmp_path / name) as opened:
            found[name] = opened.kv_scales
            assert {number for number, one in enumerate(found[name]) if one.k != (1.0,)} == {layer}
    assert len(set(found.values())) == 1
    assert not [record for record in caplog.records if "scales" in record.getMessage()]
    for name in ("out", "back"):
        with safe_open(tmp_path / name / "model.safetensors", "numpy") as file:
            written = [name for name in file.keys() if name.endswith(("k_scale", "v_scale"))]  # noqa: SIM118
        assert [int(name.split(".")[2]) for name in written] == [layer] * 2
    with LLM(tmp_path / "out", kv_dtype="fp8_e4m3", max_model_len=128, max_seqs=3) as llm:
        assert llm.engine.runner.kv_scales is not None
        assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)
