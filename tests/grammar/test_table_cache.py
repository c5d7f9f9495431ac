"""Tables on disk: read back, damaged, evicted, not writable."""

import logging
import os

import numpy as np
import pytest

from jaxinfer.grammar import table_cache
from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.pattern import parse_pattern
from jaxinfer.grammar.spelling import Spelling
from jaxinfer.grammar.table import TokenTable
from jaxinfer.grammar.table_builder import TableLimits, build_table
from jaxinfer.grammar.table_cache import TableCache
from jaxinfer.grammar.vocabulary import Vocabulary
from tests.grammar.llguidance_oracle import longest_tokens

LETTERS = Vocabulary((*(bytes([letter]) for letter in b"abcdef"), None), (6,))
LIMITS = TableLimits()


class Builder:
    """Counts how many tables it built."""

    def __init__(self):
        self.count = 0

    def get(self, cache: TableCache, pattern: str, vocabulary=LETTERS, limits=LIMITS, spelling=None) -> TokenTable:
        node, spelling = parse_pattern(pattern), spelling or longest_tokens(vocabulary)

        def build() -> TokenTable:
            self.count += 1
            return build_table(build_automaton(node), spelling, limits)

        return cache.get_or_build(node, spelling, limits, build)


def equal(one: TokenTable, other: TokenTable) -> bool:
    return all(
        np.array_equal(value, vars(other)[name]) and value.dtype == vars(other)[name].dtype
        for name, value in vars(one).items()
    )


def test_a_table_is_built_once_for_a_language_and_a_vocabulary(tmp_path, monkeypatch):
    builder = Builder()
    first = builder.get(TableCache(tmp_path), "a|b")
    assert equal(first, builder.get(TableCache(tmp_path), "(a|b)"))  # the same tree
    assert builder.count == 1
    builder.get(TableCache(tmp_path), "a|c")
    builder.get(TableCache(tmp_path), "a|b", Vocabulary((*LETTERS.tokens, b"g"), (6,)))
    builder.get(TableCache(tmp_path), "a|b", limits=TableLimits(max_states=10))
    monkeypatch.setattr(table_cache, "FORMAT_VERSION", 0)
    builder.get(TableCache(tmp_path), "a|b")
    assert builder.count == 5
    assert len(os.listdir(tmp_path)) == 5
    builder.get(TableCache(None), "a|b")
    assert builder.count == 6


def test_a_tokenizer_that_spells_in_another_way_has_its_own_table(tmp_path):
    vocabulary, builder = Vocabulary((*LETTERS.tokens, b"ab"), (6,)), Builder()
    whole, in_letters = Spelling(vocabulary, lambda text: [7], "1"), Spelling(vocabulary, lambda text: [0, 1], "2")
    tables = [builder.get(TableCache(tmp_path), "ab", spelling=one) for one in (whole, in_letters, whole)]
    assert builder.count == 2
    assert not equal(tables[0], tables[1])
    assert equal(tables[0], tables[2])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no zip", "index", "shape", "missing"])
def test_a_damaged_file_is_built_again_and_told(tmp_path, caplog, damage):
    builder = Builder()
    table = builder.get(TableCache(tmp_path), "(ab|c)*d")
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        place = data.index(table.masks.tobytes())
        data[place] ^= 1
    elif damage in ("index", "shape", "missing"):
        arrays = dict(vars(table))
        if damage == "index":
            arrays["mask_of"] = table.mask_of + 100
        elif damage == "shape":
            arrays["classes"] = table.classes[:-1]
        else:
            del arrays["drafts"]
        with path.open("wb") as file:
            np.savez(file, **arrays)
        data = None
    if data is not None:
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "no zip": b"x" * 100}.get(damage, data))
    with caplog.at_level(logging.WARNING):
        again = builder.get(TableCache(tmp_path), "(ab|c)*d")
    assert equal(table, again)
    assert builder.count == 2
    assert f"{path} could not be read" in caplog.text
    builder.get(TableCache(tmp_path), "(ab|c)*d")
    assert builder.count == 2


def test_the_least_recently_used_are_removed(tmp_path):
    builder = Builder()
    builder.get(TableCache(tmp_path), "a")
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    cache = TableCache(tmp_path, max_bytes=4 * size)
    for pattern in "bcd":
        builder.get(cache, pattern)
    for age, file in enumerate(sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns, reverse=True)):
        os.utime(file, ns=(10**18 - age * 10**9,) * 2)
    builder.get(cache, "a")  # used last, though written first
    assert builder.count == 4
    builder.get(cache, "e")
    builder.get(cache, "f")
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4 * size
    for pattern in "aef":
        builder.get(cache, pattern)
    assert builder.count == 6
    builder.get(cache, "b")
    assert builder.count == 7
    builder.get(TableCache(tmp_path, max_bytes=size // 2), "ab")  # larger than the limit: not kept, removes nothing
    assert len(os.listdir(tmp_path)) == 4


def test_a_disk_that_cannot_be_written_is_told_once(tmp_path, caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    builder, cache = Builder(), TableCache(tmp_path)
    monkeypatch.setattr(table_cache.os, "replace", fail)
    with caplog.at_level(logging.WARNING):
        assert builder.get(cache, "a") is not None
        assert builder.get(cache, "a") is not None
    assert caplog.text.count("No space left on device") == 1
    assert os.listdir(tmp_path) == []


def test_parts_of_killed_processes_are_removed(tmp_path):
    for name, age in ((".old.part", 10**6), (".new.part", 0)):
        (tmp_path / name).touch()
        if age:
            os.utime(tmp_path / name, (age, age))
    TableCache(tmp_path)
    assert os.listdir(tmp_path) == [".new.part"]


def test_a_file_with_pickles_is_not_loaded(tmp_path, caplog):
    builder = Builder()
    builder.get(TableCache(tmp_path), "a")
    (path,) = tmp_path.iterdir()
    with path.open("wb") as file:
        np.savez(file, **{name: np.array([{}], object) for name in vars(builder.get(TableCache(tmp_path), "a"))})
    with caplog.at_level(logging.WARNING):
        builder.get(TableCache(tmp_path), "a")
    assert builder.count == 2
    assert "could not be read" in caplog.text
