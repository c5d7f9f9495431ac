"""Errors of a row, of the whole job, and of the disk."""

from jaxinfer.openai.errors import RequestError


class RowError(RequestError):
    """A row is invalid. `parameter` is the name of the field, if one is the reason."""


class BatchError(ValueError):
    """The job cannot run; no file was changed."""


class BatchWriteError(RuntimeError):
    """Results could not be written; the rows written before are complete, and the job can be resumed."""
