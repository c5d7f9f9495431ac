"""Lines: what is a row, and how a line that is none is told."""

import json

import pytest

from jaxinfer.batch.rows import BadRow, BatchRow, parse_row

CHAT = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}}


def test_the_three_forms():
    for record, form in (
        (CHAT, "chat"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}, "completions"),
        ({"custom_id": "a", "prompt": "x"}, "plain"),
        ({"custom_id": "a", "messages": [{"role": "user", "content": "hi"}]}, "plain"),
    ):
        row = parse_row(json.dumps(record).encode(), 7)
        assert isinstance(row, BatchRow), row
        assert (row.custom_id, row.request.form, row.line, row.number) == ("a", form, 7, 6)


def test_a_plain_row_is_named_by_its_line():
    assert parse_row(b'{"prompt": "x"}', 3).custom_id == "row-3"


@pytest.mark.parametrize(
    ("line", "message", "custom_id"),
    [
        (b"nonsense", "not JSON: Expecting value at character 1", "row-2"),
        (b'{"prompt": "x"', "not JSON", "row-2"),
        (b'{"prompt": "\xff"}', "not UTF-8 text: byte 12 is 0xff", "row-2"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is not allowed", "row-2"),
        (b'{"prompt": "x", "prompt": "y"}', "'prompt' is given twice", "row-2"),
        (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "not valid JSON", "row-2"),
        (b"[" * 100_000, "nested too deeply", "row-2"),
        (b"[1]", "must be a JSON object, got list", "row-2"),
        (b"{}", '"prompt" or "messages"', "row-2"),
        (b'{"custom_id": 3, "prompt": "x"}', "custom_id must be a non-empty string", "row-2"),
        (b'{"custom_id": "", "prompt": "x"}', "custom_id must be a non-empty string", "row-2"),
        (json.dumps({**CHAT, "custom_id": None}).encode(), "custom_id must be a non-empty string", "row-2"),
        (json.dumps({k: v for k, v in CHAT.items() if k != "custom_id"}).encode(), "custom_id is missing", "row-2"),
        (json.dumps({**CHAT, "method": "GET"}).encode(), "method must be POST, got 'GET'", "a"),
        (json.dumps({**CHAT, "url": "/v1/rerank"}).encode(), "url must be /v1/chat/completions or", "a"),
        (json.dumps({**CHAT, "url": ["x"]}).encode(), "url must be", "a"),
        (json.dumps({**CHAT, "body": "x"}).encode(), "body must be an object", "a"),
        (json.dumps({**CHAT, "seed": 1}).encode(), "unknown field 'seed' beside the body; known are custom_id", "a"),
        (json.dumps({**CHAT, "methods": "POST"}).encode(), "'methods' beside the body: did you mean 'method'?", "a"),
        (json.dumps({**CHAT, "url": "/v1/chat/completion"}).encode(), "did you mean '/v1/chat/completions'?", "a"),
        (b'{"promt": "x"}', "unknown field 'promt': did you mean 'prompt'?", "row-2"),
        (b'{"message": []}', "unknown field 'message': did you mean 'messages'?", "row-2"),
        (b'{"prompt": "x", "customid": "a"}', "unknown field 'customid': did you mean 'custom_id'?", "row-2"),
        (b'{"prompt": "x", "temprature": 1}', "unknown field 'temprature': did you mean 'temperature'?", "row-2"),
    ],
)
def test_a_line_that_cannot_be_served_keeps_its_name_where_it_has_one(line, message, custom_id):
    row = parse_row(line, 2)
    assert isinstance(row, BadRow)
    assert message in str(row.error)
    assert row.custom_id == custom_id
