"""Merged adapters are the base's published tensors changed by the papers' formulas, for the families' names and shapes.

The oracle changes published tensors [out, in] in NumPy, and the checkpoint's reader, which has tests of its own, turns
them into parameters.
"""

import math
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import checkpoints_convert
from checkpoints_convert import CheckpointError
from checkpoints_convert.adapters import Adapter, LowRank, TokenRows, merged, read_adapter
from jaxinfer.quantization import quantize
from tests.checkpoints_convert.adapters.published import PeftFolder, base_files, change, linears, loaded, plain
from tests.checkpoints_convert.family_files import Files, flat

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def check(files: Files, folder: PeftFolder, wanted: dict[str, np.ndarray], tmp_path: Path, **config) -> Adapter:
    """Compares the merged base with the base whose published tensors are `wanted`."""
    own, params = checkpoints_convert.load(files.write(tmp_path / "base"), progress=False)
    adapter = read_adapter(folder.write(tmp_path / "adapter"), own)
    got_config, got = merged(own, params, adapter)
    changed = Files(
        {**files.config, **config}, {name: np.ascontiguousarray(x, np.float32) for name, x in wanted.items()}
    )
    wanted_config, wanted_params = loaded(changed, tmp_path / "wanted")
    got = flat(got)
    assert got_config == wanted_config
    assert got.keys() == wanted_params.keys()
    before = flat(params)
    assert any(x.shape != before.get(name, x).shape or (x != before.get(name)).any() for name, x in got.items())
    for name, array in wanted_params.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-5, atol=2e-5, err_msg=name)
    return adapter


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("llama", (*ATTENTION, *MLP)),
        ("gemma3", (*ATTENTION, *MLP)),
        ("qwen3_moe", ATTENTION),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),  # one tensor of ours is several
        ("ernie4_5", ATTENTION),  # rotary dimensions are neighbours
        ("gpt_neox", ("query_key_value", "dense")),  # queries, keys and values in turn, head by head
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("qwen3_5", ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj")),
    ],
)
def test_a_merged_weight_is_the_papers(name, ends, dora, tmp_path):
    files, folder = plain(name, *ends, dora=dora)
    wanted = dict(files.tensors)
    for module in linears(files, *ends):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 8 / 4)
    check(files, folder, wanted, tmp_path)


def test_a_conv1d_is_stored_the_other_way(tmp_path):
    files = base_files("gpt2")
    ends = ("attn.c_attn", "attn.c_proj")
    folder = PeftFolder({"target_modules": list(ends), "fan_in_fan_out": True})
    wanted = dict(files.tensors)
    for module in linears(files, *ends):
        weight = files.tensors[f"{module}.weight"]
        folder.add(module, *weight.shape)
        wanted[f"{module}.weight"] = change(folder, module, weight.T, 2.0).T
    check(files, folder, wanted, tmp_path)


def test_the_scale_of_a_module_is_by_its_own_rank_and_alpha(tmp_path):
    files = base_files("llama")
    folder = PeftFolder({
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"q_proj": 2, "layers.1.self_attn.q_proj": 7, r".*\.(v|k)_proj": 3},
        "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 5.5, "proj": 99},
    })  # fmt: skip
    wanted = dict(files.tensors)
    for module in linears(files, "q_proj", "v_proj"):
        is_query = module.endswith("q_proj")
        rank = 2 if is_query else 3  # the first pattern that matches counts
        alpha = 5.5 if module == "model.layers.0.self_attn.v_proj" else 8  # "proj" begins after no dot
        outputs, inputs = files.tensors[f"{module}.weight"].shape
        folder.add(module, inputs, outputs, rank)
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], alpha / rank)
    check(files, folder, wanted, tmp_path)


def test_a_stabilized_scale_is_by_the_root_of_the_rank(tmp_path):
    files, folder = plain("llama", "o_proj", use_rslora=True)
    wanted = dict(files.tensors)
    for module in linears(files, "o_proj"):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 8 / math.sqrt(4))
    check(files, folder, wanted, tmp_path)


def test_experts_one_by_one(tmp_path):
    files, folder = plain("mixtral_apart", "w1", "w2", "w3", "q_proj")
    wanted = dict(files.tensors)
    for module in linears(files, "w1", "w2", "w3", "q_proj"):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 2.0)
    adapter = check(files, folder, wanted, tmp_path)
    count = files.config["num_local_experts"]
    assert adapter.low_rank["layers.1.mlp.experts.down_proj"].a.shape[0] == count


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("down_proj",), ("gate_up_proj",)], ids="+".join)
def test_all_experts_in_one_parameter(name, names, tmp_path):
    files = base_files(name)
    folder = PeftFolder({"target_modules": [], "target_parameters": [f"experts.{x}" for x in names]})
    random, wanted, rank = np.random.default_rng(1), dict(files.tensors), 4
    is_input_first = name == "gpt_oss"  # [E, in, out]
    for tensor, weight in files.tensors.items():
        if not tensor.endswith(tuple(f"experts.{x}" for x in names)):
            continue
        owner = tensor.rpartition(".")[0]
        # PEFT wraps the module for the first parameter, and that wrapper for the second.
        owner += ".base_layer" if tensor.endswith("gate_up_proj") and len(names) == 2 else ""
        count, rows, columns = weight.shape
        a = random.standard_normal((count * rank, rows if is_input_first else columns)).astype(np.float32)
        b = random.standard_normal((columns if is_input_first else rows, rank * count)).astype(np.float32)
        folder.tensors |= {f"{owner}.lora_A.weight": a, f"{owner}.lora_B.weight": b}
        new = weight.astype(np.float64)
        for expert in range(count):
            delta = b[:, expert::count] @ a[expert * rank : (expert + 1) * rank]
            new[expert] += 2.0 * (delta.T if is_input_first else delta)
        wanted[tensor] = new
    check(files, folder, wanted, tmp_path)


def test_experts_whose_sides_are_swapped_by_old_versions(tmp_path):
    files = base_files("mixtral")
    folder = PeftFolder({"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]})
    random, wanted, rank = np.random.default_rng(1), dict(files.tensors), 4
    for tensor in [name for name in files.tensors if name.endswith("gate_up_proj")]:
        count, rows, columns = files.tensors[tensor].shape
        assert rows != columns
        a = random.standard_normal((count * rank, rows)).astype(np.float32)
        b = random.standard_normal((columns, rank * count)).astype(np.float32)
        owner = tensor.rpartition(".")[0]
        folder.tensors |= {f"{owner}.lora_A.weight": a, f"{owner}.lora_B.weight": b}
        # "o r e, e r i -> e i o"
        delta = np.einsum("ore,eri->eio", b.reshape(columns, rank, count), a.reshape(count, rank, rows))
        wanted[tensor] = files.tensors[tensor] + 2.0 * delta
    check(files, folder, wanted, tmp_path)


def with_embedding(files: Files, *, num_added: int = 0, dora: bool = False) -> tuple[PeftFolder, np.ndarray]:
    """An adapter of the embedding, whose table lies beside it, and the merged table [V, D]."""
    random = np.random.default_rng(3)
    table = files.tensors["model.embed_tokens.weight"]
    size, width = table.shape[0] + num_added, table.shape[1]
    table = np.concatenate([table, random.standard_normal((num_added, width)).astype(np.float32)])
    a, b = random.standard_normal((4, size)), random.standard_normal((width, 4))
    folder = PeftFolder({"target_modules": ["embed_tokens"], "use_dora": dora}, {
        "model.embed_tokens.lora_embedding_A": a.astype(np.float32),
        "model.embed_tokens.lora_embedding_B": b.astype(np.float32),
        "model.embed_tokens.base_layer.weight": table,
    })  # fmt: skip
    new = table.T + 2.0 * b.astype(np.float32) @ a.astype(np.float32)  # [D, V]
    if dora:
        magnitude = random.uniform(1, 2, width).astype(np.float32)
        folder.tensors["model.embed_tokens.lora_magnitude_vector"] = magnitude
        new *= magnitude[:, None] / np.linalg.norm(new, axis=1, keepdims=True)
    return folder, new.T


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_a_pair_of_the_embedding(dora, tmp_path):
    files = base_files("llama")
    folder, table = with_embedding(files, dora=dora)
    check(files, folder, {**files.tensors, "model.embed_tokens.weight": table}, tmp_path)


def test_a_pair_of_a_tied_embedding_unties_it(tmp_path):
    files = base_files("gemma3")
    assert "lm_head.weight" not in files.tensors
    folder, table = with_embedding(files)
    head = files.tensors["model.embed_tokens.weight"]
    wanted = {**files.tensors, "model.embed_tokens.weight": table, "lm_head.weight": head}
    check(files, folder, wanted, tmp_path, tie_word_embeddings=False)


def test_a_pair_of_a_tied_head_unties_it(tmp_path):
    files = base_files("gemma3")
    table = files.tensors["model.embed_tokens.weight"]
    folder = PeftFolder({"target_modules": ["lm_head"]})
    folder.add("lm_head", table.shape[1], table.shape[0])
    head = change(folder, "lm_head", table, 2.0)
    check(files, folder, {**files.tensors, "lm_head.weight": head}, tmp_path, tie_word_embeddings=False)


@pytest.mark.parametrize("is_target", [False, True], ids=["resized", "resized-target"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_added_tokens(name, is_target, tmp_path):
    """A larger table is saved with the adapter, and the head beside it unless they are tied."""
    files = base_files(name)
    random = np.random.default_rng(5)
    folder, table = with_embedding(files, num_added=3)
    if not is_target:
        table = folder.tensors["model.embed_tokens.base_layer.weight"]
        folder = PeftFolder({"target_modules": ["v_proj"]}, {"model.embed_tokens.weight": table})
        for module in linears(files, "v_proj"):
            outputs, inputs = files.tensors[f"{module}.weight"].shape
            folder.add(module, inputs, outputs)
    wanted = {**files.tensors, "model.embed_tokens.weight": table}
    for module in linears(files, "v_proj") if not is_target else ():
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 2.0)
    options = {"vocab_size": len(table)}
    if name == "llama":
        head = random.standard_normal(table.shape).astype(np.float32)
        folder.tensors["lm_head.weight"] = wanted["lm_head.weight"] = head
    elif is_target:
        wanted["lm_head.weight"] = folder.tensors["model.embed_tokens.base_layer.weight"]
        options["tie_word_embeddings"] = False
    adapter = check(files, folder, wanted, tmp_path, **options)
    assert adapter.vocab_size == len(table)


def test_a_tied_head_that_lies_beside_a_larger_embedding_stays_tied(tmp_path):
    """PEFT writes both, since the vocabulary differs from the base's."""
    files = base_files("gemma3")
    table = with_embedding(files, num_added=3)[0].tensors["model.embed_tokens.base_layer.weight"]
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    folder = PeftFolder({"target_modules": ["v_proj"]}, tensors)
    wanted = {**files.tensors, "model.embed_tokens.weight": table}
    for module in linears(files, "v_proj"):
        weight = files.tensors[f"{module}.weight"]
        folder.add(module, *weight.shape[::-1])
        wanted[f"{module}.weight"] = change(folder, module, weight, 2.0)
    check(files, folder, wanted, tmp_path, vocab_size=len(table))


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens", "norm"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_saved_modules_stand_in_place_of_the_bases(name, saved, tmp_path):
    files, folder = plain(name, "q_proj", modules_to_save=[saved])
    wanted, random, options = dict(files.tensors), np.random.default_rng(9), {}
    for module in linears(files, "q_proj"):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 2.0)
    table = files.tensors["model.embed_tokens.weight"]
    is_tied = "lm_head.weight" not in files.tensors
    if is_tied and saved != "norm":
        wanted["lm_head.weight"], options = table, {"tie_word_embeddings": False}
    for tensor in [name for name in wanted if name.removesuffix(".weight").endswith(saved)]:
        new = random.standard_normal(wanted[tensor].shape).astype(np.float32)
        wanted[tensor] = folder.tensors[tensor] = new
    check(files, folder, wanted, tmp_path, **options)


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("llama", [5, 2]),
        ("llama", {"embed_tokens": [1], "lm_head": [3, 4]}),
        ("gemma3", [5, 2]),
        ("gemma3", {"embed_tokens": [5, 2], "lm_head": [5, 2]}),
        ("gemma3", {"embed_tokens": [5, 2], "lm_head": [3]}),
    ],
)
def test_trained_tokens(name, indices, tmp_path):
    files = base_files(name)
    folder = PeftFolder({"target_modules": ["q_proj"], "trainable_token_indices": indices})
    for module in linears(files, "q_proj"):
        outputs, inputs = files.tensors[f"{module}.weight"].shape
        folder.add(module, inputs, outputs)
    wanted = dict(files.tensors)
    for module in linears(files, "q_proj"):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 2.0)
    own = indices if isinstance(indices, dict) else {"embed_tokens": indices}
    is_tied, options = "lm_head.weight" not in wanted, {}
    is_shared = is_tied and len({tuple(tokens) for tokens in own.values()}) == 1
    if is_tied and not is_shared:
        wanted["lm_head.weight"], options = wanted["model.embed_tokens.weight"], {"tie_word_embeddings": False}
    for module, tokens in own.items():
        if is_shared and module == "lm_head":
            continue
        tensor = "lm_head" if module == "lm_head" else "model.embed_tokens"
        rows = np.random.default_rng(len(tensor)).standard_normal((len(tokens), wanted[f"{tensor}.weight"].shape[1]))
        folder.tensors[f"{tensor}.token_adapter.trainable_tokens_delta"] = rows.astype(np.float32)
        table = np.array(wanted[f"{tensor}.weight"])
        table[tokens] = rows
        wanted[f"{tensor}.weight"] = table
    check(files, folder, wanted, tmp_path, **options)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_stand_in_place_of_the_bases(bias, tmp_path):
    files, folder = plain("qwen2", "q_proj", bias=bias)
    wanted, random = dict(files.tensors), np.random.default_rng(2)
    for module in linears(files, "q_proj"):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 2.0)
    for tensor in [name for name in wanted if name.endswith(".bias")]:
        is_target = tensor.endswith("q_proj.bias")
        if bias == "all" or is_target:
            new = random.standard_normal(wanted[tensor].shape).astype(np.float32)
            wanted[tensor] = new
            folder.tensors[tensor.replace(".bias", ".base_layer.bias") if is_target else tensor] = new
    check(files, folder, wanted, tmp_path)


def test_a_bias_of_b_is_scaled(tmp_path):
    files, folder = plain("qwen2", "q_proj", lora_bias=True)
    wanted = dict(files.tensors)
    for module in linears(files, "q_proj"):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 2.0)
        bias = np.random.default_rng(4).standard_normal(wanted[f"{module}.bias"].shape).astype(np.float32)
        folder.tensors[f"{module}.lora_B.bias"] = bias
        wanted[f"{module}.bias"] = wanted[f"{module}.bias"] + 2.0 * bias
    check(files, folder, wanted, tmp_path)


@pytest.mark.parametrize("form", ["model.language_model.", "language_model.model.", ""])
def test_names_of_models_of_text_and_images_and_of_models_without_a_head(form, tmp_path):
    files, folder = plain("gemma3", "q_proj")
    wanted = dict(files.tensors)
    for module in linears(files, "q_proj"):
        wanted[f"{module}.weight"] = change(folder, module, files.tensors[f"{module}.weight"], 2.0)
    folder.tensors = {form + name.removeprefix("model."): x for name, x in folder.tensors.items()}
    check(files, folder, wanted, tmp_path)


# What cannot be merged.


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoints_convert.load(base_files("llama").write(tmp_path_factory.mktemp("base")), progress=False)


def pair(config, **changes) -> LowRank:
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    ones = LowRank(np.ones((width, 2), np.float32), np.ones((2, heads), np.float32), 1.0)
    return replace(ones, **changes)


QUERY = "layers.0.attention.q_proj"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: Adapter({QUERY: pair(c)}, invocation_tokens=(3, 4)), r"invocation tokens \[3, 4\]"),
        (lambda c: Adapter({"layers.9.attention.q_proj": pair(c)}), "no parameter 'layers.9.attention.q_proj'"),
        (lambda c: Adapter({QUERY: pair(c, b=np.ones((2, 7), np.float32))}), r"a change \(\d+, 7\) of a weight"),
        (lambda c: Adapter({QUERY: pair(c, scale=float("inf"))}), f"'?{QUERY}'?: .* values are NaN or infinite"),
        (lambda c: Adapter({QUERY: pair(c, bias=np.ones(c.num_heads * c.head_dim))}), "the base has none"),
        (lambda c: Adapter({}, {"embed": np.ones((c.vocab_size + 2, c.hidden_size))}), "'lm_head' would have"),
        (lambda c: Adapter({}, {}, {"lm_head": TokenRows((256,), np.ones((1, c.hidden_size)))}), "has the token 256"),
        (lambda c: Adapter({}, {"final_norm.weight": np.ones(3)}), r"'final_norm.weight' would have the shape \(3,\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused(base, make, message):
    config, params = base
    with pytest.raises(CheckpointError, match=message):
        merged(config, params, make(config))


def test_a_quantized_weight_is_not_merged(base):
    config, params = base
    params = jax.tree.map(lambda leaf: leaf, params)
    params["layers"]["0"]["attention"]["q_proj"]["weight"] = quantize(
        params["layers"]["0"]["attention"]["q_proj"]["weight"], "int8"
    )
    with pytest.raises(CheckpointError, match=f"'{QUERY}' of the base is quantized"):
        merged(config, params, Adapter({QUERY: pair(config)}))
    # A layer whose weights are dense is.
    other = "layers.1.attention.q_proj"
    assert merged(config, params, Adapter({other: pair(config)}))[0] == config


def test_bfloat16_is_rounded_once(base):
    """The sum is of float32: rounded before it, a small change of a large weight would be another."""
    config, params = base
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16), params)
    own = pair(config, scale=1 / 3)
    _, got = merged(config, params, Adapter({QUERY: own}))
    before = params["layers"]["0"]["attention"]["q_proj"]["weight"].astype(np.float32)
    wanted = (before + np.float32(1 / 3) * (own.a @ own.b)).astype(ml_dtypes.bfloat16)
    got = got["layers"]["0"]["attention"]["q_proj"]["weight"]
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, wanted)


def test_the_base_is_unchanged(base):
    config, params = base
    before = flat(params)
    adapter = Adapter(
        {QUERY: pair(config)}, {}, {"embed": TokenRows((1,), np.ones((1, config.hidden_size), np.float32))}
    )
    _, got = merged(config, params, adapter)
    for name, array in flat(params).items():
        np.testing.assert_array_equal(array, before[name])
    assert (flat(got)["embed"][1] == 1).all()
