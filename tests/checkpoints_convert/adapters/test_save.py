"""Adapters that are written are read again as they were, and are what PEFT's form says."""

import json
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from checkpoints_convert import CheckpointError
from checkpoints_convert.adapters import Adapter, LowRank, TokenRows, read_adapter, save_adapter
from checkpoints_convert.checkpoint import param_shapes
from tests.checkpoints_convert.adapters.published import PREFIX, base_config, plain

CONFIG = base_config("llama")
QUERY = "layers.0.attention.q_proj"


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def pair(
    config, name: str, rank: int = 4, scale: float = 2.0, dtype: Any = np.float32, seed: int = 0, **more: Any
) -> LowRank:
    """A random pair of a weight of a base."""
    path = tuple(name.split("."))
    *stack, inputs, outputs = param_shapes(config).get((*path, "weight")) or param_shapes(config)[path]
    shared = () if name.endswith(("k_up", "v_up")) else tuple(stack)
    a, b = random(*shared, inputs, rank, dtype=dtype), random(*stack, rank, outputs, seed=seed, dtype=dtype)
    for kind in list(more):
        more[kind] = random(*stack, outputs, seed=seed)
    return LowRank(a, b, scale, **more)


def assert_same(one: Adapter, other: Adapter) -> None:
    """The two have the same arrays, to the bit, and the same fingerprint."""
    assert one.low_rank.keys() == other.low_rank.keys()
    for name, own in one.low_rank.items():
        assert own.scale == other.low_rank[name].scale, name
        for kind in ("a", "b", "magnitude", "bias"):
            assert_same_array(getattr(own, kind), getattr(other.low_rank[name], kind))
    assert one.replaced.keys() == other.replaced.keys()
    for name, array in one.replaced.items():
        assert_same_array(array, other.replaced[name])
    assert one.token_rows.keys() == other.token_rows.keys()
    for name, rows in one.token_rows.items():
        assert rows.tokens == other.token_rows[name].tokens
        assert_same_array(rows.rows, other.token_rows[name].rows)
    assert one.invocation_tokens == other.invocation_tokens
    assert (one.base_model, one.base_fingerprint) == (other.base_model, other.base_fingerprint)
    assert one.fingerprint == other.fingerprint


def assert_same_array(one, other) -> None:
    assert (one is None) == (other is None)
    if one is not None:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def again(adapter: Adapter, config, tmp_path) -> Adapter:
    return read_adapter(save_adapter(adapter, tmp_path / "saved", config), config)


ALL = [f"layers.1.attention.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj")]
ADAPTERS = {
    "plain": ("llama", lambda c: Adapter({name: pair(c, name) for name in ALL})),
    "bfloat16": ("llama", lambda c: Adapter({QUERY: pair(c, QUERY, dtype=ml_dtypes.bfloat16)})),
    "ranks and scales": ("llama", lambda c: Adapter({
        name: pair(c, name, r, alpha / r) for name, r, alpha in zip(ALL, (4, 3, 3, 7), (8, 0.7, 5, 11), strict=True)
    })),
    "stabilized": ("llama", lambda c: Adapter({
        name: pair(c, name, rank, 16 / rank**0.5) for name, rank in zip(ALL, (3, 5, 6, 7), strict=True)
    })),
    "dora": ("llama", lambda c: Adapter({name: pair(c, name, magnitude=True) for name in ALL})),
    "biases of b": ("qwen2", lambda c: Adapter({QUERY: pair(c, QUERY, bias=True)})),
    "one stored tensor": ("phi3", lambda c: Adapter({
        f"layers.0.attention.{x}": pair(c, f"layers.0.attention.{x}", seed=i, magnitude=True)
        for i, x in enumerate(("q_proj", "k_proj", "v_proj"))
    })),
    "neighbours": ("ernie4_5", lambda c: Adapter({QUERY: pair(c, QUERY, bias=None)})),
    "kept by heads": ("deepseek_v3", lambda c: Adapter({
        f"layers.0.attention.{x}": pair(c, f"layers.0.attention.{x}", seed=i, magnitude=True)
        for i, x in enumerate(("k_up", "v_up"))
    })),
    "experts in one": ("qwen3_moe", lambda c: Adapter({
        f"layers.1.mlp.experts.{x}": pair(c, f"layers.1.mlp.experts.{x}", seed=i)
        for i, x in enumerate(("gate_proj", "up_proj", "down_proj"))
    })),
    "the last matrices of experts": ("gpt_oss", lambda c: Adapter({
        "layers.1.mlp.experts.down_proj": pair(c, "layers.1.mlp.experts.down_proj")
    })),
    "experts one by one": ("qwen3_moe", lambda c: Adapter({
        f"layers.1.mlp.experts.{x}": pair(c, f"layers.1.mlp.experts.{x}", rank, magnitude=True)
        for x, rank in (("gate_proj", 2), ("up_proj", 3))
    })),
    "router": ("qwen3_moe", lambda c: Adapter({"layers.1.mlp.router": pair(c, "layers.1.mlp.router")})),
    "norms": ("gemma3", lambda c: Adapter({}, {"final_norm.weight": random(c.hidden_size)})),
    "biases": ("qwen2", lambda c: Adapter(
        {QUERY: pair(c, QUERY)}, {f"{QUERY}.bias": random(c.num_heads * c.head_dim)}
    )),
    "biases of others": ("qwen2", lambda c: Adapter({}, {f"{QUERY}.bias": random(c.num_heads * c.head_dim)})),
    "head": ("llama", lambda c: Adapter({QUERY: pair(c, QUERY)}, {"lm_head": random(c.hidden_size, c.vocab_size)})),
    "embedding": ("llama", lambda c: Adapter(
        {"embed": pair(c, "embed")}, {"embed": random(c.vocab_size, c.hidden_size)}
    )),
    "tied embedding": ("gemma3", lambda c: Adapter({}, {"embed": random(c.vocab_size, c.hidden_size)})),
    "tied and added": ("gemma3", lambda c: Adapter({}, {
        "embed": random(c.vocab_size + 2, c.hidden_size), "lm_head": random(c.vocab_size + 2, c.hidden_size).T
    })),
    "added": ("llama", lambda c: Adapter({}, {
        "embed": random(c.vocab_size + 2, c.hidden_size), "lm_head": random(c.hidden_size, c.vocab_size + 2)
    })),
    "tokens": ("llama", lambda c: Adapter({}, {}, {
        "embed": TokenRows((5, 2), random(2, c.hidden_size)), "lm_head": TokenRows((7,), random(1, c.hidden_size))
    })),
    "invocation": ("llama", lambda c: Adapter(
        {QUERY: pair(c, QUERY)}, invocation_tokens=(4, 4, 2), base_model="a/B", base_fingerprint="abc"
    )),
}  # fmt: skip


@pytest.mark.parametrize("kind", ADAPTERS)
def test_what_is_written_is_read_again(kind, tmp_path):
    name, make = ADAPTERS[kind]
    config = base_config(name)
    adapter = make(config)
    assert_same(adapter, again(adapter, config, tmp_path))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_has_a_fingerprint_of_its_own(kind):
    name, make = ADAPTERS[kind]
    others = {make(base_config(name)).fingerprint for key, (name, make) in ADAPTERS.items() if key != kind}
    own = make(base_config(name)).fingerprint
    assert len(own) == 64
    assert own not in others


def test_a_scale_that_no_alpha_gives_is_rounded(tmp_path):
    """0.1 is no float over 3."""
    read = again(Adapter({QUERY: pair(CONFIG, QUERY, 3, 0.1)}), CONFIG, tmp_path)
    assert read.low_rank[QUERY].scale == pytest.approx(0.1, rel=3e-16)


def test_tokens_of_a_tied_embedding_are_the_heads_too(tmp_path):
    config = base_config("gemma3")
    rows = TokenRows((5, 2), random(2, config.hidden_size))
    adapter = Adapter({}, {}, {"embed": rows, "lm_head": rows})
    read = again(adapter, config, tmp_path)
    assert_same(adapter, read)
    assert list(load_file(tmp_path / "saved" / "adapter_model.safetensors")) == [
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    ]


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3", "qwen3_moe", "mixtral_apart"])
def test_files_of_peft_come_back_as_they_were(name, tmp_path):
    """The tensors are those of the folder that was read, by name, shape and value."""
    ends = ("qkv_proj",) if name == "phi3" else ("w1", "w3") if name == "mixtral_apart" else ("q_proj", "v_proj")
    files, folder = plain(name, *ends, modules_to_save=["norm"])
    for tensor in files.tensors:
        if tensor.removesuffix(".weight").endswith("norm"):
            folder.tensors[tensor] = files.tensors[tensor] + 1
    config = base_config(name)
    own = folder.write(tmp_path / "own")
    save_adapter(read_adapter(own, config), tmp_path / "saved", config)
    before, after = (load_file(path / "adapter_model.safetensors") for path in (own, tmp_path / "saved"))
    if name == "mixtral_apart":  # experts whose A differ are written one by one
        assert any("experts.3.w1" in key for key in after)
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(after[key], array)


def test_the_configuration_is_pefts(tmp_path):
    adapter = Adapter({
        QUERY: pair(CONFIG, QUERY, 4, 2.0),
        ALL[1]: pair(CONFIG, ALL[1], 4, 2.0),
        ALL[2]: pair(CONFIG, ALL[2], 3, 0.5),
    }, base_model="a/Base")  # fmt: skip
    save_adapter(adapter, tmp_path / "saved", CONFIG)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    value = "model.layers.1.self_attn.v_proj"
    assert config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "a/Base", "inference_mode": True,
        "r": 4, "lora_alpha": 8, "rank_pattern": {f"^{value}": 3}, "alpha_pattern": {f"^{value}": 1.5},
        "use_rslora": False, "use_dora": False,
        "target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj", value],
        "target_parameters": None, "modules_to_save": None, "trainable_token_indices": None, "bias": "none",
        "lora_bias": False, "lora_dropout": 0.0, "fan_in_fan_out": False, "alora_invocation_tokens": None,
    }  # fmt: skip


def test_experts_in_one_are_named_as_peft_nests_them(tmp_path):
    """The wrapper of the first parameter is inside that of the second; rows of A by expert, columns of B by rank."""
    config = base_config("qwen3_moe")
    names = [f"layers.1.mlp.experts.{x}" for x in ("gate_proj", "up_proj", "down_proj")]
    adapter = Adapter({name: pair(config, name, 2, seed=i) for i, name in enumerate(names)})
    save_adapter(adapter, tmp_path / "saved", config)
    tensors = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    owner = f"{PREFIX}model.layers.1.mlp.experts"
    assert sorted(tensors) == sorted(f"{x}.lora_{y}.weight" for x in (owner, f"{owner}.base_layer") for y in "AB")
    gate, up, down = (adapter.low_rank[name] for name in names)
    count, (expert, r) = gate.a.shape[0], (3, 1)
    np.testing.assert_array_equal(tensors[f"{owner}.base_layer.lora_A.weight"][expert * 2 + r], gate.a[expert, :, r])
    column = tensors[f"{owner}.base_layer.lora_B.weight"][:, r * count + expert]
    np.testing.assert_array_equal(column, np.concatenate([gate.b[expert, r], up.b[expert, r]]))
    np.testing.assert_array_equal(tensors[f"{owner}.lora_B.weight"][:, r * count + expert], down.b[expert, r])


def test_an_adapter_in_the_folder_is_kept_unless_it_may_go(tmp_path):
    one, two = (Adapter({QUERY: pair(CONFIG, QUERY, seed=seed)}) for seed in (1, 2))
    save_adapter(one, tmp_path / "saved", CONFIG)
    (tmp_path / "saved" / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match="holds an adapter"):
        save_adapter(two, tmp_path / "saved", CONFIG)
    assert_same(read_adapter(tmp_path / "saved", CONFIG), one)
    save_adapter(two, tmp_path / "saved", CONFIG, overwrite=True)
    assert_same(read_adapter(tmp_path / "saved", CONFIG), two)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


PARTS = [f"layers.0.attention.{x}" for x in ("q_proj", "k_proj", "v_proj")]


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("llama", lambda c: Adapter({"layers.9.mlp.up_proj": pair(c, QUERY)}), "'layers.9.mlp.up_proj' is no"),
        ("llama", lambda c: Adapter({"layers.0.mlp.up_proj": pair(c, QUERY)}), r"of shape \(64, 64\), the base's"),
        ("phi3", lambda c: Adapter({PARTS[0]: pair(c, PARTS[0])}), f"'{PARTS[0]}' is in one tensor of the base with"),
        ("phi3", lambda c: Adapter({x: pair(c, x, scale=i + 1.0) for i, x in enumerate(PARTS)}), "different A or"),
        ("phi3", lambda c: Adapter({x: pair(c, x, 2 + i) for i, x in enumerate(PARTS)}), "different A or"),
        ("phi3", lambda c: Adapter({x: pair(c, x, **({} if i else {"magnitude": True})) for i, x in enumerate(PARTS)}),
         "a magnitude or bias for some"),
        ("llama", lambda c: Adapter({ALL[0]: pair(c, ALL[0]), ALL[1]: pair(c, ALL[1], magnitude=True)}), "use_dora"),
        ("llama", lambda c: Adapter({}, {"layers.0.x": random(3)}), "'layers.0.x' is no parameter of the base model"),
        ("llama", lambda c: Adapter({QUERY: replace(pair(c, QUERY), b=np.full((4, 64), np.nan, np.float32))}),
         "256 of 256 values are NaN or infinite"),
        ("llama", lambda c: Adapter({}, {"final_norm.weight": random(3)}), r"of shape \(3,\), the base's"),
        ("llama", lambda c: Adapter({}, {}, {"embed": TokenRows((1, 2), random(2, 63))}), "2 tokens of 'embed'"),
        ("gemma3", lambda c: Adapter({"embed": pair(c, "embed")}, {"embed": random(c.vocab_size, c.hidden_size)}),
         "both must be replaced by one array"),
    ],
)  # fmt: skip
def test_what_the_form_cannot_express_is_refused_and_nothing_written(name, make, message, tmp_path):
    config = base_config(name)
    with pytest.raises(CheckpointError, match=message):
        save_adapter(make(config), tmp_path / "saved", config)
    assert not (tmp_path / "saved").exists()


def test_a_folder_without_its_configuration_is_no_adapter(tmp_path, monkeypatch):
    """A process that is killed while it writes leaves nothing that can be read."""

    def fail(*_):
        raise OSError("killed")

    monkeypatch.setattr("checkpoints_convert.adapters.save.write_json", fail)
    with pytest.raises(OSError, match="killed"):
        save_adapter(Adapter({QUERY: pair(CONFIG, QUERY)}), tmp_path / "saved", CONFIG)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path / "saved", CONFIG)


def test_rows_of_a_tied_embedding_are_the_heads_too(tmp_path):
    config = base_config("gemma3")
    rows = TokenRows((5, 2), random(2, config.hidden_size))
    copy, other = replace(rows, rows=rows.rows.copy()), replace(rows, rows=rows.rows + 1)
    adapter = Adapter({}, {}, {"embed": rows, "lm_head": copy})
    assert_same(adapter, again(adapter, config, tmp_path))
    for head in ({}, {"lm_head": other}):
        with pytest.raises(CheckpointError, match="rows of a tied embedding are the head's too"):
            save_adapter(Adapter({}, {}, {"embed": rows} | head), tmp_path / "other", config)


def test_a_full_disk_leaves_the_earlier_adapter(tmp_path, monkeypatch):
    folder = save_adapter(Adapter({QUERY: pair(CONFIG, QUERY)}), tmp_path / "saved", CONFIG)
    before = read_adapter(folder, CONFIG)

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("checkpoints_convert.adapters.save.save_file", fail)
    with pytest.raises(CheckpointError, match="could not be written: No space left"):
        save_adapter(Adapter({QUERY: pair(CONFIG, QUERY, seed=1)}), folder, CONFIG, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert_same(before, read_adapter(folder, CONFIG))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRank(random(8, 3), random(4, 6), 1.0), r"\(8, 3\) and \(4, 6\) have no common rank"),
        (lambda: LowRank(random(8, 4), random(4, 6), 1.0, magnitude=random(1)), r"a magnitude of shape \(1,\)"),
        (lambda: LowRank(random(8, 4), random(2, 4, 6), 1.0, bias=random(6)), r"a bias of shape .*, not \(2, 6\)"),
        (lambda: TokenRows((1, 2), random(1, 8)), r"rows of shape \(1, 8\) for 2 tokens"),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
