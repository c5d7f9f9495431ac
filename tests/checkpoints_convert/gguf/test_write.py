"""Writing GGUF: what the reader opens is the checkpoint; what GGUF cannot say is refused before anything is written."""

import json

import jax
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, load
from checkpoints_convert.gguf.blocks import TYPES, dequantize
from checkpoints_convert.gguf.encode import WEIGHTED, encode
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.write import FILE_TYPES, header, save_gguf
from checkpoints_convert.load import open_checkpoint
from jaxinfer.loaded_tokenizers import tokenizer_of
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.conftest import Checkpoint
from tests.checkpoints_convert.gguf.test_tokenizer import TEXTS, trained


def saved(source, path, kind="F32", **options):
    with open_checkpoint(source) as opened:
        return save_gguf(opened, path, kind, **options)


def dense(params):
    return jax.tree.map(
        lambda leaf: np.asarray(leaf.dequantize() if is_quantized(leaf) else leaf), params, is_leaf=is_quantized
    )


@pytest.fixture
def source(tmp_path):
    """source(architecture, hidden=, inner=, pre=): with a tokenizer that llama.cpp has a name for, unless pre=None."""

    def make(architecture="LlamaForCausalLM", *, hidden=256, inner=512, pre: str | None = "qwen2", **changes):
        config = {
            "architectures": [architecture], "vocab_size": 700, "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
            "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32", **changes,
        }  # fmt: skip
        shapes = {"model.embed_tokens": (700, hidden), "model.norm": (hidden,), "lm_head": (700, hidden)}
        of_layer = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        if architecture == "Qwen3ForCausalLM":
            of_layer |= {f"self_attn.{letter}_norm": (hidden // 4,) for letter in "qk"}
        for layer in range(2):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
        random = np.random.default_rng(0)
        tensors = {f"{name}.weight": random.standard_normal(shape, np.float32) * 0.1 for name, shape in shapes.items()}
        if architecture == "Qwen2ForCausalLM":
            for name in [
                name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            ]:
                bias = random.standard_normal(len(tensors[name]), np.float32)
                tensors[f"{name.removesuffix('weight')}bias"] = bias
        files = {} if pre is None else {"tokenizer.json": trained(pre).to_str()}
        return Checkpoint(tmp_path / "source", config, tensors, files)

    return make


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_a_file_is_the_rounded_checkpoint(kind, source, tmp_path):
    """Every weight is what its type makes of the source's; queries and keys are in llama.cpp's order."""
    folder = source().write()
    found = saved(folder, tmp_path / "m.gguf", kind)
    config, params = load(tmp_path / "m.gguf", dtype="float32")
    wanted_config, wanted = load(folder)
    assert config.to_dict() == wanted_config.to_dict()
    inner, head = (kind, "Q8_0") if kind.startswith("Q4") else (kind, kind)

    def rounded(path, leaf):
        keys = [key.key for key in path]
        if leaf.ndim == 1:
            return leaf
        rows = np.asarray(leaf, np.float32) if keys == ["embed"] else np.asarray(leaf, np.float32).T
        name = head if keys[0] in ("embed", "lm_head") else inner
        values = dequantize(name, encode(name, rows))
        return values if keys == ["embed"] else values.T

    expected = jax.tree_util.tree_map_with_path(rounded, wanted)
    jax.tree.map(np.testing.assert_array_equal, dense(params), expected)
    assert found.kinds == {name: count for name, count in (("F32", 5), (inner, 14), (head, 2)) if count} | (
        {kind: 16} if inner == head != "F32" else {"F32": 21} if kind == "F32" else {}
    )
    assert found.num_bytes == (tmp_path / "m.gguf").stat().st_size
    assert found.notes == ()


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_other_families(architecture, source, tmp_path):
    changes = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    folder = source(architecture, **changes).write()
    saved(folder, tmp_path / "m.gguf")
    found, wanted = load(tmp_path / "m.gguf"), load(folder)
    assert found[0].to_dict() | {"architecture": architecture} == wanted[0].to_dict()
    jax.tree.map(np.testing.assert_array_equal, dense(found[1]), dense(wanted[1]))


@pytest.mark.matrix
@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm", "tekken", "gpt-4o", "command-r", "olmo"])
def test_a_tokenizer_is_found_and_rebuilt(pre, source, tmp_path):
    made = source(pre=pre)
    made.files["tokenizer_config.json"] = json.dumps({"chat_template": "{{ messages[0]['content'] }}"})
    folder = made.write()
    assert saved(folder, tmp_path / "m.gguf").notes == ()
    found, wanted = tokenizer_of(tmp_path / "m.gguf"), tokenizer_of(folder)
    assert found is not None
    assert wanted is not None
    for text in TEXTS:
        assert found.encode(text) == wanted.encode(text)
    assert found.chat_template == wanted.chat_template
    with GGUFIndex(tmp_path / "m.gguf") as index:
        assert index.text("tokenizer.ggml.model") == "gpt2"
        assert index.count("tokenizer.ggml.tokens") == 700  # ids without a token are unused ones


def test_a_tokenizer_without_a_name_is_for_our_reader_only_and_it_is_said(source, tmp_path):
    made = source()
    spec = json.loads(made.files["tokenizer.json"])
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+|\W"
    made.files["tokenizer.json"] = json.dumps(spec)
    folder = made.write()
    [note] = saved(folder, tmp_path / "m.gguf").notes
    assert "llama.cpp takes token ids only, no text: its pre-tokenizer" in note
    found, wanted = tokenizer_of(tmp_path / "m.gguf"), tokenizer_of(folder)
    assert found is not None
    assert wanted is not None
    assert [found.encode(text) for text in TEXTS] == [wanted.encode(text) for text in TEXTS]
    with GGUFIndex(tmp_path / "m.gguf") as index:
        assert index.text("tokenizer.ggml.model") == "no_vocab"


def test_a_checkpoint_without_a_tokenizer(source, tmp_path):
    [note] = saved(source(pre=None).write(), tmp_path / "m.gguf").notes
    assert "has no tokenizer.json" in note
    load(tmp_path / "m.gguf")


def test_rows_that_are_no_whole_blocks_are_stored_otherwise_and_it_is_said(source, tmp_path):
    folder = source(hidden=64, inner=80).write()
    found = saved(folder, tmp_path / "m.gguf", "Q4_K")
    assert found.kinds == {"Q8_0": 14, "F16": 2, "F32": 5}
    assert "12 tensors are Q8_0, since their rows are no whole blocks of Q4_K: blk.0.attn_k.weight" in found.notes[0]
    assert "2 tensors are F16, since their rows are no whole blocks of Q4_K: blk.0.ffn_down.weight" in found.notes[1]
    load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("GemmaForCausalLM", {}, "GemmaForCausalLM is not written as GGUF; the architectures that are: Llama"),
        ("MistralForCausalLM", {"sliding_window": 16}, "has a sliding window, which llama.cpp's 'llama' does not have"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling .* is not"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64}},
            "rope_scaling .* is not written",
        ),
    ],
)  # fmt: skip
def test_what_gguf_cannot_say_is_refused(architecture, changes, message, checkpoint, tmp_path):
    folder = checkpoint(architecture, **changes).write()
    with pytest.raises(CheckpointError, match=message):
        saved(folder, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_setting_without_a_key_is_seen_when_the_header_is_read_back(source, tmp_path, monkeypatch):
    """A planted mistake: a key that is not written."""
    from checkpoints_convert.gguf import write as module

    folder, metadata_of = source().write(), module.metadata_of

    def forgetful(config, where):
        keys, tensors = metadata_of(config, where)
        return {**keys, "llama.rope.freq_base": 5.0}, tensors

    monkeypatch.setattr(module, "metadata_of", forgetful)
    with pytest.raises(CheckpointError, match=r"GGUF cannot say it: rope .*would be read as"):
        saved(folder, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_destination_that_exists_is_kept(source, tmp_path):
    folder = source(pre=None).write()
    path = tmp_path / "m.gguf"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="exists: choose another destination"):
        saved(folder, path)
    assert path.read_text() == "mine"
    saved(folder, path, overwrite=True)
    load(path)
    with pytest.raises(CheckpointError, match=r"must be a file whose name ends in \.gguf"):
        saved(folder, tmp_path / "m.bin")


def test_an_interrupted_write_leaves_nothing(source, tmp_path):
    def interrupted(name):
        if name == "blk.1.attn_q.weight":
            raise KeyboardInterrupt

    path = tmp_path / "m.gguf"
    with pytest.raises(KeyboardInterrupt):
        saved(source().write(), path, report=interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_values_that_a_type_cannot_hold_are_refused(source, tmp_path):
    made = source(pre=None)
    name = "model.layers.0.mlp.up_proj.weight"
    made.tensors[name] = made.tensors[name] * 1e8
    for kind in ("F16", "Q8_0", "Q4_0", "Q4_K"):
        with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.ffn_up\.weight': \d+ of \d+ numbers are too large"):
            saved(made.write(), tmp_path / "m.gguf", kind)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_weights_of_the_error_lower_the_weighted_error(kind):
    random = np.random.default_rng(0)
    rows = random.standard_normal((32, 1024)).astype(np.float32)
    importance = np.exp(1.5 * random.standard_normal(1024)).astype(np.float32)

    def error(raw, by):
        return float((by * (dequantize(kind, raw) - rows) ** 2).sum())

    plain, weighted = encode(kind, rows), encode(kind, rows, importance)
    assert error(weighted, importance) < 0.8 * error(plain, importance)
    assert error(weighted, np.ones(1024)) > error(plain, np.ones(1024))
    # Inputs that were never seen do not vanish.
    unseen = dequantize(kind, encode(kind, rows, np.zeros(1024, np.float32)))
    assert np.sqrt(((unseen - rows) ** 2).mean()) < 0.12


def test_blocks_of_zeros():
    for kind in ("Q8_0", "Q4_0", "Q4_K"):
        assert not dequantize(kind, encode(kind, np.zeros((2, 256), np.float32))).any()


def test_what_is_not_written():
    with pytest.raises(ValueError, match="Q6_K is not written; written are F32"):
        encode("Q6_K", np.zeros((1, 256), np.float32))
    with pytest.raises(ValueError, match="Q8_0 is rounded without weights"):
        encode("Q8_0", np.zeros((1, 32), np.float32), np.ones(32, np.float32))


def test_a_header_is_padded_and_read(tmp_path):
    shapes = {"x": (TYPES["F32"], (3,))}
    raw = header({"general.architecture": "llama", "flag": True, "list": ["a", "bc"]}, shapes, {"x": 0})
    assert len(raw) % 32 == 0
    (tmp_path / "m.gguf").write_bytes(raw + bytes(32))
    with GGUFIndex(tmp_path / "m.gguf") as index:
        assert (index.scalar("flag"), list(index.texts("list") or ())) == (True, ["a", "bc"])
        assert index.tensors["x"].shape == (3,)
