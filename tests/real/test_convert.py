"""The published models converted, and back: the same tokens; written as GGUF, llama.cpp gives the same answer."""

import pytest

from checkpoints_convert import CheckpointError, compare_tensors, convert
from jaxinfer.extras import install_hint
from jaxinfer.loaded_tokenizers import tokenizer_of
from tests.real.exports import command, dense, log_probs
from tests.real.requests import greedy, opened
from tests.real.texts import HELD_OUT, TEXTS

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.optimized]
PROMPT = "The three largest cities of France are"
NUM_TOKENS = 16


def answer(path, **options):
    """Token ids of a greedy answer, and log-probabilities of a text."""
    with opened(path, **options) as llm:
        (output,) = llm.generate([PROMPT], greedy(NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        return output.outputs[0].token_ids, log_probs(llm, llm.tokenizer.encode(HELD_OUT))


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_our_form_answers_as_the_file(model_path, tmp_path, name):
    command("convert", model_path(name), tmp_path / "ours")
    assert compare_tensors(tmp_path / "ours", model_path(name)) == []
    assert answer(tmp_path / "ours") == answer(model_path(name))


def test_hugging_faces_form_and_back(model_path, tmp_path_factory, tmp_path):
    path = model_path("smollm2")
    folder = dense(path, tmp_path_factory.getbasetemp() / "smollm2-dense")
    command("convert", folder, tmp_path / "ours")
    command("convert", tmp_path / "ours", tmp_path / "back", "--to", "huggingface")
    assert compare_tensors(tmp_path / "back", folder) == []
    assert answer(tmp_path / "back") == answer(folder) == answer(path, requantize="dense")
    found, wanted = tokenizer_of(tmp_path / "back"), tokenizer_of(path)
    assert found is not None
    assert wanted is not None
    assert [found.encode(text) for text in TEXTS] == [wanted.encode(text) for text in TEXTS]


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_a_file_without_a_form_names_the_option(model_path, tmp_path, name):
    with pytest.raises(CheckpointError, match="--requantize dense"):
        convert(model_path(name), tmp_path / "hf", to="huggingface", progress=None)
    assert list(tmp_path.iterdir()) == []


def test_llama_cpp_answers_alike_from_what_is_written(model_path, tmp_path_factory, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason=f"llama.cpp is not installed: {install_hint('peers')}")
    folder = dense(model_path("smollm2"), tmp_path_factory.getbasetemp() / "smollm2-dense")
    path = tmp_path / "smollm2-f32.gguf"
    command("quantize", folder, path, "--to", "gguf", "--type", "f32")
    ours, _ = answer(path)
    assert ours == answer(folder)[0]
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=2, verbose=False, n_gpu_layers=0, type_k=0, type_v=0)
    tokenizer = tokenizer_of(path)
    assert tokenizer is not None
    encoded = [model.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]
    assert encoded == [tokenizer.encode(text) for text in TEXTS]
    tokens = []
    for token in model.generate(tokenizer.encode(PROMPT), temp=0):
        tokens.append(token)
        if len(tokens) == NUM_TOKENS:
            break
    model.close()
    assert tokens == ours
