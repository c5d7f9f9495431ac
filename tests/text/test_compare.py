"""Two tokenizers of one meaning, and two of different ones."""

import json

import pytest

from jaxinfer.text import Tokenizer, check_same_tokens


def tokenizer(folder, words) -> Tokenizer:
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": words[0]}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return Tokenizer.from_dir(folder)


WORDS = ["<unk>", "a", "b", "c"]


def test_the_same_and_longer_ones_agree(tmp_path):
    one, other = tokenizer(tmp_path / "one", WORDS), tokenizer(tmp_path / "other", [*WORDS, "<pad0>", "<pad1>"])
    check_same_tokens(one, one, ("x", "x"))
    check_same_tokens(one, other, ("x", "y"))
    check_same_tokens(other, one, ("y", "x"))


def test_the_first_id_that_differs_is_named(tmp_path):
    one = tokenizer(tmp_path / "one", WORDS)
    other = tokenizer(tmp_path / "other", ["<unk>", "a", "c", "b"])
    with pytest.raises(ValueError, match="x and y have different tokenizers: token id 2 is 'b' in one and 'c'"):
        check_same_tokens(one, other, ("x", "y"))
