"""Tables and texts as inputs: what becomes a row, what a prompt is made of, and what is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxinfer.batch import BatchError
from jaxinfer.batch.input import scan
from jaxinfer.batch.job import Defaults
from jaxinfer.batch.rows import BadRow
from jaxinfer.batch.table import TableOptions
from jaxinfer.sampling.params import SamplingParams
from tests.batch.conftest import FakeLLM

TABLE = [
    {"id": 1, "text": "eins", "note": "a, b"},
    {"id": 2, "text": 'zwei "Zeilen"\nlang', "note": ""},
    {"id": 3, "text": "  drei", "note": "ü"},
]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def csv_text(separator=",", end="\r\n"):
    """The table as a spreadsheet writes it."""

    def cell(value):
        text = str(value)
        return '"' + text.replace('"', '""') + '"' if set(text) & set(separator + '"\n') else text

    lines = [list(TABLE[0]), *(row.values() for row in TABLE)]
    return "".join(separator.join(map(cell, line)) + end for line in lines)


def write_kind(path):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(TABLE), path)
        return path
    return write(path, csv_text("\t" if path.suffix == ".tsv" else ","))


def prompts(path, **options):
    rows = list(scan(path, TableOptions(**options)).rows())
    assert not [row.error for row in rows if isinstance(row, BadRow)]
    return [row.request.text.prompts[0] if row.request.text.prompts else row.request.text.messages for row in rows]


@pytest.mark.parametrize("name", ["in.csv", "in.TSV", "in.parquet"])
def test_one_table_has_the_same_rows_in_every_form(tmp_path, name):
    path = write_kind(tmp_path / name) if name != "in.TSV" else write(tmp_path / name, csv_text("\t"))
    assert prompts(path, prompt_column="text") == [row["text"] for row in TABLE]
    assert prompts(path, prompt="{id}: {text} {{{note}}}") == [
        "1: eins {a, b}",
        '2: zwei "Zeilen"\nlang {}',
        "3:   drei {ü}",
    ]
    found = list(scan(path, TableOptions(prompt="x {text}", keep=("note", "id"))).rows())
    assert [(row.line, row.custom_id, row.number) for row in found] == [
        (1, "row-1", 0),
        (2, "row-2", 1),
        (3, "row-3", 2),
    ]
    assert [list(row.columns) for row in found] == [["note", "id"]] * 3
    history = prompts(path, prompt_column="text", chat=True)
    assert history[0] == [{"role": "user", "content": "eins"}]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_line_ends_and_a_mark_at_the_start(tmp_path, separator, end):
    path = write(tmp_path / "in.csv", b"\xef\xbb\xbf" + csv_text(separator, end).encode())
    assert prompts(path, prompt_column="text") == [row["text"] for row in TABLE]
    assert prompts(path, prompt_column="id") == ["1", "2", "3"]  # the first name has no mark


def test_lines_of_a_text_are_prompts(tmp_path):
    path = write(tmp_path / "in.txt", b"\xef\xbb\xbf one\r\n\n  \ntwo, {x}")
    found = scan(path)
    assert [(row.line, row.request.text.prompts) for row in found.rows()] == [(1, (" one",)), (4, ("two, {x}",))]
    assert prompts(path, prompt="say {prompt}") == ["say  one", "say two, {x}"]


def test_blank_rows_are_left_out_and_counted(tmp_path):
    path = write(tmp_path / "in.csv", "\n\nprompt,b\nx,1\n\n,\n , \ny,2\n,,\n")
    assert [(row.line, row.custom_id) for row in scan(path).rows()] == [(1, "row-1"), (5, "row-5")]
    one = write(tmp_path / "one.csv", 'prompt\nx\n""\ny\n')
    assert [row.line for row in scan(one).rows()] == [1, 3]


def test_bad_rows_say_why(tmp_path):
    path = write(tmp_path / "in.csv", "custom_id,prompt,b\na,,1\nb,x\nc,x,y,z\n,x,\n")
    found = list(scan(path).rows())
    assert [(row.line, row.custom_id) for row in found] == [(1, "a"), (2, "row-2"), (3, "row-3"), (4, "row-4")]
    assert [str(row.error) for row in found[:3]] == [
        "the cell of prompt is empty",
        "the row has 2 cells, and the first line names 3 columns",
        "the row has 4 cells, and the first line names 3 columns",
    ]
    two = list(scan(path, TableOptions(prompt="{prompt}{b}")).rows())
    assert two[0].request.text.prompts == ("1",)  # one of two cells is enough


def test_cells_of_parquet_files(tmp_path):
    import datetime
    from decimal import Decimal

    row = {
        "custom_id": 7,
        "flag": True,
        "number": 0.5,
        "nothing": None,
        "nan": float("nan"),
        "list": [1, 2],
        "day": datetime.date(2026, 1, 2),
        "money": Decimal("1.50"),
        "bytes": b"text",
        "messages": [{"role": "user", "content": "hi"}],
        "image": b"\xff\xd8",
    }
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    template = "{flag} {number} {nothing}{nan} {list} {day} {money} {bytes}"
    assert prompts(path, prompt=template) == ["true 0.5  [1, 2] 2026-01-02 1.50 text"]
    assert prompts(path, prompt_column="list") == [[1, 2]]
    assert prompts(path, prompt_column="messages", chat=True) == [row["messages"]]
    (kept,) = scan(path, TableOptions(prompt="{day}", keep=[*set(row) - {"image"}])).rows()
    assert kept.custom_id == "7"
    json.dumps(kept.columns, allow_nan=False)
    for options, message in [
        ({"prompt_column": "messages"}, "--chat"),
        ({"prompt_column": "nothing"}, "the cell of nothing is empty"),
        ({"prompt": "{image}"}, "the cell of image is bytes"),
    ]:
        (bad,) = scan(path, TableOptions(**options)).rows()
        assert message in str(bad.error)


COLUMNS = "its columns are 'id', 'text', 'note'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, f"no column 'prompt': {COLUMNS}.*--prompt-column NAME.*--prompt 'Translate"),
        ({"prompt_column": "txt"}, f"--prompt-column: .*no column 'txt': did you mean 'text'. I{COLUMNS[1:]}"),
        ({"prompt": "{title}"}, f"--prompt: .*no column 'title': .*{COLUMNS}"),
        ({"prompt": "{text}", "keep": ["x"]}, f"--keep: .*no column 'x': {COLUMNS}"),
        ({"prompt": "hello"}, f"the same for every row.*{COLUMNS}"),
        ({"prompt": "{text} }"}, "a single '}' at character 8: a brace of the text is '}}'"),
        ({"prompt": "{ {text}"}, "a single '{' at character 1"),
        ({"prompt": "{text!r}"}, "no column 'text!r'"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_are_not_there(tmp_path, kind, options, message):
    with pytest.raises(BatchError, match=message):
        scan(write_kind(tmp_path / f"in.{kind}"), TableOptions(**options))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([b"\xff\xfe"]).view(pa.string()), "in.parquet cannot be read .* 'utf-8' codec can't decode"),
        (pa.array([10**8], pa.date32()), "in.parquet cannot be read .* out of range"),
    ],
    ids=["text", "date"],
)
def test_cells_that_are_damaged(tmp_path, column, message):
    pq.write_table(pa.table({"prompt": column}), tmp_path / "in.parquet")
    with pytest.raises(BatchError, match=message):
        scan(tmp_path / "in.parquet")


def test_two_ways_to_say_the_prompt():
    with pytest.raises(BatchError, match="exclude each other"):
        TableOptions(prompt_column="a", prompt="{b}")


@pytest.mark.parametrize("name", ["prompt_column", "prompt", "chat", "keep"])
def test_options_of_tables_with_json_lines(write_rows, name):
    values = {"prompt_column": "a", "prompt": "{a}", "chat": True, "keep": ["a"]}
    with pytest.raises(BatchError, match=f"--{name.replace('_', '-')} .*is for tables, whose names end in .csv"):
        scan(write_rows([{"prompt": "x"}]), TableOptions(**{name: values[name]}))


FILES = [
    ("in.csv", "prompt\nx\n".encode("utf-16"), "UTF-16"),
    ("in.csv", b"PK\x03\x04rest", "a ZIP archive, as spreadsheets are"),
    ("in.csv", b"PAR1rest", "a Parquet file: name it .parquet"),
    ("in.csv", b"", "has no rows"),
    ("in.csv", b"prompt,b\n", "has no rows"),
    ("in.csv", "prompt\nx\nMäuse\n".encode("cp1252"), "line 3 is not UTF-8 text: it has the byte 0xe4"),
    ("in.csv", b'prompt,b\n"x"y,1\n', "line 2 is not CSV with the separator ','"),
    ("in.csv", b'prompt,b\n"x,1\n', "is not CSV with the separator ',': unexpected end"),
    ("in.csv", b"prompt,b,prompt\nx,1,2\n", "2 columns 'prompt'"),
    ("in.csv", b"custom_id,prompt\na,x\nb,x\na,y\n", "rows 1 and 3 have the same custom_id 'a'"),
    ("in.csv", b'{"prompt": "x", "max_tokens": 3}\n', "one JSON object a line: name it in.jsonl"),
    ("in.txt", b'\n{"messages": []}\n', "one JSON object a line: name it in.jsonl"),
    ("in.txt", "x\nMäuse\n".encode("cp1252"), "line 2 is not UTF-8 text"),
    ("in.txt", b"\n \n", "has no rows"),
    ("in.parquet", b"prompt\nx\n", "cannot be read as a Parquet file"),
    ("in.parquet", b"PAR1" + b"x" * 50 + b"PAR1", "cannot be read as a Parquet file"),
]


@pytest.mark.parametrize(("name", "data", "message"), FILES, ids=lambda value: str(value)[:30])
def test_files_that_are_not_what_their_name_says(tmp_path, name, data, message):
    with pytest.raises(BatchError, match=message):
        scan(write(tmp_path / name, data))


def test_a_file_that_is_not_there(tmp_path):
    for name in ("in.csv", "in.txt", "in.parquet"):
        with pytest.raises(FileNotFoundError):
            scan(tmp_path / name)


def test_long_cells_are_read(tmp_path):
    text = "word " * 100_000
    assert prompts(write(tmp_path / "in.csv", f'prompt,b\n"{text}",1\n')) == [text]


def test_parquet_without_its_extra(tmp_path, monkeypatch):
    path = write_kind(tmp_path / "in.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(BatchError, match=r"in.parquet needs pyarrow: .*\[parquet\]'"):
        scan(path)


@pytest.mark.parametrize("kind", ["csv", "parquet", "txt"])
def test_a_row_that_changes_after_the_scan_is_told(tmp_path, kind):
    def save(texts):
        path = tmp_path / f"in.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"prompt": texts}), path)
        else:
            write(path, "\n".join(texts if kind == "txt" else ["prompt", *texts]))
        return path

    found = scan(save(["x", "y"]))
    save(["x", "z"])
    unit = "line" if kind == "txt" else "row"
    with pytest.raises(BatchError, match=f"changed while the job ran, at {unit} 2"):
        list(found.rows())


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_job_goes_on_and_its_rows_keep_their_columns(tmp_path, run, outcome, fake_llm, kind):
    path = write_kind(tmp_path / f"in.{kind}")
    options = {"prompt": "say {text}", "keep": ["note"]}
    run(path, **options)
    whole = outcome(tmp_path)
    assert {name: (one["prompt"], one["columns"]["note"]) for name, one in whole.items()} == {
        f"row-{i}": (f"say {row['text']}", row["note"]) for i, row in enumerate(TABLE, 1)
    }
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(lines[0] + lines[1][:9])  # a kill
    assert run(path, llm=fake_llm(order=2), **options).resumed == 1
    assert outcome(tmp_path) == whole
    with pytest.raises(BatchError, match=r"prompt of the table \(was say \{text\}, is tell \{text\}\)"):
        run(path, **{**options, "prompt": "tell {text}"})
    with pytest.raises(BatchError, match="keep of the table"):
        run(path, prompt="say {text}")


def test_rows_that_fail_keep_their_columns(tmp_path, run, records):
    path = write(tmp_path / "in.csv", "prompt,n\nx,1\n,2\nrefuse,3\nbroken,4\n")
    assert run(path, keep=["n"], chat=True).failed == 3
    found = {one["columns"]["n"]: one["error"]["message"] for one in records(tmp_path / "out.errors.jsonl")}
    assert found == {
        "2": "the cell of prompt is empty",
        "3": "the chat template refuses this",
        "4": "the logits hold NaN",
    }


def test_chats_of_a_table_have_as_many_tokens_as_fit(tmp_path):
    path = write(tmp_path / "in.csv", "prompt\nx\n")
    for chat, expected in ((True, None), (False, 16)):
        (row,) = scan(path, TableOptions(chat=chat)).rows()
        model = FakeLLM()
        for given, tokens in ((None, expected), ({"max_tokens": 5}, 5)):
            bound = Defaults.of(SamplingParams(), given, 0).bind(row, model, model.answer_format)
            assert bound.params.max_tokens == tokens


def test_answers_are_not_written_to_a_table(tmp_path, run, write_rows):
    with pytest.raises(BatchError, match=r"out.csv: answers are written as JSON lines, so name it out.jsonl"):
        run(write_rows([{"prompt": "x"}]), tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()
    assert run(tmp_path / "in.jsonl", tmp_path / "out.txt").ok == 1
