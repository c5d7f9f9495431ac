"""GGUF files that we write next to gguf-py, and to llama.cpp's logits: `make test-oracle`, with the extra `peers`."""

import json
import unicodedata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert import load
from checkpoints_convert.gguf.blocks import dequantize
from checkpoints_convert.gguf.config import LLAMA3
from checkpoints_convert.gguf.encode import encode
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.write import WRITTEN, save_gguf
from checkpoints_convert.load import open_checkpoint
from jaxinfer.data import embedded_path
from jaxinfer.extras import install_hint
from tests.oracle import parity
from tests.oracle.cases import CASES, weights
from tests.oracle.gguf_families import with_all_layers_alike
from tests.oracle.test_gguf_families import made, save

pytestmark = pytest.mark.oracle
DEMO = embedded_path("demo")
assert DEMO is not None
FAMILIES = ["llama", "llama_bias", "llama_llama3", "llama_linear", "llama_yarn", "mistral_full", "mixtral", "qwen2",
            "qwen3", "qwen3_moe"]  # fmt: skip

# Settings that GGUF has no word for.
CHANGES = {"mixtral": {"sliding_window": None}, "qwen3_moe": {"decoder_sparse_step": 1}}


@pytest.fixture(scope="module")
def gguf():
    try:
        import gguf
    except ImportError as error:
        pytest.fail(f"--oracle needs gguf ({error})", pytrace=False)
    return gguf


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_are_bitwise_those_of_gguf_py(gguf, kind, seed):
    random = np.random.default_rng(seed)
    rows = (random.standard_normal((40, 1024)) * 10.0 ** random.integers(-4, 2, (40, 1))).astype(np.float32)
    rows[3], rows[4, :40] = 0, 0
    wanted = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(encode(kind, rows), wanted.view(np.uint8))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_gguf_py_dequantizes_to_our_values(gguf, kind):
    raw = encode(kind, np.random.default_rng(2).standard_normal((16, 512)).astype(np.float32))
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(dequantize(kind, raw).view(np.uint32), np.asarray(wanted).view(np.uint32))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K"])
def test_gguf_py_reads_the_embedded_model(gguf, kind, tmp_path):
    """Names, types and values are those that our own reader finds."""
    path = tmp_path / "m.gguf"
    with open_checkpoint(DEMO) as source:
        save_gguf(source, path, kind)
    reader, index = gguf.GGUFReader(path), GGUFIndex(path)
    assert {tensor.name for tensor in reader.tensors} == set(index.tensors)
    for tensor in reader.tensors:
        entry = index.tensors[tensor.name]
        assert tensor.tensor_type.name == entry.kind.name
        stored = np.asarray(tensor.data)
        wanted = gguf.quants.dequantize(stored, tensor.tensor_type).astype(np.float32).reshape(-1, entry.shape[-1])
        np.testing.assert_array_equal(dequantize(entry.kind.name, index.read(tensor.name)), wanted)
    index.close()
    assert reader.get_field("general.architecture").contents() == "llama"


def llama_cpp_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocabulary] of llama.cpp, on the CPU."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=f"llama.cpp is not installed: {install_hint('peers')}")
    model = llama_cpp.Llama(
        str(path), n_ctx=256, n_batch=256, n_threads=1, logits_all=True, verbose=False, n_gpu_layers=0,
        type_k=0, type_v=0,  # float32, where its default is float16
    )  # fmt: skip
    model.eval(tokens)
    found = np.array(model.scores[: len(tokens)], np.float32)
    model.close()
    return found


def our_logits(path: Path, tokens: list[int]) -> np.ndarray:
    config, params = load(path, dtype="float32")
    hidden = parity.states(config, params, jnp.array(tokens))[-1]
    return parity.logits(config, params, hidden)


def source_of(name: str, folder: Path) -> Path:
    """The tiny checkpoint of a case, without the settings that GGUF cannot say."""
    kind = "tied" if CASES[name].ties[0] else "untied"
    shapes, config = made(name)["shapes"][kind], dict(made(name)["configs"][kind])
    config |= CHANGES.get(name, {})
    if name == "llama_llama3":  # the original length that llama.cpp's converter knows
        config["rope_parameters"] = {**config["rope_parameters"], **LLAMA3}
    shapes = with_all_layers_alike(shapes, config)
    return save(folder, config, {key: weights(key, tuple(shape), 0, CASES[name]) for key, shape in shapes.items()})


def compared(source: Path, path: Path, kind: str, vocab_size: int) -> tuple[float, float]:
    """The largest difference of a logit between llama.cpp and us, of 60 tokens, and the largest logit."""
    with open_checkpoint(source) as opened:
        save_gguf(opened, path, kind)
    tokens = np.random.default_rng(0).integers(3, vocab_size, 60).tolist()
    ours, theirs = our_logits(path, tokens), llama_cpp_logits(path, tokens)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max()), float(np.abs(ours).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_has_our_logits(name, tmp_path):
    """In float32, so that every key, name and order of a family is seen."""
    difference, largest = compared(source_of(name, tmp_path / "hf"), tmp_path / "m.gguf", "F32", 96)
    print(f"{name}: logits differ by {difference:.2g}, the largest is {largest:.3g}")
    assert difference < 2e-5 * largest


def test_every_architecture_that_is_written_is_compared():
    assert {CASES[name].architecture for name in FAMILIES} == set(WRITTEN)


# llama.cpp rounds activations, too: to float16 or bfloat16, and to 8 bits where weights have 4 or 8.
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("F16", 2e-3), ("BF16", 1e-2), ("Q8_0", 3e-2), ("Q4_0", 3e-2), ("Q4_K", 3e-2)]
)
def test_llama_cpp_has_the_logits_of_the_embedded_model(kind, tolerance, tmp_path):
    difference, largest = compared(DEMO, tmp_path / "m.gguf", kind, 4096)
    print(f"{kind}: logits differ by {difference:.2g}, the largest is {largest:.3g}")
    assert difference < tolerance * largest


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm", "tekken", "gpt-4o", "command-r", "olmo"])
def test_llama_cpp_encodes_as_the_tokenizer_of_the_source(pre, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason=f"llama.cpp is not installed: {install_hint('peers')}")
    from tests.checkpoints_convert.gguf.test_tokenizer import TEXTS, trained

    made, folder = trained(pre), source_of("qwen3", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = np.zeros((700, tensors[name].shape[1]), np.float32)
    folder = save(tmp_path / "large", {**config, "vocab_size": 700, "bos_token_id": 0, "eos_token_id": 1}, tensors)
    (folder / "tokenizer.json").write_text(made.to_str())
    with open_checkpoint(folder) as opened:
        assert save_gguf(opened, tmp_path / "m.gguf", "F32").notes == ()
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    # llama.cpp does not normalize text, and its rules for these two do not know combining marks.
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS]
    if pre in ("tekken", "gpt-4o"):
        texts = [text for text in texts if not any(unicodedata.combining(char) for char in text)]
    assert len(texts) >= 10
    differing = [
        text for text in texts if model.tokenize(text.encode(), add_bos=False, special=True) != made.encode(text).ids
    ]
    model.close()
    assert differing == []
