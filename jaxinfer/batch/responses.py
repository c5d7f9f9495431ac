"""Lines of the results: OpenAI's objects for rows in OpenAI's batch form, plain ones for plain rows, and errors."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxinfer.batch.input import BatchRow
from jaxinfer.openai import writer
from jaxinfer.openai.requests import BoundRequest
from jaxinfer.openai.responses import ResponseWriter
from jaxinfer.openai.writer import embeddings, finite, prompt_entries, token_entry, usage

if TYPE_CHECKING:
    import numpy as np

    from jaxinfer.engine.request import RequestOutput
    from jaxinfer.text import Tokenizer


def result_line(
    row: BatchRow,
    request: BoundRequest,
    outputs: Sequence["RequestOutput"],
    *,
    job_id: str,
    model: str,
    fingerprint: str,
    tokenizer: "Tokenizer | None",
    coordinates: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The line of a successful row; `outputs` has one entry for each of its prompts. `coordinates`: of its answers, for
    the line. Raises RequestError."""
    told = {} if coordinates is None else {"coordinates": coordinates}
    if row.is_plain:
        return _plain_line(row, request, outputs[0]) | told
    answer_id, form = _hashed(job_id, row.custom_id), row.request.form
    prefix = {"chat": "chatcmpl-", "completions": "cmpl-"}.get(form, "")
    about = {"id": f"{prefix}{answer_id}", "created": int(time.time()), "model": request.asked.model or model}
    if form == "responses":
        body = ResponseWriter(row.request.body, request, about, tokenizer).whole(outputs[0])
        return _line(row.custom_id, answer_id, 200, msgspec.to_builtins(body), None) | told
    else:
        about["system_fingerprint"] = f"fp_{fingerprint[:12]}"
        if form == "chat":
            body = writer.chat_completion(request, outputs[0], about, coordinates=coordinates)
        else:
            body = writer.completion(request, outputs, about, tokenizer, coordinates=coordinates)
    return _line(row.custom_id, answer_id, 200, msgspec.to_builtins(body), None)


def embeddings_line(
    row: BatchRow, vectors: "np.ndarray", num_tokens: int, *, job_id: str, model: str
) -> dict[str, Any]:
    """The line of a successful row of embeddings."""
    body = embeddings(vectors, num_tokens, row.request.body, row.request.text.model or model)
    return _line(row.custom_id, _hashed(job_id, row.custom_id), 200, msgspec.to_builtins(body), None)


def error_line(
    line: int, custom_id: str, error: Exception, *, job_id: str, status_code: int = 400, is_plain: bool = False
) -> dict[str, Any]:
    """The line of a failed row, in the form of its answer."""
    parameter, code = getattr(error, "parameter", None), getattr(error, "code", None)
    if is_plain:
        what = {"message": str(error), "param": parameter, "line": line}
        return {"custom_id": custom_id, "outputs": [], "error": what}
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": parameter, "code": code}}
    summary = {"code": kind, "message": str(error), "line": line}
    return _line(custom_id, _hashed(job_id, custom_id), status_code, body, summary)


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


def _plain_line(row: BatchRow, request: BoundRequest, output: "RequestOutput") -> dict[str, Any]:
    asked, params = request.asked, request.params
    source = {"prompt": asked.prompts[0]} if asked.messages is None else {"messages": asked.messages}
    answers = []
    for completion in output.outputs:
        left_out = {
            "logprobs",
            "error",
            "excludes_itself",
            "tool_calls",
            "weights",
            *(() if completion.reasoning else ("reasoning",)),
        }
        answer = {name: value for name, value in vars(completion).items() if name not in left_out}
        if completion.speculation is not None:
            answer["speculation"] = vars(completion.speculation)
        if len(completion.weights) > 1:
            answer["weights"] = [vars(span) for span in completion.weights]
        if completion.tool_calls is not None:
            answer["tool_calls"] = [vars(call) for call in completion.tool_calls]
        if completion.logprobs is not None:
            answer["cumulative_logprob"] = finite(completion.cumulative_logprob or 0.0)
            answer["logprobs"] = msgspec.to_builtins(
                [token_entry(entry, params.logprobs or 0) for entry in completion.logprobs]
            )
        else:
            del answer["cumulative_logprob"]
        answers.append(answer)
    counted = msgspec.to_builtins(usage([output]))
    record = {"custom_id": row.custom_id, **source, "outputs": answers, "usage": counted}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = msgspec.to_builtins(prompt_entries(output, params))
    return {**record, "error": None}
