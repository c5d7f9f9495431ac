"""Tables on disk: read back, and built again where a file is damaged. What else becomes of files: test_kept_files."""

import io
import logging
import os

import numpy as np
import pytest

from jaxinfer.grammar import table_cache
from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.pattern import parse_pattern
from jaxinfer.grammar.spelling import Spelling
from jaxinfer.grammar.table_builder import TableLimits, TokenTable, build_table
from jaxinfer.grammar.table_cache import MAX_BYTES, kept_table
from jaxinfer.grammar.vocabulary import Vocabulary
from jaxinfer.kept_files import KeptFiles
from tests.grammar.llguidance_oracle import longest_tokens

LETTERS = Vocabulary((*(bytes([letter]) for letter in b"abcdef"), None), (6,))
LIMITS = TableLimits()


class Builder:
    """Counts how many tables it built."""

    def __init__(self):
        self.count = 0

    def get(
        self, files: KeptFiles | None, pattern: str, vocabulary=LETTERS, limits=LIMITS, spelling=None
    ) -> TokenTable:
        node, spelling = parse_pattern(pattern), spelling or longest_tokens(vocabulary)

        def build() -> TokenTable:
            self.count += 1
            return build_table(build_automaton(node), spelling, limits)

        return kept_table(files, node, spelling, limits, build)


class Recorder(KeptFiles):
    """Remembers the key that was written last."""

    def write(self, key: str, content: bytes) -> None:
        self.key = key
        super().write(key, content)


def kept_in(folder) -> KeptFiles:
    return KeptFiles(folder, MAX_BYTES)


def equal(one: TokenTable, other: TokenTable) -> bool:
    return all(
        np.array_equal(value, vars(other)[name]) and value.dtype == vars(other)[name].dtype
        for name, value in vars(one).items()
    )


def test_a_table_is_built_once_for_a_language_and_a_vocabulary(tmp_path, monkeypatch):
    builder = Builder()
    first = builder.get(kept_in(tmp_path), "a|b")
    assert equal(first, builder.get(kept_in(tmp_path), "(a|b)"))  # the same tree
    assert builder.count == 1
    builder.get(kept_in(tmp_path), "a|c")
    builder.get(kept_in(tmp_path), "a|b", Vocabulary((*LETTERS.tokens, b"g"), (6,)))
    builder.get(kept_in(tmp_path), "a|b", limits=TableLimits(max_states=10))
    monkeypatch.setattr(table_cache, "FORMAT_VERSION", 0)
    builder.get(kept_in(tmp_path), "a|b")
    assert builder.count == 5
    assert len(os.listdir(tmp_path)) == 5
    builder.get(None, "a|b")
    assert builder.count == 6


def test_a_tokenizer_that_spells_in_another_way_has_its_own_table(tmp_path):
    vocabulary, builder = Vocabulary((*LETTERS.tokens, b"ab"), (6,)), Builder()
    whole, in_letters = Spelling(vocabulary, lambda text: [7], "1"), Spelling(vocabulary, lambda text: [0, 1], "2")
    tables = [builder.get(kept_in(tmp_path), "ab", spelling=one) for one in (whole, in_letters, whole)]
    assert builder.count == 2
    assert not equal(tables[0], tables[1])
    assert equal(tables[0], tables[2])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no zip", "index", "shape", "missing", "pickles"])
def test_a_damaged_file_is_built_again_and_told(tmp_path, caplog, damage):
    builder, files = Builder(), Recorder(tmp_path, MAX_BYTES)
    table = builder.get(files, "(ab|c)*d")
    (path,) = tmp_path.iterdir()
    data, arrays = bytearray(path.read_bytes()), dict(vars(table))
    if damage == "flipped":
        data[data.index(table.masks.tobytes())] ^= 1
    elif damage == "index":
        arrays["mask_of"] = table.mask_of + 100
    elif damage == "shape":
        arrays["classes"] = table.classes[:-1]
    elif damage == "missing":
        del arrays["drafts"]
    elif damage == "pickles":
        arrays = {name: np.array([{}], object) for name in arrays}
    if damage in ("index", "shape", "missing", "pickles"):
        content = io.BytesIO()
        np.savez(content, **arrays)
        files.write(files.key, content.getvalue())
    elif damage == "no zip":
        files.write(files.key, b"x" * 100)
    else:
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b""}.get(damage, data))
    with caplog.at_level(logging.WARNING):
        again = builder.get(files, "(ab|c)*d")
    assert equal(table, again)
    assert builder.count == 2
    assert f"{path} is " in caplog.text
    builder.get(files, "(ab|c)*d")
    assert builder.count == 2
