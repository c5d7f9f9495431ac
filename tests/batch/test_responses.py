"""What is written: OpenAI's objects, plain ones, errors."""

import pytest

from jaxinfer.engine.request import CompletionOutput
from jaxinfer.openai.writer import LOWEST_LOGPROB
from jaxinfer.sampling.seeds import derive_seed, sample_seed
from jaxinfer.tool_calls import AnswerFormat

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def serve(write_rows, run, outcome, tmp_path):
    """The record of one row."""

    def serve(row, **options):
        run(write_rows([row]), **options)
        return next(iter(outcome(tmp_path).values()))

    return serve


@pytest.fixture
def serve_body(serve):
    def serve_body(**body):
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        record = serve({"custom_id": "a", "url": url, "body": body})
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        return record["response"]["body"]

    return serve_body


def test_a_chat_completion(serve_body):
    body = serve_body(messages=MESSAGES, model="m", max_tokens=5, n=2, user="me")
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["seed"]) == ("chat.completion", "m", derive_seed(0, 0))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    first, second = (choice["message"] for choice in body["choices"])
    assert first["role"] == "assistant"
    assert len(first["content"]) == 5
    assert first["content"] != second["content"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"] is None
    used = body["usage"]
    assert (used["completion_tokens"], used["total_tokens"]) == (10, used["prompt_tokens"] + 10)
    assert "token_ids" not in body["choices"][0]


def test_token_ids_are_given_where_they_are_asked_for(serve_body):
    body = serve_body(messages=MESSAGES, max_tokens=3, return_token_ids=True)
    assert len(body["choices"][0]["token_ids"]) == 3
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])


def test_chat_logprobs(serve_body):
    body = serve_body(messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=1)
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == body["choices"][0]["message"]["content"]
    assert (content[0]["logprob"], content[0]["bytes"]) == (-0.5, [ord(content[0]["token"])])
    assert [one["token"] for one in content[0]["top_logprobs"]] == ["#"]
    assert content[0]["top_logprobs"][0]["logprob"] == LOWEST_LOGPROB  # JSON has no infinity


def test_completions_of_several_prompts_are_numbered_on(serve_body):
    body = serve_body(prompt=["x", [120, 121]], max_tokens=4, n=2, return_token_ids=True)
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[120]] * 2 + [[120, 121]] * 2
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}


def test_equal_prompts_of_a_row_differ_unless_it_gives_a_seed(serve_body, tmp_path):
    def texts(**more):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        return [choice["text"] for choice in serve_body(prompt=["x", "x"], **more)["choices"]]

    assert len(set(texts())) == 2
    assert len(set(texts(seed=3))) == 1


def test_echo_and_completions_logprobs(serve_body):
    body = serve_body(prompt="abc", max_tokens=2, logprobs=1, echo=True)
    choice = body["choices"][0]
    assert choice["text"].startswith("abc")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][1:] == list(choice["text"][1:])
    assert logprobs["tokens"][0] == "token_id:97"  # this model has no tokenizer to say what it is
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["top_logprobs"][3]) == {"#", logprobs["tokens"][3]}
    assert logprobs["text_offset"] == [0, 0, 1, 3, 4]  # where tokens are in the text, as far as it is known
    assert "prompt_logprobs" not in choice


def test_prompt_logprobs_where_they_are_asked_for(serve_body):
    choice = serve_body(prompt="abc", max_tokens=1, prompt_logprobs=0)["choices"][0]
    assert [entry and entry["token"] for entry in choice["prompt_logprobs"]] == [None, "b", "c"]


def test_a_plain_answer(serve):
    record = serve({"prompt": "abc", "max_tokens": 2, "n": 2, "logprobs": 0})
    assert (record["custom_id"], record["prompt"], record["error"]) == ("row-1", "abc", None)
    seed = derive_seed(0, 0)
    assert [answer["seed"] for answer in record["outputs"]] == [seed, sample_seed(seed, 1)]
    answer = record["outputs"][0]
    assert "".join(map(chr, answer["token_ids"])) == answer["text"]
    assert (answer["finish_reason"], answer["cumulative_logprob"]) == ("length", -1.0)
    assert record["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert "logprobs" not in serve({"prompt": "abc"}, overwrite=True)["outputs"][0]


def test_a_plain_chat_keeps_its_messages(serve):
    assert serve({"messages": MESSAGES, "max_tokens": 2})["messages"] == MESSAGES


@pytest.mark.parametrize(
    ("row", "status_code", "kind", "parameter", "message"),
    [
        ({"prompt": "x", "top_p": 2}, 400, "invalid_request_error", "top_p", "top_p must be"),
        ({"prompt": "x" * 90}, 400, "invalid_request_error", "prompt", "90 prompt tokens are too many"),
        (
            {"messages": [{**MESSAGES[0], "content": "refuse"}]},
            400,
            "invalid_request_error",
            "messages",
            "template refuses",
        ),
        ({"prompt": "broken"}, 500, "server_error", None, "the logits hold NaN"),
    ],
)
def test_an_error_line(serve, row, status_code, kind, parameter, message):
    url = "/v1/chat/completions" if "messages" in row else "/v1/completions"
    record = serve({"custom_id": "row-1", "url": url, "body": row})
    assert record["custom_id"] == "row-1"
    assert record["response"]["status_code"] == status_code
    body = record["response"]["body"]["error"]
    assert (body["type"], body["param"]) == (kind, parameter)
    assert message in body["message"]
    assert record["error"] == {"code": kind, "message": body["message"], "line": 1}
    plain = serve(row, overwrite=True)
    assert plain.keys() == {"custom_id", "outputs", "error"}
    assert (plain["error"]["param"], plain["error"]["line"]) == (parameter, 1)
    assert message in plain["error"]["message"]


def test_echo_of_ids_without_a_tokenizer_is_that_rows_error(serve):
    record = serve({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": [1, 2], "echo": True}})
    assert record["response"]["body"]["error"]["param"] == "echo"


def test_calls_of_tools_are_apart_from_the_text(serve, fake_llm):
    text = 'Yes.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    llm = fake_llm()
    llm.answer_format = AnswerFormat(None, "hermes")
    llm._completion = lambda ids, params, index: CompletionOutput(index, text, [5], 7, "stop")
    body = {"model": "m", "messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}
    row = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    (choice,) = serve(row, llm=llm)["response"]["body"]["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Yes.", "tool_calls")
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})


def test_a_plain_row_has_the_calls_too(serve, fake_llm):
    llm = fake_llm()
    llm.answer_format = AnswerFormat(None, "llama3_json")
    text = '{"name": "f", "parameters": {}}'
    llm._completion = lambda ids, params, index: CompletionOutput(index, text, [5], 7, "stop")
    row = {"custom_id": "a", "messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}
    (answer,) = serve(row, llm=llm)["outputs"]
    assert (answer["text"], answer["finish_reason"]) == ("", "stop")
    assert [(call["name"], call["arguments"]) for call in answer["tool_calls"]] == [("f", "{}")]
