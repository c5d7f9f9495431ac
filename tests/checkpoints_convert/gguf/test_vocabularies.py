"""Ids of small vocabularies in GGUF files: llama.cpp's (tests/oracle/make_gguf_vocab_golden.py)."""

import json
from pathlib import Path

import pytest

from checkpoints_convert.gguf.pre_tokenizers import PRE_TOKENIZERS
from jaxinfer.loaded_tokenizers import tokenizer_of
from tests.checkpoints_convert.gguf.gguf_writer import write
from tests.checkpoints_convert.gguf.vocabularies import CASES, PRE, texts_of

GOLDEN = json.loads((Path(__file__).parents[2] / "oracle" / "golden" / "gguf_vocabularies.json").read_text())


@pytest.mark.matrix("gpt2 seed-coder", "llama", "llama without ids")
@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_llama_cpp(tmp_path, case):
    tokenizer = tokenizer_of(write(tmp_path / "m.gguf", CASES[case](), {}))
    assert tokenizer is not None
    texts = texts_of(case)
    assert len(GOLDEN[case]) == len(texts)
    assert {text: tokenizer.encode(text) for text in texts} == dict(zip(texts, GOLDEN[case], strict=True))


def test_every_pre_tokenizer_is_compared():
    normalizing = {name for name, one in PRE_TOKENIZERS.items() if one.normalizes}
    alike = {"llama3", "llama-v3"}  # other names of llama-bpe
    unlike = {"falcon"}  # its own tokenizer splits at the bytes of "½" in "，", and llama.cpp does not
    assert {*PRE, *alike, *normalizing, *unlike} == PRE_TOKENIZERS.keys()
