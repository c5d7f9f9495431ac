"""Random requests for a server, good and bad, and what an answer to each must look like."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving_client import Answer, Event, request_bytes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_FINISHES = {"stop", "length"}
_WORDS = ["def", "read", "write", "the", "file", "path", "return", "None", "if", "else", "for", "in", "data", "ü"]


class WrongAnswerError(Exception):
    """An answer that is not as it should be."""


@dataclass
class Request:
    """A valid request that generates; `body` has a seed and no `stream`."""

    path: str
    body: dict[str, Any]

    def encoded(self, stream: bool) -> bytes:
        return json.dumps({**self.body, "stream": stream}).encode()

    @property
    def num_choices(self) -> int:
        prompt = self.body.get("prompt")
        num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        return num_prompts * self.body.get("n", 1)


Choices = list[list[Any]]
"""Text, token ids where they are asked for, and the reason of the end, of each choice."""


def random_request(generator: random.Random, max_model_len: int, vocab_size: int) -> Request:
    """A request for one of the four routes that generate."""
    path = generator.choice((COMPLETIONS, COMPLETIONS, CHAT, CHAT, MESSAGES, RESPONSES))
    max_tokens = min(int(2 ** generator.uniform(0, 5.5)), max_model_len // 3)
    body: dict[str, Any] = {"seed": generator.randrange(2**32)}
    room = max_model_len - max_tokens - 64
    if path == COMPLETIONS:
        body |= {"prompt": _prompt(generator, room, vocab_size), "max_tokens": max_tokens, "return_token_ids": True}
    elif path == RESPONSES:
        body |= {"input": _text(generator, room // 8), "max_output_tokens": max_tokens}
    else:
        turns = [{"role": "user", "content": _text(generator, room // 24)}]
        if generator.random() < 0.3:
            turns += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": _text(generator, 9)}]
        body |= {"messages": turns, "max_tokens": max_tokens}
    if generator.random() < 0.2:
        body["cache_salt"] = generator.choice("abc")
    body |= _parameters(generator, path, vocab_size)
    if path == CHAT:
        body["return_token_ids"] = True
    return Request(path, body)


def _text(generator: random.Random, max_words: int) -> str:
    num_words = min(int(2 ** generator.uniform(0, 10 if generator.random() < 0.05 else 6.5)), max(max_words, 1))
    return " ".join(generator.choices(_WORDS, k=num_words))


def _prompt(generator: random.Random, room: int, vocab_size: int) -> Any:
    kind = generator.random()
    if kind < 0.4:
        return _text(generator, room // 4)
    if kind < 0.8:
        num_tokens = room if generator.random() < 0.05 else min(int(2 ** generator.uniform(0, 7)), room)
        return [generator.randrange(5, vocab_size) for _ in range(num_tokens)]
    return [_text(generator, 20) for _ in range(generator.randint(1, 3))]


def _parameters(generator: random.Random, path: str, vocab_size: int) -> dict[str, Any]:
    ids = [generator.randrange(vocab_size // 2, vocab_size) for _ in range(generator.randint(4, 40))]
    stops = [generator.randrange(5, vocab_size // 2) for _ in range(3)]
    found: dict[str, Any] = {"temperature": generator.choice((0, 0.5, 1.0, 1.5))}
    shared = {"top_p": (0.5, 0.95), "top_k": (1, 5, 50)}
    own: dict[str, Sequence[Any]] = {
        "min_p": (0.05, 0.3),
        "presence_penalty": (-0.5, 0.7),
        "frequency_penalty": (-0.5, 0.5),
        "repetition_penalty": (0.9, 1.3),
        "logit_bias": ({str(one): generator.uniform(-5, 5) for one in ids},),
        "allowed_token_ids": (ids,),
        "bad_words": (["self", "de"],),
        "stop": ("e", ["a", "zz"], ["\n"]),
        "stop_token_ids": (stops,),
        "include_stop_str_in_output": (True,),
        "min_tokens": (1,),
        "ignore_eos": (True,),
        "skip_special_tokens": (False,),
        "truncate_prompt_tokens": (10,),
        "priority": (-1,),  # a higher number waits for ever while the queue is full of others
        "user": ("x",),
        "n": (2, 3),
        "echo": (True,),
    }
    if path in (COMPLETIONS, CHAT):
        shared |= own
    if path == CHAT:
        del shared["echo"]
    for name in generator.sample(sorted(shared), generator.randint(0, min(4, len(shared)))):
        found[name] = generator.choice(shared[name])
    if "n" in found:
        found["temperature"] = 1.0  # greedy answers are all the same, and refused
    if path == COMPLETIONS and generator.random() < 0.25:
        found["logprobs"] = generator.choice((0, 1, 5, 20))
    if path == CHAT and generator.random() < 0.25:
        found |= {"logprobs": True, "top_logprobs": generator.choice((0, 1, 5, 20))}
    if path in (COMPLETIONS, CHAT) and generator.random() < 0.05:
        found["prompt_logprobs"] = generator.choice((0, 3))
    return found


def can_stream(request: Request) -> bool:
    """Log-probabilities of a prompt are not streamed."""
    body = request.body
    return "prompt_logprobs" not in body and not (body.get("echo") and "logprobs" in body)


def can_resume(request: Request) -> bool:
    return request.path in (COMPLETIONS, CHAT) and can_stream(request)


# Answers.


def read_answer(request: Request, answer: Answer) -> Choices:
    """The choices of an answer that was not streamed. Raises WrongAnswerError."""
    body = answer.json
    if request.path == MESSAGES:
        found = [
            ["".join(part.get("text", part.get("thinking", "")) for part in body["content"]), [], body["stop_reason"]]
        ]
        used, length = body["usage"]["output_tokens"], request.body["max_tokens"]
    elif request.path == RESPONSES:
        texts = [part["text"] for item in body["output"] for part in item.get("content", ())]
        found = [["".join(texts), [], body["status"]]]
        used, length = body["usage"]["output_tokens"], request.body["max_output_tokens"]
    else:
        found = [[_content(one), one["token_ids"], one["finish_reason"]] for one in body["choices"]]
        used, length = body["usage"]["completion_tokens"], request.body["max_tokens"] * request.num_choices
        _check_lists(request, body["choices"])
        _require(used == sum(len(one[1]) for one in found), f"usage says {used} tokens")
        _require(body["usage"]["total_tokens"] == used + body["usage"]["prompt_tokens"], "the sum of usage")
    _require(0 <= used <= length, f"{used} tokens of at most {length}")
    return _checked(request, found)


def _content(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice["message"].get("reasoning_content") or "") + choice["message"]["content"]


def _check_lists(request: Request, choices: list[dict[str, Any]]) -> None:
    for choice in choices:
        logprobs, num_tokens = choice["logprobs"], len(choice["token_ids"])
        _require((logprobs is not None) == ("logprobs" in request.body), "log-probabilities")
        if logprobs is not None and not request.body.get("echo"):
            entries = logprobs["content"] if request.path == CHAT else logprobs["token_logprobs"]
            _require(len(entries) == num_tokens, f"{len(entries)} log-probabilities of {num_tokens} tokens")


class StreamedAnswer:
    """The choices of a stream, put together from its events."""

    def __init__(self, request: Request):
        self._request, self._choices = request, dict[int, list[Any]]()
        self.has_ended = False
        self.last_id: str | None = None

    def add(self, event: Event) -> None:
        """Raises WrongAnswerError for an error event, or one after the last."""
        _require(not self.has_ended, "there is an event after the last one")
        self.last_id = event.id or self.last_id
        data = event.data
        if data is None:
            self.has_ended = True
            return
        _require("error" not in data and data.get("type") != "error", f"an error event: {data}")
        if self._request.path == MESSAGES:
            self._add_message(data)
        elif self._request.path == RESPONSES:
            self._add_response(data)
        for choice in data.get("choices", ()):
            one = self._choices.setdefault(choice["index"], ["", [], None])
            delta = choice.get("delta", choice)
            one[0] += delta.get("text", "") + delta.get("reasoning_content", "") + delta.get("content", "")
            one[1] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                _require(one[2] is None, "a choice ends twice")
                one[2] = choice["finish_reason"]

    def _add_message(self, data: dict[str, Any]) -> None:
        one = self._choices.setdefault(0, ["", [], None])
        one[0] += data.get("delta", {}).get("text", "") + data.get("delta", {}).get("thinking", "")
        if data["type"] == "message_delta":
            one[2] = data["delta"]["stop_reason"]
        self.has_ended = data["type"] == "message_stop"

    def _add_response(self, data: dict[str, Any]) -> None:
        one = self._choices.setdefault(0, ["", [], None])
        if data["type"].endswith(".delta"):
            one[0] += data["delta"]
        if data["type"] in ("response.completed", "response.incomplete"):
            self.has_ended, one[2] = True, data["response"]["status"]

    def choices(self) -> Choices:
        """Raises WrongAnswerError if the stream has not ended as it should."""
        _require(self.has_ended, "the stream ends too early")
        return _checked(self._request, [self._choices[index] for index in sorted(self._choices)])


def _checked(request: Request, found: Choices) -> Choices:
    _require(len(found) == request.num_choices, f"{len(found)} choices, not {request.num_choices}")
    ends = {MESSAGES: {"end_turn", "max_tokens", "stop_sequence"}, RESPONSES: {"completed", "incomplete"}}
    for one in found:
        _require(one[2] in ends.get(request.path, _FINISHES), f"the reason of the end is {one[2]!r}")
    return found


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise WrongAnswerError(why)


# What no client should send.


@dataclass
class BadRequest:
    """Bytes to be sent, and the statuses that may be the answer; 0 for a closed connection."""

    kind: str
    data: bytes
    statuses: Sequence[int] = (400,)


def bad_request(generator: random.Random) -> BadRequest:
    """A request that must be refused."""
    kinds = {**_BAD_BODIES, **_BAD_BYTES}
    kind = generator.choice(sorted(kinds))
    if kind in _BAD_BYTES:
        data, statuses = _BAD_BYTES[kind]
        return BadRequest(kind, data, statuses)
    path, body = _BAD_BODIES[kind]
    if isinstance(body, dict):
        if path is None:
            path = generator.choice((COMPLETIONS, CHAT))
            base = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
            body = {"max_tokens": 2, **base, **body}
        body = json.dumps({**body, "stream": generator.random() < 0.5}).encode()
    return BadRequest(
        kind, request_bytes("POST", path or COMPLETIONS, body), (404,) if kind == "unknown model" else (400,)
    )


_BAD_BODIES: dict[str, tuple[str | None, dict[str, Any] | bytes]] = {
    "no JSON": (COMPLETIONS, b"prompt=a&max_tokens=3"),
    "half of a body": (CHAT, b'{"messages": [{"role": "user", "con'),
    "not UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe\x80"}'),
    "lone surrogates": (COMPLETIONS, b'{"prompt": "\\ud800", "max_tokens": 1'),
    "a list": (COMPLETIONS, b"[1, 2]"),
    "nested deeply": (COMPLETIONS, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "a number beyond all": (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}'),
    "not a number": (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'),
    "an integer beyond 64 bits": (COMPLETIONS, b'{"prompt": "a", "seed": 123456789012345678901234567890}'),
    "empty messages": (CHAT, {"messages": []}),
    "a message without a role": (CHAT, {"messages": [{"content": "a"}]}),
    "messages of another type": (CHAT, {"messages": "a"}),
    "an empty list of prompts": (COMPLETIONS, {"prompt": []}),
    "mixed prompts": (COMPLETIONS, {"prompt": ["a", 3, None]}),
    "ids beyond the vocabulary": (COMPLETIONS, {"prompt": [2**31 - 1]}),
    "negative ids": (COMPLETIONS, {"prompt": [-1]}),
    "too long a prompt": (COMPLETIONS, {"prompt": "word " * 30_000}),
    "max_tokens below zero": (None, {"max_tokens": -1}),
    "more tokens than fit": (None, {"max_tokens": 2**40}),
    "a billion answers": (None, {"n": 10**9}),
    "no answers": (None, {"n": 0}),
    "a text for a number": (None, {"temperature": "warm"}),
    "a negative temperature": (None, {"temperature": -1.0}),
    "many log-probabilities": (COMPLETIONS, {"prompt": "a", "logprobs": 10**6}),
    "log-probabilities of nothing": (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}),
    "a bias of a word": (None, {"logit_bias": {"word": 1}}),
    "a bias beyond the vocabulary": (None, {"logit_bias": {"99999999": 1}}),
    "thousands of biases": (None, {"logit_bias": {str(one): 1.0 for one in range(3000)}}),
    "thousands of stops": (None, {"stop": ["x"] * 5 + [str(one) for one in range(5000)]}),
    "an empty stop": (None, {"stop": [""]}),
    "no allowed ids": (None, {"allowed_token_ids": [2**31 - 1]}),
    "a high priority": (None, {"priority": 2**40}),
    "a long salt": (None, {"cache_salt": "x" * 5000}),
    "an unknown field": (None, {"frobnicate": 1}),
    "an unknown field of a tool": (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"kind": "f"}]}),
    "unknown model": (None, {"model": "gpt-9"}),
    "an unknown format": (None, {"response_format": {"type": "xml"}}),
    "a pattern that does not parse": (None, {"structured_outputs": {"regex": "(a"}}),
    "an image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    "a message without a limit": (MESSAGES, {"messages": [{"role": "user", "content": "a"}]}),
    "a message of a system": (MESSAGES, {"messages": [{"role": "robot", "content": "a"}], "max_tokens": 3}),
    "an unknown item": (RESPONSES, {"input": [{"type": "computer_call"}]}),
    "an earlier response": (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
    "ids of another type": ("/detokenize", {"tokens": ["a"]}),
    "huge ids": ("/detokenize", {"tokens": [2**31 - 1]}),
    "a prompt and messages": ("/tokenize", {"prompt": "a", "messages": []}),
}
_BAD_BYTES: dict[str, tuple[bytes, Sequence[int]]] = {
    "a form": (request_bytes("POST", COMPLETIONS, b"prompt=a", {"content-type": "text/plain"}), (415,)),
    "no content type": (request_bytes("POST", COMPLETIONS, b"{}", {"content-type": ""}), (415,)),
    "no body": (request_bytes("POST", CHAT, b"", {"content-type": "application/json"}), (400,)),
    "an unknown route": (request_bytes("GET", "/v2/models"), (404,)),
    "a path with dots": (request_bytes("GET", "/v1/../../etc/passwd"), (404,)),
    "another method": (request_bytes("DELETE", CHAT), (405,)),
    "a wrong host": (request_bytes("GET", "/v1/models", b"", {"host": "example.org"}), (403,)),
    "a large header": (request_bytes("GET", "/v1/models", b"", {"x-large": "x" * 60_000}), (400, 431, 0)),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3 + b"\r\n\r\n", (400, 0)),
    "a wrong length": (request_bytes("POST", COMPLETIONS, b"{}", {"content-length": "x"}), (400, 0)),
    "a negative length": (request_bytes("POST", COMPLETIONS, b"{}", {"content-length": "-5"}), (400, 0)),
    "a huge length": (request_bytes("POST", COMPLETIONS, b"{}", {"content-length": str(2**40)}), (413,)),
    "two lengths": (
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 9\r\n\r\n{}",
        (400, 0),
    ),
    "a wrong chunk": (
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        (400, 0),
    ),
    "an unknown event": (
        request_bytes("POST", COMPLETIONS, b'{"prompt": "a", "stream": true}', {"last-event-id": "1.2.3"}),
        (400,),
    ),
}
