"""Errors of the API: a status, a message, and the two shapes of bodies that clients expect."""

import contextlib
import logging
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxinfer.api.async_engine import EngineDeadError
from jaxinfer.engine.memory import OutOfMemoryError
from jaxinfer.engine.scheduler import QueueFullError, RequestTooLargeError
from jaxinfer.openai.errors import RequestError
from jaxinfer.sampling.params import SamplingParamsError
from jaxinfer.text import ChatTemplateError, TextTooLongError
from jaxinfer.text.messages import MessageError

_LOG = logging.getLogger("jaxinfer.server")
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("service_unavailable", "overloaded_error"),
}  # of OpenAI and of Anthropic
OWN_FIELDS = (
    *(msgspec.MsgspecError, SamplingParamsError, RequestError, MessageError),
    *(TextTooLongError, RequestTooLargeError),
)
_MAX_MESSAGE = 1000  # characters


class APIError(Exception):
    """An answer to a client: an HTTP status, a sentence, the field that it is about, and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        # A message may quote what the client sent: it is cut, and half a surrogate pair cannot be encoded.
        message = message[:_MAX_MESSAGE].encode("utf-8", "replace").decode()
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return self._types[0]

    @property
    def _types(self) -> tuple[str, str]:
        if self.status in _TYPES:
            return _TYPES[self.status]
        return ("server_error", "api_error") if self.status >= 500 else _TYPES[400]

    def openai(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body that Anthropic's clients read."""
        return {"type": "error", "error": {"type": self._types[1], "message": self.message}}

    def response(self, path: str) -> Response:
        """The whole answer, in the shape of the route."""
        body = self.openai()
        if path.startswith("/v1/messages"):
            body = self.anthropic()
        elif path.startswith("/api/"):
            body = {"error": self.message}  # Ollama's
        return Response(msgspec.json.encode(body), self.status, self.headers, "application/json")


def refused(param: str, message: str) -> APIError:
    """Status 400 for a field."""
    return APIError(400, message, param=param)


def invalid_key(is_missing: bool, kind: str = "API") -> APIError:
    """Status 401, for a request without a key, or with an unknown one."""
    told = f"no {kind} key was given: send Authorization: Bearer KEY" if is_missing else f"the {kind} key is not known"
    return APIError(401, told, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def unavailable(message: str, seconds: float) -> APIError:
    """Status 503, to be tried again after some seconds."""
    return APIError(503, message, headers={"retry-after": str(max(1, round(seconds)))})


@contextlib.contextmanager
def client_errors(param: str | None = None) -> Iterator[None]:
    """Within the block, which checks what a client sent, any ValueError or TypeError is the client's: status 400."""
    try:
        yield
    except APIError:
        raise
    except (ValueError, TypeError, ChatTemplateError) as error:
        told = as_api_error(error) if isinstance(error, OWN_FIELDS) else APIError(400, str(error), param=param)
        raise told from error


def as_api_error(error: BaseException) -> APIError:
    """The error that a client gets for any exception. One that is not the client's fault is logged, and sent without
    details."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):  # of Starlette's router
        message = {404: "there is no such route", 405: "this route does not take this method"}.get(error.status_code)
        return APIError(error.status_code, message or error.detail, headers=error.headers)
    if isinstance(error, RecursionError):
        return APIError(400, "the body is nested too deeply")
    if isinstance(error, msgspec.DecodeError):
        return APIError(400, f"the body is not JSON: {error}")
    if isinstance(error, UnicodeDecodeError):
        return APIError(400, "the body is not UTF-8")
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.parameter, code=error.code)
    if isinstance(error, (SamplingParamsError, MessageError)):
        return APIError(400, str(error), param=error.parameter)
    if isinstance(error, (TextTooLongError, RequestTooLargeError)):
        return APIError(400, str(error), code="context_length_exceeded")
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), headers={"retry-after": "1"})
    if isinstance(error, EngineDeadError):
        return unavailable(f"{error}; the server is restarting or going away", 5)
    _LOG.error("a request failed", exc_info=error)
    return APIError(500, "the server failed to answer; its log has the reason")


def load_error(name: str, error: Exception, reason: str) -> APIError:
    """The error for requests that wait for a model that could not be loaded, with the reason in words for clients."""
    status = 503 if isinstance(error, OutOfMemoryError) else 500
    message = f"the model {name!r:.80} could not be loaded: {reason}"
    told = APIError(status, message, param="model", code="model_not_loaded", headers={"retry-after": "10"})
    told.__cause__ = error
    return told


def drop_locals(error: BaseException | None) -> None:
    """Drops the local variables of the frames that a load has left, which hold weights for as long as there is a
    reference to the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
