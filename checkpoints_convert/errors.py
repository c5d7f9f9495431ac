"""The errors that reading, converting and writing checkpoints raise."""

from pathlib import Path

_NUM_LISTED = 20
_MAX_LENGTH = 1500  # characters of a sentence, which may quote what a file holds


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written. The message names file and tensor, with the numbers.

    Attributes:
      problems: everything found wrong, one sentence each; the message shows the first twenty.
    """

    def __init__(self, where: str | Path, *problems: str):
        self.problems = problems
        if len(problems) <= 1:
            message = ": ".join([str(where), *map(shortened, problems)])
        else:
            shown = [f"\n  - {shortened(problem)}" for problem in problems[:_NUM_LISTED]]
            left_out = len(problems) - len(shown)
            rest = f"\n  - and {left_out} more" if left_out else ""
            message = f"{where}: {len(problems)} problems" + "".join(shown) + rest
        super().__init__(message)


def shortened(text: str) -> str:
    """The beginning of a text of many characters, with their number."""
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 100]}... ({len(text)} characters)"


class UnwritableSchemeError(CheckpointError):
    """A quantized parameter that the format to be written cannot express."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint under that name: a missing directory, an unknown hub id, or one that could not be fetched."""


class HubUnreachableError(CheckpointNotFoundError):
    """No connection to the hub."""
