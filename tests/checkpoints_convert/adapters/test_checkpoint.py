"""Checkpoints with an adapter merged: written in both forms, of quantized bases too, whole or not at all."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import checkpoints_convert
from checkpoints_convert import CheckpointError, convert, verify_against
from checkpoints_convert.adapters import merged, open_merged, read_adapter
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.adapters.published import PeftFolder, change, linears, loaded, plain
from tests.checkpoints_convert.family_files import Files, flat
from tests.checkpoints_convert.formats.tiny import tiny
from tests.checkpoints_convert.gguf.gguf_models import write_random_llama


@pytest.fixture
def base(tmp_path) -> Path:
    return plain("llama", "q_proj")[0].write(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path) -> Path:
    return plain("llama", "q_proj")[1].write(tmp_path / "adapter")


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def edit(folder: Path, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["native", "huggingface"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral_apart"])
def test_a_written_model_is_the_merged_one(name, to, tmp_path):
    ends = ("q_proj", "w2") if name == "mixtral_apart" else ("q_proj", "up_proj")
    files, folder = plain(name, *ends)
    if name == "gemma3":  # its tied head becomes one of its own
        folder.config["modules_to_save"] = ["embed_tokens"]
        table = files.tensors["model.embed_tokens.weight"]
        folder.tensors["model.embed_tokens.weight"] = table[::-1]
    base, adapter = files.write(tmp_path / "base"), folder.write(tmp_path / "adapter")
    report = convert(base, tmp_path / "out", adapter=adapter, to=to, progress=None)
    config, params = checkpoints_convert.load(base)
    config, params = merged(config, params, read_adapter(adapter, config))
    own, written = checkpoints_convert.load(tmp_path / "out")
    assert own == config
    wanted, written = flat(params), flat(written)
    assert written.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(written[key], array, err_msg=key)
    before = flat(checkpoints_convert.load(base)[1])
    assert report.num_changed == sum((before[key] != x).any() for key, x in wanted.items() if key in before)
    assert (report.num_dequantized, report.adapter) == (0, adapter)
    json.dumps(report.to_dict())


@pytest.mark.slow
def test_logits_are_those_of_changed_published_tensors(tmp_path):
    files, folder = plain("llama", "q_proj", "down_proj", dora=True)
    convert(files.write(tmp_path / "base"), tmp_path / "out", adapter=folder.write(tmp_path / "adapter"), progress=None)
    tensors = dict(files.tensors)
    for module in linears(files, "q_proj", "down_proj"):
        tensors[f"{module}.weight"] = change(folder, module, tensors[f"{module}.weight"], 2.0).astype(np.float32)
    wanted = Files(files.config, tensors).write(tmp_path / "wanted")
    size = files.config["vocab_size"]
    report = verify_against(tmp_path / "out", wanted, token_ids=[number % size for number in range(30)])
    assert report.max_logit_difference < 1e-4
    base = verify_against(tmp_path / "out", tmp_path / "base", token_ids=[number % size for number in range(30)])
    assert base.max_logit_difference > 1e-2


def test_weights_are_rounded_once(tmp_path):
    """Rounded before the sum, a small change of a large weight would be another."""
    files, folder = plain("llama", "q_proj", lora_alpha=0.01)
    base = files.write(tmp_path / "base")
    with open_merged(base, folder.write(tmp_path / "adapter"), dtype="bfloat16") as checkpoint:
        path = ("layers", "0", "attention", "q_proj", "weight")
        written = checkpoint.read_leaf(path)
    module = "model.layers.0.self_attn.q_proj"
    wanted = change(folder, module, files.tensors[f"{module}.weight"], 0.01 / 4).astype(np.float32)
    assert isinstance(written, np.ndarray)
    assert written.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(written.T, wanted.astype(ml_dtypes.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["native", "huggingface"])
def test_a_quantized_base_becomes_dense(to, tmp_path):
    base = tiny("gptq-act-order")
    folder = PeftFolder({"target_modules": ["q_proj"]})
    wanted = dict(base.weights)
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn.q_proj"
        folder.add(module, *base.weights[f"{module}.weight"].shape[::-1])
        wanted[f"{module}.weight"] = change(folder, module, base.weights[f"{module}.weight"], 2.0)
    source = base.write(tmp_path / "base")
    adapter = folder.write(tmp_path / "adapter")
    report = convert(source, tmp_path / "out", adapter=adapter, to=to, progress=None)
    assert report.num_dequantized == 14
    _, params = checkpoints_convert.load(tmp_path / "out")
    plain_config = {key: value for key, value in base.config.items() if key != "quantization_config"}
    same = Files(plain_config, {name: np.asarray(x, np.float32) for name, x in wanted.items()})
    for name, array in loaded(same, tmp_path / "wanted")[1].items():
        np.testing.assert_allclose(flat(params)[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
    if to == "huggingface":
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_gguf_file_becomes_dense(tmp_path):
    source = write_random_llama(tmp_path / "model-Q4_K.gguf", "Q4_K", num_layers=1)
    folder = PeftFolder({"target_modules": ["q_proj"], "base_model_name_or_path": "owner/model"})
    folder.add("model.layers.0.self_attn.q_proj", 256, 256)
    adapter = folder.write(tmp_path / "adapter")
    options = {"adapter": adapter, "dtype": "float32", "progress": None}
    with pytest.raises(CheckpointError, match=r"'owner/model', the base model is '.*Q4_K.gguf'.* --base-model owner/m"):
        convert(source, tmp_path / "out", **options)
    with pytest.raises(ValueError, match=r"requantize='int8' \(--requantize\) is not for a merge"):
        convert(source, tmp_path / "out", base_model="model", requantize="int8", **options)
    assert left(tmp_path) == {source.name, "adapter"}
    report = convert(source, tmp_path / "out", base_model="model", requantize="dense", **options)
    config, params = checkpoints_convert.load(tmp_path / "out")
    assert report.num_dequantized == 8  # the head too
    assert not any(map(is_quantized, flat(params).values()))
    dense = checkpoints_convert.load(source, requantize="dense", dtype="float32")[1]
    wanted = flat(merged(config, dense, read_adapter(adapter, config))[1])
    for name, array in flat(params).items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_name_of_the_base(base, adapter, tmp_path, monkeypatch):
    edit(adapter, base_model_name_or_path="owner/Base")
    convert(base, tmp_path / "by-folder", adapter=adapter, progress=None)
    monkeypatch.chdir(base)
    convert(".", tmp_path / "from-inside", adapter=adapter, progress=None)
    base.rename(tmp_path / "renamed")
    with pytest.raises(CheckpointError, match=r"is 'owner/Base', the base model is '.*renamed'; .*base_model="):
        convert(tmp_path / "renamed", tmp_path / "out", adapter=adapter, progress=None)
    convert(tmp_path / "renamed", tmp_path / "out", adapter=adapter, base_model="owner/base", progress=None)
    with pytest.raises(ValueError, match="no adapter is given"):
        convert(tmp_path / "renamed", tmp_path / "second", base_model="owner/base", progress=None)


REFUSED = [
    ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    ({"use_bdlora": True}, "use_bdlora"),
    ({"alora_invocation_tokens": [1]}, r"cannot be merged: .* invocation tokens \[1\]"),
    ({"target_modules": ["q_proj", "w9"]}, "'w9'"),
]


@pytest.mark.parametrize("to", ["native", "huggingface"])
@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[next(iter(fields)) for fields, _ in REFUSED])
def test_refusals_write_nothing(fields, message, to, base, adapter, tmp_path):
    edit(adapter, **fields)
    before = left(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        convert(base, tmp_path / "out", adapter=adapter, to=to, progress=None)
    assert left(tmp_path) == before


def test_a_folder_without_an_adapter_and_a_destination_that_exists(base, adapter, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        convert(base, tmp_path / "out", adapter=base, progress=None)
    with pytest.raises(CheckpointError, match="exists"):
        convert(base, adapter, adapter=adapter, progress=None)
    assert left(tmp_path) == {"base", "adapter"}


def test_an_interrupted_write_leaves_nothing(base, adapter, tmp_path):
    def interrupt(name: str, done: int, total: int) -> None:
        if name.startswith("layers.1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(base, tmp_path / "out", adapter=adapter, to="huggingface", progress=interrupt)
    assert left(tmp_path) == {"base", "adapter"}


def test_an_interrupted_merge_resumes_with_the_same_adapter_only(base, adapter, tmp_path):
    def interrupt(name: str, done: int, total: int) -> None:
        if name.startswith("layers.1"):
            raise KeyboardInterrupt

    for other, num_resumed in ((False, 2), (True, 0)):
        out = tmp_path / f"out-{other}"
        with pytest.raises(KeyboardInterrupt):
            convert(base, out, adapter=adapter, progress=interrupt)
        assert not out.exists()
        if other:
            edit(adapter, lora_alpha=99)
        report = convert(base, out, adapter=adapter, progress=None)
        assert report.num_resumed_units == num_resumed
    config, params = checkpoints_convert.load(base)
    wanted = flat(merged(config, params, read_adapter(adapter, config))[1])
    for name, array in flat(checkpoints_convert.load(tmp_path / "out-True")[1]).items():
        np.testing.assert_array_equal(array, wanted[name])


def tokenizer(**tokens: int) -> str:
    return json.dumps({"added_tokens": [{"content": text, "id": number} for text, number in tokens.items()]})


def test_the_tokenizer_and_template_of_an_adapter_replace_those_of_the_base(base, adapter, tmp_path):
    of_base = (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "chat_template.jinja",
    )
    for name in (*of_base, "LICENSE"):
        (base / name).write_text(tokenizer(base=0) if name == "tokenizer.json" else '"of the base"')
    (base / "tokenizer_config.json").write_text('{"of": "base"}')

    def files(number: int) -> dict[str, str]:
        out = tmp_path / f"out{number}"
        convert(base, out, adapter=adapter, to="huggingface", progress=None)
        return {path.name: path.read_text() for path in out.iterdir() if path.name in (*of_base, "LICENSE")}

    assert files(1).keys() == {*of_base, "LICENSE"}
    assert '"base"' in files(2)["tokenizer.json"]
    (adapter / "chat_template.jinja").write_text("of the adapter")
    own = files(3)
    assert own["chat_template.jinja"] == "of the adapter"
    assert "base" in own["tokenizer_config.json"] + own["tokenizer.json"]
    (adapter / "chat_template.jinja").unlink()
    # A vocabulary is one set of files, and a template may lie in the configuration, before which a file would count.
    (adapter / "tokenizer.json").write_text(tokenizer(own=1))
    (adapter / "tokenizer_config.json").write_text('{"of": "adapter"}')
    own = files(4)
    assert own.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"}
    assert "own" in own["tokenizer.json"]
    assert "adapter" in own["tokenizer_config.json"]
    (adapter / "tokenizer_config.json").write_text('{"chat_template": "of the adapter"}')
    assert files(5).keys() == {"tokenizer.json", "tokenizer_config.json", "LICENSE"}
    # A folder that is named is what counts.
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "tokenizer.json").write_text(tokenizer(named=2))
    convert(base, tmp_path / "named-out", adapter=adapter, tokenizer=tmp_path / "named", progress=None)
    assert "named" in (tmp_path / "named-out" / "tokenizer.json").read_text()
    assert not (tmp_path / "named-out" / "tokenizer_config.json").exists()


def test_tokens_without_an_embedding_are_refused(base, adapter, tmp_path):
    size = checkpoints_convert.load(base)[0].vocab_size
    (adapter / "tokenizer.json").write_text(tokenizer(last=size - 1, new=size))
    with pytest.raises(CheckpointError, match=rf"the token 'new' with the id {size}, and the merged model has {size}"):
        convert(base, tmp_path / "out", adapter=adapter, progress=None)
    assert left(tmp_path) == {"base", "adapter"}
    (base / "tokenizer.json").write_text(tokenizer(new=size))  # the base has it too, as Gemma 3 one for images
    convert(base, tmp_path / "out", adapter=adapter, progress=None)


def test_tokenizer_files_of_an_adapter_may_not_be_links_to_others(base, adapter, tmp_path):
    (tmp_path / "secret").write_text("{}")
    (adapter / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="is a link to"):
        convert(base, tmp_path / "out", adapter=adapter, progress=None)


@pytest.mark.parametrize("to", ["native", "huggingface"])
def test_added_tokens_make_a_larger_vocabulary(to, tmp_path):
    files, folder = plain("llama", "q_proj")
    size, width = files.tensors["model.embed_tokens.weight"].shape
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = np.random.default_rng(len(name)).standard_normal((2, width)).astype(np.float32)
        folder.tensors[name] = np.concatenate([files.tensors[name], rows])
    adapter = folder.write(tmp_path / "adapter")
    (adapter / "tokenizer.json").write_text(tokenizer(new=size, newer=size + 1))
    convert(files.write(tmp_path / "base"), tmp_path / "out", adapter=adapter, to=to, progress=None)
    config, params = checkpoints_convert.load(tmp_path / "out")
    assert config.vocab_size == size + 2
    np.testing.assert_array_equal(params["embed"], folder.tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head"], folder.tensors["lm_head.weight"].T)


def test_values_that_are_not_finite_end_the_merge(base, adapter, tmp_path):
    edit(adapter, lora_alpha=1e15)
    with pytest.raises(CheckpointError, match=r"q_proj'.* values are NaN or infinite"):
        convert(base, tmp_path / "out", adapter=adapter, dtype="float16", to="huggingface", progress=None)
    assert left(tmp_path) == {"base", "adapter"}


def test_an_adapter_alone_is_no_model(adapter):
    with pytest.raises(CheckpointError, match=r"an adapter, not a whole model; .* convert MODEL DST --merge-lora "):
        checkpoints_convert.load(adapter)
