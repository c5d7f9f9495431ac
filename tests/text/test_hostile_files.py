"""Hostile tokenizer files: one error that names the file and the field, in little time and memory."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.text import Tokenizer
from tests.text.hostile_files import CONFIG, FILE, KINDS, START, TEXT, sequence, spec, template, token

ROOT = Path(__file__).parents[2]
# One of each mechanism; the others are marked slow.
QUICK = (
    "replacements grow the text 20-fold seven times",
    "a charsmap with a trie of 4 GB",
    "a charsmap that points outside of itself",
    "a decoder that strips more than there is",
    "a prefix that cuts a letter in two",
    "a template that names what is not there",
    "a scored token of 10 MB",
    "decoders nested 60 levels deep",
    "two normalizers, the second harmless",
    "a configuration nested 100,000 levels deep",
    "a regex: nested repetition",
    "a regex: a scan from every letter",
)


def measure(names):
    """Each file read in a process of its own, forked from one without JAX."""
    command = [sys.executable, "-m", "tests.text.hostile_files", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=True)
    return {record["name"]: record for record in map(json.loads, run.stdout.splitlines())}


@pytest.fixture(scope="module")
def measured():
    return measure(QUICK)


@pytest.fixture(scope="module")
def all_measured():
    return measure(KINDS)


def check(record):
    assert record["status"] == 0, record
    assert "\n" not in record["error"], record["error"]
    assert "tokenizer" in record["error"] or "added_tokens.json" in record["error"]
    assert re.search(KINDS[record["name"]][0], record["error"]), record["error"]
    assert record["seconds"] < 2, record
    assert record["megabytes"] < 1000, record


@pytest.mark.parametrize("name", QUICK)
def test_hostile_file_gives_one_error(measured, name):
    check(measured[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name not in QUICK])
def test_every_hostile_file_gives_one_error(all_measured, name):
    check(all_measured[name])


def test_there_are_many_kinds():
    assert len(KINDS) >= 100


@pytest.mark.parametrize(
    "fields",
    [
        {"padding": {"strategy": {"Fixed": 10**15}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "a"}},
        {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}},
        {"post_processor": template([TEXT], {}) | {"pair": [START] * 60}},
        {"model": {"dropout": 1.0}},
        {"added_tokens": [token("")]},
        {"normalizer": sequence("normalizers", [{"type": "NFKC"}] * 100)},
    ],
)  # fmt: skip
def test_harmless_files_load(tmp_path, fields):
    (tmp_path / FILE).write_text(json.dumps(spec(**fields)))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(tokenizer.encode("abc")).replace(" ", "") == "abc"


def test_a_library_failure_on_one_text_is_an_error_of_that_text(tmp_path, monkeypatch):
    """`PanicException` derives from BaseException, and would end a server that catches Exception."""

    class PanicException(BaseException):
        pass

    def panic(*args, **kwargs):
        raise PanicException("retry-limit-in-match over")

    (tmp_path / FILE).write_text(json.dumps(spec()))
    (tmp_path / CONFIG).write_text("{}")
    tokenizer = Tokenizer.from_dir(tmp_path)

    class Backend:
        encode = decode = panic

        def id_to_token(self, token_id):
            return "a"

    monkeypatch.setattr(tokenizer, "_backend", Backend())
    for call in (lambda: tokenizer.encode("abc"), lambda: tokenizer.decode([1])):
        with pytest.raises(ValueError, match="the tokenizer failed: retry-limit-in-match over"):
            call()
