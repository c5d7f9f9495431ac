"""Errors of a row, of the whole job, and of the disk."""


class RowError(ValueError):
    """A row is invalid. `parameter` is the name of the field, if one is the reason."""

    def __init__(self, message: str, parameter: str | None = None):
        super().__init__(message)
        self.parameter = parameter


class BatchError(ValueError):
    """The job cannot run; no file was changed."""


class BatchWriteError(RuntimeError):
    """Results could not be written; the rows written before are complete, and the job can be resumed."""
