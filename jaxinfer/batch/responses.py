"""Lines of the results: OpenAI's objects for rows in OpenAI's batch form, plain ones for plain rows, and errors."""

import hashlib
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
                logprobs = _completions_logprobs(output, answer, params, request.echo, tokenizer)
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
    echo: bool,
    tokenizer: "Tokenizer | None",
) -> dict[str, Any]:
    lists = LogprobLists(tokenizer)
    if echo:
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            lists.add(token, entry, params.prompt_logprobs or 0)
    for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True):
        lists.add(token, entry, params.logprobs or 0)
    return lists.take()


class LogprobLists:
    """OpenAI's four lists of completions; with echo they begin with the prompt's tokens, of which the first has no
    log-probability. Offsets are in characters, from `offset` on."""

    def __init__(self, tokenizer: "Tokenizer | None", offset: int = 0):
        self._tokenizer, self._offset = tokenizer, offset
        self._start()

    def _start(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []

    def add(self, token: int, entry: "TokenLogprob | None", num_top: int) -> None:
        """Adds a token with its `num_top` most probable ones."""
        if entry is None:
            decoded = None if self._tokenizer is None else self._tokenizer.decode([token], False)
            self._append(_text(token, decoded), None, None)
            return
        shown = token_entry(entry, num_top)
        best: dict[str, float] = {}
        for one in [*shown["top_logprobs"], shown]:  # OpenAI includes the chosen token
            if one is shown and any(other["token_id"] == shown["token_id"] for other in shown["top_logprobs"]):
                continue
            # Two ids can have the same text, if they are parts of characters.
            best[one["token"] if one["token"] not in best else _text(one["token_id"], None)] = one["logprob"]
        self._append(shown["token"], shown["logprob"], best)

    def _append(self, token: str, logprob: float | None, best: dict[str, float] | None) -> None:
        self._tokens.append(token)
        self._token_logprobs.append(logprob)
        self._top_logprobs.append(best)

    def take(self) -> dict[str, Any]:
        """The lists of what was added since the last call; offsets go on from it."""
        offsets = []
        for token in self._tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        lists = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": offsets,
        }
        self._start()
        return lists


def _text(token: int, decoded: str | None) -> str:
    return f"token_id:{token}" if decoded is None else decoded


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
