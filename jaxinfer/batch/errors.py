"""What can go wrong: with a row, with the whole job, with the disk."""


class RowError(ValueError):
    """A row cannot be served. `parameter` names the field at fault, if one is."""

    def __init__(self, message: str, parameter: str | None = None):
        super().__init__(message)
        self.parameter = parameter


class BatchError(ValueError):
    """The job cannot run; nothing was changed."""


class BatchWriteError(RuntimeError):
    """Results could not be written; the rows written before are whole and the job can be resumed."""
