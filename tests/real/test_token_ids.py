"""Tokens of real tokenizers: those of llama.cpp, for 60 texts."""

import pytest

from benchmarks.real.models import MODELS
from jaxinfer.loaded_tokenizers import tokenizer_of
from tests.real.texts import TEXTS

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_llama_cpp(model_path, golden, name):
    tokenizer = tokenizer_of(model_path(name))
    assert tokenizer is not None
    assert golden[name]["sha256"] == MODELS[name].sha256
    assert len(golden[name]["ids"]) == len(TEXTS) == 60
    wrong = {
        text: (found, ids)
        for text, ids in zip(TEXTS, golden[name]["ids"], strict=True)
        if (found := tokenizer.encode(text)) != ids
    }
    assert wrong == {}


@pytest.mark.parametrize("name", MODELS)
def test_texts_come_back(model_path, name):
    """All but those with control tokens, and where U+2581 stands for a space."""
    tokenizer = tokenizer_of(model_path(name))
    assert tokenizer is not None
    changed = [text for text in TEXTS if tokenizer.decode(tokenizer.encode_content(text)) != text]
    assert changed == ([] if name == "smollm2" else ["▁▁ Ġ Ċ <0x0A> ▁the"])
