"""The errors that reading, converting and writing checkpoints raise."""

from pathlib import Path

_NUM_LISTED = 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written. The message names file and tensor, with the numbers.

    Attributes:
      problems: everything found wrong, one sentence each; the message shows the first twenty.
    """

    def __init__(self, where: str | Path, *problems: str):
        self.problems = problems
        if len(problems) <= 1:
            message = ": ".join([str(where), *problems])
        else:
            shown = [f"\n  - {problem}" for problem in problems[:_NUM_LISTED]]
            left_out = len(problems) - len(shown)
            rest = f"\n  - and {left_out} more" if left_out else ""
            message = f"{where}: {len(problems)} problems" + "".join(shown) + rest
        super().__init__(message)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint under that name: a missing directory, an unknown hub id, or one that could not be fetched."""
