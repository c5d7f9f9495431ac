"""An error that a client is told: a status, a message, and the shapes of bodies that clients expect.

Nothing of an engine is needed for it: a front raises it too.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

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


def failed(error: BaseException) -> APIError:
    """The error itself if it is one of these, else status 500: that is logged, and sent without details."""
    if isinstance(error, APIError):
        return error
    _LOG.error("a request failed", exc_info=error)
    return APIError(500, "the server failed to answer; its log has the reason")
