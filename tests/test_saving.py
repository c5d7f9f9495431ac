"""`LLM.save`: what it writes is a checkpoint with the same answers, whole or not there."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import load, open_checkpoint
from checkpoints_convert.gguf.write import save_gguf
from jaxinfer import LLM, SamplingParams
from jaxinfer.data import embedded_path
from jaxinfer.models import init_params
from tests.cli.conftest import write_checkpoint
from tests.tiny import TINY

OPTIONS: Any = {"max_seqs": 2, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def f(x):", "the end"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def answers(llm, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def saved(model, folder, prompts=PROMPTS, *, save=None, **options):
    """The answers before `LLM.save`, and those of what it wrote."""
    with LLM(model, **OPTIONS, **options) as llm:
        before = answers(llm, prompts)
        assert llm.save(folder, **(save or {})) == Path(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        return before, answers(llm, prompts)


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.slow
def test_a_checkpoint_comes_back_with_its_files(checkpoint, tmp_path):
    before, after = saved(str(checkpoint), tmp_path / "out")
    assert before == after
    assert names(tmp_path / "out") == names(checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (data["eos_token_id"], data["architectures"]) == (256, ["LlamaForCausalLM"])
    jax.tree.map(np.testing.assert_array_equal, load(checkpoint)[1], load(tmp_path / "out")[1])


def test_dtype(checkpoint, tmp_path):
    with LLM(str(checkpoint), **OPTIONS) as llm:
        llm.save(tmp_path / "out", dtype="bfloat16")
    config, params = load(tmp_path / "out")
    assert (config.dtype, params["embed"].dtype) == ("bfloat16", jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("int8", marks=pytest.mark.slow), "int4-g32"])
def test_quantized_weights_keep_their_values(checkpoint, tmp_path, recipe):
    before, after = saved(str(checkpoint), tmp_path / "out", quantize=recipe)
    assert before == after
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert data["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", [pytest.param("F16", marks=pytest.mark.slow), "Q8_0"])
def test_a_gguf_file_with_its_tokenizer_and_template(tmp_path, kind):
    found = embedded_path("demo")
    assert found is not None
    demo = Path(found)
    with open_checkpoint(demo) as source:
        save_gguf(source, tmp_path / "m.gguf", kind)
    before, after = saved(str(tmp_path / "m.gguf"), tmp_path / "out")
    assert before == after
    with LLM(str(tmp_path / "out"), **OPTIONS) as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.chat_template == (demo / "chat_template.jinja").read_text()
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] is not None


@pytest.mark.slow
def test_a_scheme_that_the_files_cannot_have_is_refused_with_what_works(checkpoint, tmp_path):
    with LLM(str(checkpoint), quantize="nf4", **OPTIONS) as llm:
        with pytest.raises(ValueError, match="dequantize=True writes floating-point weights"):
            llm.save(tmp_path / "out")
        assert names(tmp_path) == set()
        before = answers(llm)
        llm.save(tmp_path / "out", dequantize=True)
    with LLM(str(tmp_path / "out"), **OPTIONS) as llm:
        assert answers(llm) == before
        assert "quantized" not in llm.explain().to_dict()["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"offload": 1}, pytest.param({"offload": 2, "quantize": "int4-g32"}, marks=pytest.mark.slow)], ids=repr
)
def test_layers_in_the_hosts_memory_are_saved_too(checkpoint, tmp_path, options):
    before, after = saved(str(checkpoint), tmp_path / "out", **options)
    assert before == after


@pytest.mark.slow
def test_live_parameters(tmp_path):
    model = TINY, init_params(TINY, jax.random.key(0))
    before, after = saved(model, tmp_path / "out", [[5, 6, 7], [8, 9]])
    assert before == after
    assert names(tmp_path / "out") == {"config.json", "generation_config.json", "model.safetensors"}


def test_another_tokenizer_is_the_one_that_is_written(checkpoint, tmp_path):
    other = write_checkpoint(tmp_path / "other", chat_template="{{ messages[0].content }}")
    (other / "tokenizer.model").write_text("not of the model")
    for model in (str(checkpoint), load(checkpoint)):
        folder = tmp_path / f"out-{type(model).__name__}"
        with LLM(model, tokenizer=str(other), **OPTIONS) as llm:
            llm.save(folder)
        assert (folder / "tokenizer.model").exists()
        with LLM(str(folder), **OPTIONS) as llm:
            assert llm.get_tokenizer().chat_template == "{{ messages[0].content }}"


def test_what_is_there_stays(checkpoint, tmp_path):
    with LLM(str(checkpoint), **OPTIONS) as llm:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="mine: exists"):
            llm.save(tmp_path / "mine")
        with pytest.raises(ValueError, match=r"mine: holds neither config\.json"):
            llm.save(tmp_path / "mine", overwrite=True)
        assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
        with pytest.raises(ValueError, match="is the source itself"):
            llm.save(checkpoint, overwrite=True)
        (tmp_path / "empty").mkdir()
        llm.save(tmp_path / "empty")
        llm.save(tmp_path / "empty", overwrite=True)
    assert names(tmp_path) == {"mine", "empty"}


def test_a_failure_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("checkpoints_convert.huggingface.save.save_file", fail)
    with LLM(str(checkpoint), **OPTIONS) as llm, pytest.raises(OSError, match="No space left"):
        llm.save(tmp_path / "out")
    assert names(tmp_path) == set()


def test_what_cannot_be_saved_says_why(checkpoint, tmp_path):
    llm = LLM(str(checkpoint), mesh="model=1", **OPTIONS)
    with pytest.raises(ValueError, match="load without mesh="):
        llm.save(tmp_path / "out")
    llm.close()
    with (
        LLM(str(checkpoint), offload="disk", **OPTIONS) as from_disk,
        pytest.raises(ValueError, match="are on the disk, not in memory; copy its checkpoint"),
    ):
        from_disk.save(tmp_path / "out")
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.save(tmp_path / "out")
