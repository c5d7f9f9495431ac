"""The record of one request, for the log, the metrics and the traces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.engine.request import RequestOutput, RequestTimings
from jaxinfer.sampling.params import SamplingParams

RECORD = "jaxinfer.record"  # the key of the request's record in the ASGI scope


@dataclass
class Record:
    """One request, for the log, the metrics and the traces.

    Attributes:
      request_id: the client's or ours. key: the name of its API key, "" for none. route: the template of its path.
      is_admin: whether that is an admin key. num_bytes: of the body.
      model: the name of the one that answers, "" before that is known. adapter: of the one that it answers with.
      load_seconds: that the request waited for the model to be loaded.
      is_large: whether work on the body is done outside of the event loop. timings: in the engine, of each prompt.
      sent_tokens: behind the body, of each choice the token ids that its client has. None for none.
      received_seconds: from the request's arrival until it was queued; `queued_seconds` and `first_token_seconds` count
        from then. trace_context: the client's W3C headers.
    """

    request_id: str
    method: str = ""
    start: float = 0.0
    route: str = "other"
    key: str = ""
    is_admin: bool = False
    model: str = ""
    adapter: str = ""
    num_bytes: int = 0
    status: int = 0
    is_stream: bool = False
    is_large: bool = False
    sent_tokens: Sequence[tuple[int, ...]] | None = None
    prompt: str | None = None
    seed: int | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    finish_reasons: Sequence[str] = ()
    params: SamplingParams | None = None
    trace_context: Mapping[str, str] = field(default_factory=dict)
    load_seconds: float = 0.0
    received_seconds: float = 0.0
    queued_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float = 0.0
    has_left: bool = False
    timings: Sequence[RequestTimings] = ()

    def end(self, outputs: Sequence[RequestOutput]) -> None:
        """All answers have ended."""
        self.num_cached = sum(output.num_cached_tokens for output in outputs)
        self.timings = tuple(output.timings for output in outputs if output.timings is not None)
        self.finish_reasons = tuple(answer.finish_reason or "" for output in outputs for answer in output.outputs)

    def facts(self) -> dict[str, Any]:
        """The line of the log."""
        known = {
            "id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "key": self.key or None,
            "model": self.model or None,
            "adapter": self.adapter or None,
            "seconds": round(self.total_seconds, 4),
            "stream": self.is_stream or None,
            "prompt_tokens": self.num_prompt or None,
            "cached_tokens": self.num_cached or None,
            "output_tokens": self.num_output or None,
            "finish_reasons": self.finish_reasons or None,
            "load_seconds": round(self.load_seconds, 4) or None,
            "queued_seconds": None if self.queued_seconds is None else round(self.queued_seconds, 4),
            "first_token_seconds": None if self.first_token_seconds is None else round(self.first_token_seconds, 4),
            "seed": self.seed,
            "left": self.has_left or None,
            "prompt": self.prompt,
        }
        return {name: value for name, value in known.items() if value is not None}
