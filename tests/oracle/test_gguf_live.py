"""GGUF next to gguf-py, SentencePiece and Transformers, in this process: `make test-oracle`."""

from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert import load
from checkpoints_convert.gguf.blocks import TYPE_NAMES, TYPES, dequantize
from checkpoints_convert.gguf.grids import grid
from jaxinfer.loaded_tokenizers import tokenizer_of
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.gguf.gguf_models import metadata_of, tensors_of
from tests.checkpoints_convert.gguf.gguf_writer import FLOATS, Blocks, random_blocks, write
from tests.oracle.gguf_families import CASES as GGUF_CASES
from tests.oracle.gguf_families import gguf_name, to_gguf
from tests.oracle.test_gguf_families import checkpoint, differing, save

pytestmark = pytest.mark.oracle

TEXTS = [
    "Hello world, this is  a test.", "The quick brown fox jumps over 1,234 lazy dogs!", "héllo wörld — ½ price €5", "",
    " leading space", "trailing ", "a\nb\tc", "日本語 text 👍", "under_score CamelCase x=3;", "aaaaaaa bbbbb ababab",
]  # fmt: skip


@pytest.fixture(scope="module")
def gguf():
    """Asked for by --oracle, it must be there."""
    try:
        import gguf
    except ImportError as error:
        pytest.fail(f"--oracle needs gguf ({error})", pytrace=False)
    return gguf


def by_gguf_py(gguf, kind: str, raw: np.ndarray) -> np.ndarray:
    stored = raw if kind == "BF16" or kind not in FLOATS else raw.view(FLOATS[kind])
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]), np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dequantization_is_bitwise_that_of_gguf_py(gguf, kind, seed):
    """Blocks of random bytes, so that scales are anything, NaN and infinity among them."""
    of_type = TYPES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (64, 8 * of_type.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        found = dequantize(kind, raw)
    wanted = by_gguf_py(gguf, kind, raw)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(found[is_number].view(np.uint32), wanted[is_number].view(np.uint32))
    assert is_number.mean() > 0.5


def test_the_table_of_types(gguf):
    for kind in gguf.GGMLQuantizationType:
        assert TYPE_NAMES[kind.value] == kind.name
    for name, kind in TYPES.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert sizes == (kind.block_size, kind.block_bytes)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_the_grids_of_i_quants(gguf, kind):
    theirs = getattr(gguf.quants, kind)
    theirs.init_grid()
    wanted = np.searchsorted(theirs.grid_map, theirs.grid.reshape(theirs.grid_shape))
    np.testing.assert_array_equal(grid(kind), wanted)


@pytest.mark.parametrize("name", GGUF_CASES)
def test_names_are_those_of_gguf_py(gguf, name):
    architecture, config, tensors = checkpoint(name, tied=False not in _ties(name))
    kind = next(kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    table = gguf.get_tensor_name_map(kind, num_layers)
    checked = 0
    for tensor in tensors:
        if any(part in tensor for part in (".experts.", "norms.", "kv_b_proj", "sinks", "e_score")):
            continue  # stacked or cut by the converter before they are named
        if tensor == "lm_head.weight" and kind in _tied_architectures(gguf):
            continue  # never written: the head is the embedding
        assert table.get_name(tensor, try_suffixes=(".weight", ".bias")) == gguf_name(tensor, architecture)
        checked += 1
    assert checked > 8
    # What the converter names itself.
    known = {text for _, text in table.mapping.values()}
    for stored in to_gguf(architecture, config, tensors)[1]:
        base = stored.rpartition(".")[0]
        assert base in known or base.startswith("rope_factors") or stored == "output.weight", stored


def _tied_architectures(gguf) -> list:
    return [kind for kind, tensors in gguf.MODEL_TENSORS.items() if gguf.MODEL_TENSOR.OUTPUT not in tensors]


def _ties(name: str) -> tuple[bool, ...]:
    from tests.oracle.cases import CASES

    return CASES[name].ties


def test_gguf_py_reads_what_the_tests_write(gguf, make_small, tmp_path):
    config, tensors = make_small()
    stored = tensors_of(config, tensors) | {"blk.0.ffn_up.weight": random_blocks("Q6_K", (512, 256), _random())}
    metadata = {**metadata_of(config), "list": ["a", "bc"], "numbers": np.arange(3, dtype=np.int32), "flag": True}
    reader = gguf.GGUFReader(write(tmp_path / "m.gguf", metadata, stored))
    for key, value in metadata.items():
        found = reader.get_field(key).contents()
        assert np.allclose(found, value) if isinstance(value, float | np.ndarray) else found == value
    assert {tensor.name for tensor in reader.tensors} == set(stored)
    for tensor in reader.tensors:
        array = stored[tensor.name]
        raw = array.raw if isinstance(array, Blocks) else array
        assert np.asarray(tensor.data).tobytes() == raw.tobytes()
        assert tuple(tensor.shape.tolist()[::-1]) == array.shape


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_model_that_gguf_py_wrote_opens(gguf, make_small, tmp_path, kind):
    """And matches its safetensors source: exactly in floating point, else as its blocks say."""
    config, tensors = make_small()
    number = gguf.GGMLQuantizationType[kind]
    path = tmp_path / "m.gguf"
    stored = _write_with_gguf_py(gguf, gguf.GGUFWriter(path, "llama"), config, tensors, number)
    found_config, found = load(path, dtype="float32")
    source = {name: _as_stored(gguf, number, array) for name, array in tensors.items()}
    wanted_config, wanted = load(save(tmp_path / "hf", config, source), dtype="float32")
    assert found_config.to_dict() == wanted_config.to_dict()
    dequantized = _dense(found)
    assert differing(dequantized, wanted, 0.0) == []
    quantized = [leaf for leaf in _leaves(found) if is_quantized(leaf)]
    assert len(quantized) == (0 if kind in FLOATS else 16)
    assert len(stored) == len(tensors)


def test_split_files_that_gguf_py_wrote(gguf, make_small, tmp_path):
    config, tensors = make_small()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=5)
    _write_with_gguf_py(gguf, writer, config, tensors, gguf.GGMLQuantizationType.F32)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 5
    assert differing(load(parts[0])[1], load(save(tmp_path / "hf", config, tensors))[1], 0.0) == []


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def make_small():
    def make():
        config = {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
            "rope_theta": 500000.0, "tie_word_embeddings": False,
        }  # fmt: skip
        shapes = {"model.embed_tokens.weight": (96, 256), "model.norm.weight": (256,), "lm_head.weight": (96, 256)}
        widths = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
                  "self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256),
                  "mlp.down_proj": (256, 512), "input_layernorm": (256,),
                  "post_attention_layernorm": (256,)}  # fmt: skip
        for layer in range(2):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in widths.items()}
        random = _random()
        return config, {name: random.standard_normal(shape, np.float32) * 0.1 for name, shape in shapes.items()}

    return make


def _write_with_gguf_py(gguf, writer, config, tensors, number) -> dict:
    for key, value in metadata_of(config).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if key != "general.architecture":
            add[type(value)](key, value)
    stored = tensors_of(config, tensors)
    for name, array in stored.items():
        if array.ndim == 1 or number == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _as_stored(gguf, number, array: np.ndarray) -> np.ndarray:
    """A weight after gguf-py has rounded it; its rows are rounded one by one, so their order does not matter."""
    if array.ndim == 1 or number == gguf.GGMLQuantizationType.F32:
        return array
    return np.asarray(gguf.quants.dequantize(gguf.quants.quantize(array, number), number), np.float32)


def _leaves(params):
    import jax

    return jax.tree.leaves(params, is_leaf=is_quantized)


def _dense(params):
    import jax

    return jax.tree.map(lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A SentencePiece BPE with byte fallback, as Llama's and Mistral's are, trained on the licence of this package."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text = Path(__file__).parents[2] / "LICENSE"
    prefix = tmp_path_factory.mktemp("spm") / "m"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(prefix), vocab_size=600, model_type="bpe", byte_fallback=True,
        character_coverage=0.999, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


def test_sentencepiece(sentencepiece_model, tmp_path):
    """Encodings are SentencePiece's own, and those of the tokenizer that Transformers makes of the model."""
    import sentencepiece
    import transformers
    from transformers.tokenization_utils_base import generate_merges

    model = sentencepiece.SentencePieceProcessor(str(sentencepiece_model))
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(model.vocab_size())
    ]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(model.vocab_size())],
        "tokenizer.ggml.scores": np.float32([model.get_score(i) for i in range(model.vocab_size())]),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
    rebuilt = tokenizer_of(write(tmp_path / "m.gguf", metadata, {}))
    texts = [*TEXTS, (Path(__file__).parents[2] / "LICENSE").read_text()[:3000]]
    for text in texts:
        ids = rebuilt.encode(text, add_special_tokens=False)
        assert ids == model.encode(text), text
        assert rebuilt.encode(text)[0] == model.bos_id()
    pieces = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    scores = {piece: model.get_score(i) for piece, i in pieces.items()}
    merges = generate_merges(pieces, scores)
    theirs = transformers.LlamaTokenizer(vocab=pieces, merges=merges)
    for text in texts:
        if not text.startswith(" "):  # Transformers 5 puts no second space before one
            assert rebuilt.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
