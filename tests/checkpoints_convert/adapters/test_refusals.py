"""Fields that are not applied are refused by name before a tensor is read, and hostile folders give one error each."""

import json
import os
import struct
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from checkpoints_convert import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.adapters import read, read_adapter
from tests.checkpoints_convert.adapters.published import PREFIX, PeftFolder, base_config, base_files, plain

QUERY = "model.layers.0.self_attn.q_proj"
LLAMA = base_files("llama")
WIDTH = LLAMA.tensors["model.embed_tokens.weight"].shape[1]
VOCAB = LLAMA.tensors["model.embed_tokens.weight"].shape[0]


@pytest.fixture
def folder() -> PeftFolder:
    return plain("llama", "q_proj")[1]


def refused(folder: PeftFolder, tmp_path, match: str, name: str = "llama", **options) -> CheckpointError:
    path = folder.write(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=match) as error:
        read_adapter(path, base_config(name), **options)
    return error.value


# The configuration: found before the file of tensors is opened.

REFUSED = [
    ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    ({"peft_type": None}, "peft_type None is not supported"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora .block-diagonal pairs. is not supported"),
    ({"use_qalora": True}, "use_qalora .* is not supported"),
    ({"kasa_config": {"beta": 1}}, "kasa_config .* is not supported"),
    ({"velora_config": {"x": 1}}, "velora_config .* is not supported"),
    ({"monteclora_config": {"x": 1}}, "monteclora_config .* is not supported"),
    ({"arrow_config": {"x": 1}}, "arrow_config .* is not supported"),
    ({"megatron_config": {"x": 1}}, "megatron_config .* is not supported"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication .* is not supported"),
    ({"ensure_weight_tying": True}, "ensure_weight_tying .* is not supported"),
    ({"added_next_year": 1}, "added_next_year, a field that is not known, is not supported, and is 1"),
    ({"added_next_year": "x"}, "added_next_year"),
    ({"added_next_year": 0}, "added_next_year"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported: the adapter is for a base"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"init_lora_weights": "olora"}, "init_lora_weights"),
    ({"init_lora_weights": "corda"}, "init_lora_weights"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
    ({"use_dora": True, "alora_invocation_tokens": [1]}, "use_dora and alora_invocation_tokens"),
    ({"use_dora": True, "lora_bias": True}, "use_dora and lora_bias"),
    ({"r": 0}, "r must be an integer from 1 to 8192, got 0"),
    ({"r": 8193}, "r must be an integer from 1 to 8192, got 8193"),
    ({"r": 4.0}, "r must be an integer"),
    ({"r": True}, "r must be an integer"),
    ({"lora_alpha": "8"}, "lora_alpha must be a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
    ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
    ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\] must be an integer from 1 to 8192, got -1"),
    ({"rank_pattern": [1]}, "rank_pattern must map names to numbers"),
    ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\] must be a number"),
    ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has the pattern '\('"),
    ({"rank_pattern": {r"(?!x).*": 1}}, "rank_pattern has the pattern .*look-around is not supported"),
    ({"rank_pattern": {f"{i}.*": 1 for i in range(40)}}, "with patterns that are no plain names beyond the 32"),
    ({"rank_pattern": {f"{i}": 1 for i in range(10_001)}}, "with patterns beyond the 10000"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": [1]}, "target_modules must be a list of names"),
    ({"target_modules": {"q": 1}}, "target_modules must be a list of names"),
    ({"target_modules": "q_proj", "layers_to_transform": [0]}, "layers_to_transform cannot be used with"),
    ({"exclude_modules": "("}, "exclude_modules has the pattern"),
    ({"layers_to_transform": ["0"]}, "layers_to_transform must be a layer"),
    ({"layers_to_transform": [True]}, "layers_to_transform must be a layer"),
    ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform"),
    ({"layers_pattern": "(a+)+", "layers_to_transform": [0]}, r"layers_pattern '\(a\+\)\+' is not supported"),
    ({"target_parameters": "experts"}, "target_parameters must be a list of names"),
    ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names"),
    ({"trainable_token_indices": [-1]}, "trainable_token_indices must be a list of token ids"),
    ({"trainable_token_indices": {"embed_tokens": "all"}}, "trainable_token_indices must be a list of token ids"),
    ({"trainable_token_indices": [3, 4, 3]}, "trainable_token_indices has the token 3 twice"),
    ({"bias": "some"}, "bias must be 'none', 'all' or 'lora_only', got 'some'"),
    ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
    ({"fan_in_fan_out": "yes"}, "fan_in_fan_out must be true or false"),
    ({"alora_invocation_tokens": "hi"}, "alora_invocation_tokens must be a list of token ids"),
    ({"base_model_name_or_path": 3}, "base_model_name_or_path must be a string"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_configuration_is_refused_before_tensors_are_opened(folder, change, message, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "SafetensorsFile", None)
    folder.config |= change
    assert "adapter_config.json" in str(refused(folder, tmp_path, message))


def test_every_field_that_is_wrong_is_named(folder, tmp_path):
    folder.config |= {"use_qalora": True, "kasa_config": {"beta": 1}, "next": 2}
    assert len(refused(folder, tmp_path, "3 problems").problems) == 3


# Tensors.


def pair(rank: int = 4, inputs: int = WIDTH, outputs: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((rank, inputs), np.float32), np.ones((outputs, rank), np.float32)


def without(name: str):
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def with_(**changed):
    """Replaces or adds tensors; "__" in names is a dot."""
    return lambda tensors: {**tensors, **{name.replace("__", "."): x for name, x in changed.items()}}


def with_value(value: float):
    def change(tensors):
        array = tensors[f"{QUERY}.lora_B.weight"].copy()
        array[1, 2] = value
        return {**tensors, f"{QUERY}.lora_B.weight": array}

    return change


A, B = f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight"
HOSTILE = [
    (lambda t: {}, {}, "holds no tensors|has no tensors"),
    (without(A), {}, "'base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight' has no lora_A beside it"),
    (without(B), {}, "lora_A.weight' has no lora_B beside it"),
    (lambda t: without(A)(without(B)(t)), {}, f"module '{QUERY}' is a target, and has no tensors"),
    (lambda t: {**t, A: pair(3)[0]}, {}, rf"lora_A.weight' has shape \(3, {WIDTH}\), not \(4, {WIDTH}\) \(rank 4\)"),
    (lambda t: {**t, B: pair(3)[1]}, {}, rf"lora_B.weight' has shape \({WIDTH}, 3\), not \({WIDTH}, 4\)"),
    (lambda t: {**t, A: pair(inputs=7)[0]}, {}, r"has shape \(4, 7\), not"),
    (lambda t: {**t, A: np.ones(4, np.float32)}, {}, r"has shape \(4,\), not"),
    (lambda t: {**t, B: np.ones((WIDTH, 4), np.int8)}, {}, "has the dtype I8, not F64, F32, F16, BF16"),
    (lambda t: t, {"rank_pattern": {"q_proj": 8}}, r"not \(8, 64\) \(rank 8\)"),
    (with_value(np.nan), {}, "1 of 256 values are NaN or infinite"),
    (with_value(np.inf), {}, "1 of 256 values are NaN or infinite"),
    (lambda t: {**t, "model.layers.7.self_attn.q_proj.lora_A.weight": pair()[0]}, {}, "of no module of the base model"),
    (lambda t: {**t, "model.vision_tower.fc1.lora_A.weight": pair()[0]}, {}, "vision_tower.fc1.* of no module"),
    (lambda t: {**t, "model.layers.0.self_attn.k_proj.lora_A.weight": pair()[0]}, {}, "json does not target"),
    (lambda t: {**t, f"{QUERY}.lora_A.default.weight": pair()[0]}, {}, "lora_A.default.weight' is none of the adapter"),
    (lambda t: {**t, f"{QUERY}.lora_embedding_A": pair()[0]}, {}, "is not of the kind that its module has"),
    (lambda t: {**t, f"{QUERY}.lora_diag": pair()[0]}, {}, "lora_diag' is none of the adapter's"),
    (lambda t: {**t, f"{QUERY}.lora_magnitude_vector": pair()[0][0]}, {}, "is there, and use_dora is false"),
    (lambda t: {**t, f"{QUERY}.lora_B.bias": pair()[0][0]}, {}, "is there, and lora_bias is false"),
    (lambda t: t, {"use_dora": True}, f"module '{QUERY}' has no magnitude, and use_dora is true"),
    (lambda t: t, {"lora_bias": True}, f"module '{QUERY}' has no bias, and lora_bias is true"),
    (lambda t: t, {"target_modules": ["q_proj", "c_attn"]}, "target_modules has 'c_attn', which LlamaForCausalLM does"),
    (lambda t: t, {"target_parameters": ["experts.x"]}, "target_parameters has 'experts.x', which Llama"),
    (lambda t: t, {"modules_to_save": ["classifier"]}, "modules_to_save has 'classifier', which Llama"),
    (lambda t: t, {"modules_to_save": ["lm_head"]}, "module 'lm_head' is in modules_to_save, and its 'lm_h"),
    (lambda t: {**t, "model.norm.weight": np.ones(WIDTH, np.float32)}, {}, "norm.weight' is none of the adapter's"),
    (lambda t: {**t, f"{QUERY}.weight": pair(WIDTH)[0]}, {}, "q_proj.weight' is none of the adapter's"),
    (lambda t: {**t, f"{QUERY}.base_layer.bias": np.ones(WIDTH, np.float32)}, {"bias": "all"}, "is none of the ad"),
    (lambda t: {**t, "lm_head.weight": np.ones((VOCAB, 3), np.float32)}, {}, rf"has shape \({VOCAB}, 3\), not"),
    (lambda t: {**t, "lm_head.weight": np.ones((VOCAB - 1, WIDTH), np.float32)}, {}, f"has {VOCAB - 1} rows, fewer"),
    (lambda t: {**t, "lm_head.weight": np.ones((VOCAB + 1, WIDTH), np.float32)}, {}, "embedding and head must both"),
    (lambda t: {**t, "lm_head.weight": np.ones((VOCAB, WIDTH), np.int32)}, {}, "has the dtype I32"),
    (lambda t: t, {"trainable_token_indices": [1]}, "the rows of trainable_token_indices of 'model.embed_tokens' are"),
    (lambda t: t, {"trainable_token_indices": {"wte": [1]}}, "has 'wte', which is neither embedding nor head"),
    (lambda t: t, {"trainable_token_indices": [VOCAB]}, f"has {VOCAB}, the vocabulary has {VOCAB} tokens"),
    (lambda t: {**t, "model.embed_tokens.token_adapter.trainable_tokens_delta": pair(3)[0]},
     {"trainable_token_indices": [1, 2]}, rf"has shape \(3, {WIDTH}\), not \(2, {WIDTH}\)"),
    (lambda t: {**t, "model.embed_tokens.token_adapter.trainable_tokens_delta": pair(3)[0]}, {}, "is not in train"),
    (lambda t: t, {"alora_invocation_tokens": [1, VOCAB]}, f"alora_invocation_tokens has {VOCAB}, the vocabulary has"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "config", "message"), HOSTILE)
def test_hostile_tensors_give_one_clear_error(folder, change, config, message, tmp_path):
    folder = replace(folder, config={**folder.config, **config}, tensors=change(folder.tensors))
    assert len(str(refused(folder, tmp_path, message))) < 4000


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (f"{PREFIX}{A}", A),
        (f"{PREFIX}lm_head.weight", f"{PREFIX}lm_head.base_layer.weight"),
        (f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta", "lm_head.token_adapter.trainable_tokens_delta"),
    ],
)
def test_a_tensor_under_two_names_is_refused(folder, name, other, tmp_path):
    folder.tensors |= {"1": pair(VOCAB)[0], "2": pair(VOCAB)[0]}
    path = folder.write(tmp_path / "adapter")
    names = {f"{PREFIX}1": name if "lm_head" in name else f"{PREFIX}lm_head.weight", f"{PREFIX}2": other}
    header_and_data(path / "adapter_model.safetensors", lambda header: {names.get(k, k): x for k, x in header.items()})
    with pytest.raises(CheckpointError, match=r"tensors '.*' and '.*' are the same one of the adapter"):
        read_adapter(path, base_config("llama"))


def header_and_data(path, change) -> None:
    """Rewrites the header of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.dumps(change(json.loads(raw[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


EXPERTS = "model.layers.0.block_sparse_moe.experts"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: {k: x for k, x in t.items() if not k.startswith(f"{EXPERTS}.2.w1")}, {},
         "expert 2 of 'layers.0.mlp.experts.gate_proj' has no tensors, 3 of 4 have"),
        (lambda t: {k: x for k, x in t.items() if not k.startswith(f"{EXPERTS}.")}, {},
         f"module '{EXPERTS}.0.w1' is a target, and has no tensors"),
        (lambda t: t, {"alpha_pattern": {f"{EXPERTS}.1.w1": 3}},
         r"experts 0 and 1 of 'layers.0.mlp.experts.gate_proj' have ranks and scales \(4, 2.0\) and \(4, 0.75\)"),
    ],
)  # fmt: skip
def test_experts_one_by_one_are_all_or_none(change, config, message, tmp_path):
    _, folder = plain("mixtral_apart", "w1", **config)
    refused(replace(folder, tensors=change(folder.tensors)), tmp_path, message, "mixtral_apart")


def test_experts_in_both_forms_are_refused(tmp_path):
    """One by one under the names of Qwen's repositories, and all in one as Transformers 5 has them."""
    files = base_files("qwen3_moe")
    count, outputs, inputs = files.tensors["model.layers.1.mlp.experts.down_proj"].shape
    folder = PeftFolder({"target_modules": ["down_proj"], "target_parameters": ["experts.down_proj"]})
    a, b = pair(count * 4, inputs, outputs)
    owner = "model.layers.1.mlp.experts"
    folder.tensors = {f"{owner}.lora_A.weight": a, f"{owner}.lora_B.weight": b}
    for expert in range(count):
        folder.add(f"{owner}.{expert}.down_proj", inputs, outputs)
    refused(
        folder, tmp_path, "'layers.1.mlp.experts.down_proj' has pairs of experts one by one, and of all", "qwen3_moe"
    )


def test_the_work_of_patterns_is_limited(tmp_path):
    _, folder = plain("mixtral_apart", "w1", rank_pattern={f"x{i}": 4 for i in range(9000)})
    for number in range(250):
        folder.tensors[f"x.{number}.lora_A.weight"] = np.ones((1, 1), np.float32)
    refused(folder, tmp_path, r"9000 patterns of ranks and alphas for 2\d\d modules are 2\d+ tries", "mixtral_apart")


@pytest.mark.parametrize("depth", ["", ".base_layer", ".base_layer.base_layer"])
def test_pairs_of_experts_that_no_parameter_has_are_refused(depth, tmp_path):
    folder = PeftFolder({"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]})
    files = base_files("mixtral")
    count, outputs, inputs = files.tensors["model.layers.0.mlp.experts.down_proj"].shape
    for layer in range(2):
        a, b = pair(count * 4, inputs, outputs)
        owner = f"model.layers.{layer}.mlp.experts{depth}"
        folder.tensors |= {f"{owner}.lora_A.weight": a, f"{owner}.lora_B.weight": b}
        folder.add(f"model.layers.{layer}.self_attn.q_proj", *files.tensors[f"{QUERY}.weight"].shape[::-1])
    if depth:
        refused(folder, tmp_path, "of no module of the base model", "mixtral")
    else:
        path = folder.write(tmp_path / "right")
        assert "layers.0.mlp.experts.down_proj" in read_adapter(path, base_config("mixtral")).low_rank


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
def test_experts_in_one_parameter_have_neither_magnitudes_nor_biases(field, tmp_path):
    folder = PeftFolder({"target_modules": [], "target_parameters": ["experts.down_proj"], field: True})
    a, b = pair(16, 64, 64)
    folder.tensors = {"model.layers.0.mlp.experts.lora_A.weight": a, "model.layers.0.mlp.experts.lora_B.weight": b}
    refused(folder, tmp_path, f"{field} is not supported for 'model.layers.0.mlp.experts.down_proj'", "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("field", ["modules_to_save", "target_modules", "target_parameters"])
def test_many_names_take_no_time(field, tmp_path):
    _, folder = plain("mixtral_apart", "w1")
    folder.config[field] = [f"x{number}" for number in range(600_000)]
    path = folder.write(tmp_path / "adapter")
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"6\d+ problems") as caught:
        read_adapter(path, base_config("mixtral_apart"))
    assert time.perf_counter() - start < 5
    assert any(f"{field} has 'x0'" in problem for problem in caught.value.problems)


# Files.


def test_a_million_keys_are_refused_at_once(folder, tmp_path):
    path = folder.write(tmp_path / "adapter")
    header = b"{" + b",".join(
        b'"base_model.model.model.layers.0.x%d.lora_A.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i
        for i in range(1_000_000)
    ) + b"}"  # fmt: skip
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    size = len(header)
    del header
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=f"header of {size} bytes, the limit is 25000000"):
        read_adapter(path, base_config("llama"))
    assert time.perf_counter() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_a_configuration_that_is_too_long_is_refused(folder, tmp_path):
    path = folder.write(tmp_path / "adapter")
    (path / "adapter_config.json").write_bytes(b" " * 10_000_001)
    with pytest.raises(CheckpointError, match="10000001 bytes of JSON, the limit is 10000000"):
        read_adapter(path, base_config("llama"))


def test_a_hundred_thousand_keys_are_the_limit(folder, tmp_path):
    path = folder.write(tmp_path / "adapter")
    header_and_data(path / "adapter_model.safetensors", lambda header: header | {
        str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_001)
    })  # fmt: skip
    with pytest.raises(CheckpointError, match=r"1000[0-9]+ tensors, the limit of a file is 100000"):
        read_adapter(path, base_config("llama"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_of_the_folder_are_refused(folder, name, tmp_path):
    path = folder.write(tmp_path / "adapter")
    outside = tmp_path / "secret"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name}: is a link to .*secret, outside"):
        read_adapter(path, base_config("llama"))
    inside = path / "own"
    (path / name).unlink()
    outside.rename(inside)
    (path / name).symlink_to(inside.name)
    assert read_adapter(path, base_config("llama")).low_rank


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_files_are_named(folder, name, tmp_path):
    path = folder.write(tmp_path / "adapter")
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"has no {name}"):
        read_adapter(path, base_config("llama"))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="nowhere: is not a folder"):
        read_adapter(tmp_path / "nowhere", base_config("llama"))


ABORT = b"cos\nabort\n(tR."  # a pickle that ends the process that opens it


def test_pickled_tensors_are_refused_by_name(folder, tmp_path):
    path = folder.write(tmp_path / "adapter")
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.bin").write_bytes(ABORT)
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: is not opened, since a pickled file can run code"):
        read_adapter(path, base_config("llama"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff" * 100, b"[" * 100_000])
def test_damaged_files_are_errors(folder, name, content, tmp_path):
    path = folder.write(tmp_path / "adapter")
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        read_adapter(path, base_config("llama"))


def test_a_pipe_is_not_waited_for(folder, tmp_path):
    path = folder.write(tmp_path / "adapter")
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        read_adapter(path, base_config("llama"))


# The base model.


@pytest.mark.parametrize(
    ("told", "wanted", "is_same"),
    [
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B", True),
        ("meta-llama/Llama-3.2-1B", "/models/llama-3.2-1b/", True),
        ("meta-llama/Llama-3.2-1B", "/hub/models--meta-llama--Llama-3.2-1B/snapshots/0123abc", True),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", False),
        ("meta-llama/Llama-3.2-1B", None, True),
        (None, "meta-llama/Llama-3.2-1B", True),
        ("C:\\models\\tiny", "tiny", True),
    ],
)
def test_an_adapter_of_another_base_is_refused_by_name(folder, told, wanted, is_same, tmp_path):
    folder.config["base_model_name_or_path"] = told
    if is_same:
        assert read_adapter(folder.write(tmp_path / "a"), base_config("llama"), base_model=wanted).base_model == told
    else:
        refused(folder, tmp_path, f"is '{told}', the base model is '{wanted}'", base_model=wanted)


def test_an_adapter_of_another_base_is_refused_by_fingerprint(folder, tmp_path):
    folder.metadata = {"format": "pt", "base_fingerprint": "aaa"}
    refused(folder, tmp_path, "is for a base with the fingerprint aaa, not bbb", base_fingerprint="bbb")
    config = base_config("llama")
    for own in ("aaa", None):
        path = folder.write(tmp_path / "own")
        assert read_adapter(path, config, base_fingerprint=own).base_fingerprint == "aaa"


def test_an_adapter_of_another_size_is_refused(folder, tmp_path):
    config = replace(base_config("llama"), hidden_size=WIDTH * 2)
    with pytest.raises(CheckpointError, match="has shape"):
        read_adapter(folder.write(tmp_path / "adapter"), config)
