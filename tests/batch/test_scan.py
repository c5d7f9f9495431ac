"""The input, read twice."""

import bz2
import gzip
import json
import lzma

import pytest

from jaxinfer.batch import input
from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.input import scan


def test_blank_lines_line_ends_and_a_mark_at_the_start_are_no_rows(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n\n  \n{"prompt": "y"}')
    found = scan(path)
    assert [(row.line, row.custom_id) for row in found.rows()] == [(1, "row-1"), (4, "row-4")]
    assert (found.num_rows, found.line_of("row-4"), found.line_of("row-2")) == (2, 4, None)
    assert [row.line for row in found.rows(done={1})] == [4]


def test_a_shared_custom_id_names_both_lines(write_rows):
    path = write_rows(
        [{"custom_id": "a", "prompt": "x"}, {"prompt": "x"}, "nonsense", {"custom_id": "a", "prompt": ""}]
    )
    with pytest.raises(BatchError, match="lines 1 and 4 have the same custom_id 'a'"):
        scan(path)
    with pytest.raises(BatchError, match="lines 2 and 3 have the same custom_id 'row-3'"):
        scan(write_rows([{"prompt": "x"}, {"custom_id": "row-3", "prompt": "x"}, "nonsense"]))


def test_bad_rows_are_counted_and_the_first_few_kept(write_rows):
    found = scan(write_rows([*["nonsense"] * 9, {"prompt": "x"}]))
    assert (found.num_rows, found.num_bad) == (10, 9)
    assert [row.line for row in found.bad_rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_input_without_rows(tmp_path, text):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(BatchError, match="has no rows"):
        scan(tmp_path / "in.jsonl")


def test_an_input_that_is_no_file(tmp_path):
    with pytest.raises(BatchError, match="must be a file"):
        scan(tmp_path)
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "in.jsonl")


def test_a_line_that_changes_after_the_scan_is_told(write_rows):
    rows = [{"prompt": "x"}, {"prompt": "y"}]
    found = scan(write_rows(rows))
    write_rows([rows[0], {"prompt": "z"}])
    with pytest.raises(BatchError, match="changed while the job ran, at line 2"):
        list(found.rows())
    write_rows([*rows, rows[0]])
    with pytest.raises(BatchError, match="at line 3"):
        list(found.rows())


ROWS = '{"prompt": "x"}\n{"prompt": "y"}\n'
OTHER_KINDS = {
    "UTF-16": ROWS.encode("utf-16"),
    "UTF-16, big": b"\xfe\xff" + ROWS.encode("utf-16-be"),
    "UTF-16 or UTF-32": ROWS.encode("utf-16-le"),
    "UTF-16 or": ROWS.encode("utf-32"),
    "gzip": gzip.compress(ROWS.encode()),
    "xz": lzma.compress(ROWS.encode()),
    "bzip2": bz2.compress(ROWS.encode()),
    "a ZIP archive": b"PK\x03\x04rest",
    "a Parquet file": b"PAR1rest",
    "JSON array": json.dumps([{"prompt": "x"}]).encode(),
    "one JSON array": json.dumps([{"prompt": "x"}], indent=1).encode(),
    "one JSON object": b'\xef\xbb\xbf{\n "prompt": "x"\n}\n',
    "separator ','": b'prompt,max_tokens\n"Hello, you",5\n',
    "a JSON text sequence, whose records begin with byte 0x1E": b'\x1e{"prompt": "x", "max_tokens": 5}\n',
    "separator ';'": b"prompt;max_tokens\nHello;5\n",
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_file_of_another_kind_is_told_by_its_start(tmp_path, kind):
    path = tmp_path / "in.jsonl"
    path.write_bytes(OTHER_KINDS[kind])
    with pytest.raises(BatchError, match=f"{kind.partition(', big')[0]}.*one JSON object a line"):
        scan(path)


@pytest.mark.parametrize("first", ["[1, 2]", "nonsense, and more", '"a"', "5", "{", ""])
def test_a_bad_first_row_is_a_bad_row(write_rows, first):
    found = scan(write_rows([first, {"prompt": "x"}])) if first != "{" else scan(write_rows([{"prompt": "x"}, first]))
    assert found.num_rows == 2 - (not first)
    assert found.num_bad == bool(first)


def test_a_missing_extra_is_told_with_its_line(write_rows, monkeypatch):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    plain = write_rows([{"prompt": "x"}, chat])
    needing = {
        "regex": {"prompt": "x", "guided_regex": "a+"},
        "format": {
            "custom_id": "a",
            "url": "/v1/completions",
            "body": {"prompt": "x", "response_format": {"type": "json_object"}},
        },
        "tools": {**chat, "tool_choice": "required"},
    }
    paths = [write_rows([{"prompt": "x"}, "nonsense", row], f"{name}.jsonl") for name, row in needing.items()]
    assert [scan(path).num_rows for path in (plain, *paths)] == [2, 3, 3, 3]
    monkeypatch.setattr(input, "has_structured", lambda: False)
    assert scan(plain).num_rows == 2
    for path in paths:
        with pytest.raises(BatchError, match=r"line 3: structured output .* \S*\[structured\]'"):
            scan(path)
