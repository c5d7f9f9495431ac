"""Lines of the results: OpenAI's objects for rows in OpenAI's batch form, plain ones for plain rows, and errors."""

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.batch.errors import RowError
from jaxinfer.batch.input import BatchRow
from jaxinfer.batch.requests import BatchRequest

if TYPE_CHECKING:
    from jaxinfer.engine.request import CompletionOutput, RequestOutput, TokenLogprob
    from jaxinfer.sampling import SamplingParams
    from jaxinfer.text import Tokenizer
    from jaxinfer.tool_calls import ToolCall

_BYTE = re.compile("<0x[0-9A-F]{2}>")
LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def result_line(
    row: BatchRow,
    outputs: Sequence["RequestOutput"],
    params: "SamplingParams",
    *,
    job_id: str,
    model: str,
    fingerprint: str,
    tokenizer: "Tokenizer | None",
) -> dict[str, Any]:
    """The line of a successful row; `outputs` has one entry for each of its prompts."""
    request = row.request
    if request.form == "plain":
        return _plain_line(row, outputs[0], params)
    answer_id = _hashed(job_id, row.custom_id)
    is_chat = request.form == "chat"
    if is_chat:
        choices = [_chat_choice(one, params, request) for one in outputs[0].outputs]
    else:
        choices = _completions_choices(request, outputs, params, tokenizer)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model or model,
        "system_fingerprint": f"fp_{fingerprint[:12]}",
        "choices": choices,
        "usage": usage(outputs),
        "seed": params.seed,
    }
    if is_chat and request.return_token_ids:
        body["prompt_token_ids"] = outputs[0].prompt_token_ids
    if is_chat and outputs[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_entries(outputs[0], params)
    return _line(row.custom_id, answer_id, 200, body, None)


def error_line(
    line: int, custom_id: str, error: Exception, *, job_id: str, status_code: int = 400, is_plain: bool = False
) -> dict[str, Any]:
    """The line of a failed row, in the form of its answer."""
    parameter = error.parameter if isinstance(error, RowError) else getattr(error, "parameter", None)
    if is_plain:
        what = {"message": str(error), "param": parameter, "line": line}
        return {"custom_id": custom_id, "outputs": [], "error": what}
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": parameter, "code": None}}
    summary = {"code": kind, "message": str(error), "line": line}
    return _line(custom_id, _hashed(job_id, custom_id), status_code, body, summary)


def usage(outputs: Sequence["RequestOutput"]) -> dict[str, int]:
    """Numbers of tokens, counted as by OpenAI: a prompt once, for any number of answers."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def usage_of_line(record: Mapping[str, Any]) -> Mapping[str, int]:
    """The usage in a line of either form; {} if it has none."""
    if "outputs" in record:
        return record.get("usage") or {}
    return ((record.get("response") or {}).get("body") or {}).get("usage") or {}


def _line(custom_id: str, answer_id: str, status_code: int, body: Any, error: Any) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": f"req_{answer_id}", "body": body}
    return {"id": f"batch_req_{answer_id}", "custom_id": custom_id, "response": response, "error": error}


def _hashed(job_id: str, custom_id: str) -> str:
    return hashlib.sha256(f"{job_id} {custom_id}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _plain_line(row: BatchRow, output: "RequestOutput", params: "SamplingParams") -> dict[str, Any]:
    request = row.request
    source = {"prompt": request.prompts[0]} if request.messages is None else {"messages": request.messages}
    answers = []
    for one in output.outputs:
        left_out = {"logprobs", "error", "tool_calls", *(() if one.reasoning else ("reasoning",))}
        answer = {name: value for name, value in vars(one).items() if name not in left_out}
        if one.tool_calls is not None:
            answer["tool_calls"] = [vars(call) for call in one.tool_calls]
        if one.logprobs is not None:
            answer["cumulative_logprob"] = _finite(one.cumulative_logprob or 0.0)
            answer["logprobs"] = [token_entry(entry, params.logprobs or 0) for entry in one.logprobs]
        else:
            del answer["cumulative_logprob"]
        answers.append(answer)
    record = {"custom_id": row.custom_id, **source, "outputs": answers, "usage": usage([output])}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = prompt_entries(output, params)
    return {**record, "error": None}


# Choices.


def _chat_choice(answer: "CompletionOutput", params: "SamplingParams", request: BatchRequest) -> dict[str, Any]:
    logprobs = None
    if answer.logprobs is not None:
        entries = [token_entry(entry, params.logprobs or 0) for entry in answer.logprobs]
        logprobs = {"content": entries, "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message |= {"content": answer.text or None, "tool_calls": call_entries(answer.tool_calls)}
    choice = {
        "index": answer.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": "tool_calls" if answer.tool_calls and answer.finish_reason == "stop" else answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    return {**choice, "token_ids": answer.token_ids} if request.return_token_ids else choice


def call_entries(calls: Sequence["ToolCall"]) -> list[dict[str, Any]]:
    """Calls of tools as in OpenAI's chat API."""
    return [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in calls
    ]


def _completions_choices(
    request: BatchRequest, outputs: Sequence["RequestOutput"], params: "SamplingParams", tokenizer: "Tokenizer | None"
) -> list[dict[str, Any]]:
    choices = []
    for prompt, output in zip(request.prompts, outputs, strict=True):
        before = ""
        if request.echo:
            before = prompt if isinstance(prompt, str) else _decoded(prompt, tokenizer, params.skip_special_tokens)
        for answer in output.outputs:
            logprobs = None
            if answer.logprobs is not None:
                logprobs = _completions_logprobs(output, answer, params, before if request.echo else None, tokenizer)
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": before + answer.text,
                "logprobs": logprobs,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            if request.return_token_ids:
                choice |= {"token_ids": answer.token_ids, "prompt_token_ids": output.prompt_token_ids}
            if params.prompt_logprobs is not None and not (request.echo and params.logprobs is not None):
                choice["prompt_logprobs"] = prompt_entries(output, params)
            choices.append(choice)
    return choices


def _decoded(ids: Sequence[int], tokenizer: "Tokenizer | None", skip_special_tokens: bool) -> str:
    if tokenizer is None:
        raise RowError("echo of token ids needs a tokenizer, and this model has none", "echo")
    return tokenizer.decode(ids, skip_special_tokens)


# Log-probabilities.


def token_entry(entry: "TokenLogprob", num_top: int) -> dict[str, Any]:
    """A token as in OpenAI's chat API, with its id and rank; `top_logprobs` are the `num_top` most probable ones."""
    every = [
        {
            "token": _text(token, one.decoded_token),
            "token_id": token,
            "logprob": _finite(one.logprob),
            "rank": one.rank,
            "bytes": None if one.token_bytes is None else list(one.token_bytes),
        }
        for token, one in entry.items()
    ]
    best = sorted((one for one in every if one["rank"] <= num_top), key=lambda one: one["rank"])
    return {**every[0], "top_logprobs": best}


def prompt_entries(output: "RequestOutput", params: "SamplingParams") -> list[dict[str, Any] | None]:
    entries = output.prompt_logprobs or []
    return [None if entry is None else token_entry(entry, params.prompt_logprobs or 0) for entry in entries]


def _completions_logprobs(
    output: "RequestOutput",
    answer: "CompletionOutput",
    params: "SamplingParams",
    prompt: str | None,
    tokenizer: "Tokenizer | None",
) -> dict[str, Any]:
    lists = LogprobLists(tokenizer, params.skip_special_tokens)
    if prompt is not None:
        lists.add_prompt(prompt, output, params)
    for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True):
        lists.add(token, entry, params.logprobs or 0)
    return lists.take()


class LogprobLists:
    """OpenAI's four lists of completions; with echo they begin with the prompt's tokens, of which the first has no
    log-probability.

    Offsets are where tokens begin in the choice's text, in characters, from `offset` on. Parts of a character have the
    place of that character, and a token that the text leaves out that of what follows.
    """

    def __init__(self, tokenizer: "Tokenizer | None", skip_special_tokens: bool = True, offset: int = 0):
        self._tokenizer, self._skips, self._offset = tokenizer, skip_special_tokens, offset
        self._prompt: str | None = None  # of which tokens are added
        self._start_text()
        self._start()

    def add_prompt(self, text: str, output: "RequestOutput", params: "SamplingParams") -> None:
        """Adds the prompt's tokens, whose text the choice begins with."""
        self._prompt = text
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            self.add(token, entry, params.prompt_logprobs or 0)
        self._prompt, self._offset = None, len(text)
        self._start_text()

    def _start_text(self) -> None:
        from jaxinfer.text import StreamingDetokenizer

        self._detokenizer = None if self._tokenizer is None else StreamingDetokenizer(self._tokenizer)
        self._held = b""

    def _start(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token: int, entry: "TokenLogprob | None", num_top: int) -> None:
        """Adds a token with its `num_top` most probable ones."""
        if entry is None:
            decoded = None if self._tokenizer is None else self._tokenizer.decode([token], False)
            self._append(token, decoded, None, None)
            return
        shown = token_entry(entry, num_top)
        best: dict[str, float] = {}
        for one in [*shown["top_logprobs"], shown]:  # OpenAI includes the chosen token
            if one is shown and any(other["token_id"] == shown["token_id"] for other in shown["top_logprobs"]):
                continue
            # Two ids can have the same text, if they are parts of characters.
            best[one["token"] if one["token"] not in best else _text(one["token_id"], None)] = one["logprob"]
        self._append(token, entry[token].decoded_token, shown["logprob"], best)

    def _append(self, token: int, decoded: str | None, logprob: float | None, best: dict[str, float] | None) -> None:
        self._tokens.append(_text(token, decoded))
        self._token_logprobs.append(logprob)
        self._top_logprobs.append(best)
        self._offsets.append(self._place(token, decoded or ""))

    def _place(self, token: int, own: str) -> int:
        """The place where a token with this text of its own begins; moves on to its end."""
        before, tokenizer, is_whole = self._offset, self._tokenizer, "\ufffd" not in own
        if tokenizer is None or self._detokenizer is None or not tokenizer.has_id(token):
            text = own if is_whole and tokenizer is None else ""
        elif token in tokenizer.special_ids:
            is_shown = not self._skips if self._prompt is None else self._prompt.startswith(own, before)
            text = own if is_shown else ""
        else:
            text = self._detokenizer.add(token) if self._detokenizer.is_incremental else own
        self._offset += len(text)
        if not is_whole or not text.endswith(own):
            return before + self._num_held_chars(token, text)
        self._held = b""
        start = len(text) - len(own)  # before it, the end of other tokens' character, or a space that is trimmed alone
        if tokenizer is not None and text[:start].endswith(" "):
            start -= (tokenizer.id_to_token(token) or "").startswith("▁")
        return before + start

    def _num_held_chars(self, token: int, text: str) -> int:
        """Characters that are complete before this byte of a run whose text comes as a whole (`<0xE4>`: byte
        fallback)."""
        if text or self._tokenizer is None:
            self._held = b""
            return 0
        num_before, piece = len(self._held.decode(errors="ignore")), self._tokenizer.id_to_token(token) or ""
        if _BYTE.fullmatch(piece):
            self._held += bytes.fromhex(piece[3:5])
        return num_before

    def take(self) -> dict[str, Any]:
        """The lists of what was added since the last call; offsets go on from it."""
        lists = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._offsets,
        }
        self._start()
        return lists


def _text(token: int, decoded: str | None) -> str:
    return f"token_id:{token}" if decoded is None else decoded


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
