"""Exceptions as the errors that clients are told."""

import contextlib
import traceback
from collections.abc import Iterator

import msgspec
from starlette.exceptions import HTTPException

from jaxinfer.api.async_engine import EngineDeadError
from jaxinfer.engine.memory import OutOfMemoryError
from jaxinfer.engine.scheduler import QueueFullError, RequestTooLargeError
from jaxinfer.openai.errors import RequestError
from jaxinfer.sampling.params import SamplingParamsError
from jaxinfer.server.api_error import APIError, failed, unavailable
from jaxinfer.text import ChatTemplateError, TextTooLongError
from jaxinfer.text.messages import MessageError

OWN_FIELDS = (
    *(msgspec.MsgspecError, SamplingParamsError, RequestError, MessageError),
    *(TextTooLongError, RequestTooLargeError),
)


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
    return failed(error)


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
