"""Bodies: every field is applied or refused by name."""

import pytest

from jaxinfer.batch.rows import read_plain, read_row_body
from jaxinfer.grammar.structured import StructuredOutputs

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


VALUES = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 4,
    "stop": ["a"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 6,
    "min_tokens": 1,
    "prompt_logprobs": 2,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["b"],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}


def read_chat(body):
    return read_row_body("chat", body).text


def read_completions(body):
    return read_row_body("completions", body).text


def plain(record):
    return read_plain(record).text


def test_sampling_fields_pass_in_every_form():
    assert plain({"prompt": "x", **VALUES, "structured": {"regex": "a"}}).sampling == {
        **VALUES,
        "structured": StructuredOutputs(regex="a"),
    }
    assert read_completions({"prompt": "x", **VALUES, "best_of": 2}).sampling == VALUES
    assert read_chat({"messages": MESSAGES, **VALUES}).sampling == VALUES


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ("x",)),
        (["x", "y"], ("x", "y")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["x", [3]], ("x", [3])),
    ],
)
def test_prompts_of_a_completions_body(prompt, prompts):
    assert read_completions({"prompt": prompt}).prompts == prompts


def test_null_is_not_given_in_openai_bodies():
    nothing = dict.fromkeys(("temperature", "logprobs", "max_tokens", "stream", "suffix", "user"))
    assert read_completions({"prompt": "x", **nothing}).sampling == {}
    chat = read_chat({"messages": MESSAGES, **{k: v for k, v in nothing.items() if k != "suffix"}})
    assert (chat.sampling, chat.tools) == ({}, None)
    assert plain({"prompt": "x", "max_tokens": None}).sampling == {"max_tokens": None}  # as many as fit


def test_chat_has_names_of_its_own():
    assert read_chat({"messages": MESSAGES, "max_completion_tokens": 5}).sampling == {"max_tokens": 5}
    assert read_chat({"messages": MESSAGES, "logprobs": True}).sampling == {"logprobs": 0}
    assert read_chat({"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}).sampling == {"logprobs": 3}
    assert read_chat({"messages": MESSAGES, "logprobs": False}).sampling == {}


def test_tools_are_checked_before_the_model_is_loaded():
    read = read_chat({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    assert (read.tools, read.tool_choice, read.parallel_tool_calls) == (TOOLS, "required", False)
    assert plain({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}).tool_choice == "none"


@pytest.mark.parametrize(
    ("read", "body", "parameter", "message"),
    [
        (read_chat, {"stream": True}, "stream", "a batch does not stream"),
        (read_chat, {"response_format": {"type": "yaml"}}, "response_format", "or json_schema, not 'yaml'"),
        (read_chat, {"metadata": 1}, "metadata", "Expected `object"),
        (read_chat, {"response_format": {"type": "json_schema"}}, "response_format", "a schema"),
        (read_chat, {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "say the same"),
        (read_chat, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (read_chat, {"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "must be 'none'"),
        (read_chat, {"tools": [*TOOLS, *TOOLS]}, "tools", "two tools"),
        (read_chat, {"tools": TOOLS, "parallel_tool_calls": 2}, "parallel_tool_calls", "Expected `bool"),
        (read_chat, {"functions": [{}]}, "functions", "not supported"),
        (read_chat, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differ"),
        (read_chat, {"logprobs": 3}, "logprobs", "Expected `bool"),
        (read_chat, {"top_logprobs": 3}, "top_logprobs", '"logprobs": true'),
        (read_chat, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
        (read_chat, {"echo": True}, "echo", "echo=True is not supported"),
        (read_chat, {"messages": []}, "messages", "at least one"),
        (read_chat, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools cannot be one of"),
        (read_chat, {"model": 3}, "model", "Expected `str"),
        (read_completions, {"prompt": []}, "prompt", "got \\[\\]"),
        (read_completions, {"prompt": [1, "x"]}, "prompt", "must be a text, token ids"),
        (read_completions, {"prompt": [7, True]}, "prompt", "has True at position 1, which is no token id"),
        (read_completions, {"prompt": ["x", [1.0]]}, "prompt", "^prompt\\[1\\]: the prompt has 1.0 at position 0"),
        (read_plain, {"prompt": [1.0]}, "prompt", "has 1.0 at position 0, which is no token id"),
        (read_plain, {"prompt": [None]}, "prompt", "has None at position 0, which is no token id"),
        (read_completions, {"echo": 1}, "echo", "Expected `bool"),
        (read_completions, {"suffix": "x"}, "suffix", "not supported"),
        (read_completions, {"best_of": 3}, "best_of", "not supported"),
        (read_completions, {"messages": MESSAGES}, "messages", "unknown field 'messages'"),
        (read_plain, {"prompt": ["x", "y"]}, "prompt", "a text or a list of token ids"),
        (read_plain, {"model": "m"}, "model", "unknown field 'model'"),
        (read_plain, {"max_tokns": 1}, "max_tokns", "did you mean 'max_tokens'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(read, body, parameter, message):
    needed = {"messages": MESSAGES} if read is read_chat else {"prompt": "x"}
    with pytest.raises(ValueError, match=message) as caught:
        read({**needed, **body})
    assert caught.value.parameter == parameter


def test_what_a_plain_row_leaves_empty_is_not_given():
    empty = {"response_format": {}, "guided_choice": [], "n": None, "ignore_eos": None, "structured_outputs": None}
    assert plain({"prompt": "x", **empty}) == plain({"prompt": "x"})


@pytest.mark.parametrize("field", ["functions", "stream_options", "audio", "service_tier", "metadata", "best_of"])
@pytest.mark.parametrize("value", [None, {}])
def test_what_a_row_leaves_empty_is_not_given(field, value):
    if (field, value) != ("best_of", {}):
        assert read_chat({"messages": MESSAGES, field: value}) == read_chat({"messages": MESSAGES})
    assert read_chat({"messages": MESSAGES, "metadata": {"a": "b"}, "best_of": 1}) == read_chat({"messages": MESSAGES})
