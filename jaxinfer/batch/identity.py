"""Which job a file of results belongs to: kept in a small file beside it, compared before a job goes on."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.results import write_atomically

FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """Everything that the answers depend on, and where the errors go, relative to the results."""

    input_sha256: str
    rows: int
    errors: str
    model_sha256: str
    seed: int
    params: dict[str, Any]
    format: int = FORMAT

    @property
    def job_id(self) -> str:
        """Names the job in the ids of its answers."""
        return hashlib.sha256(json.dumps({**asdict(self), "errors": ""}, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """As it is read back."""
        return json.loads(json.dumps(asdict(self)))

    def write(self, path: Path, model: str) -> None:
        """`model`, its name, is for people: a checkpoint may move. Raises BatchWriteError."""
        write_atomically(path, json.dumps({**asdict(self), "model": model, "job_id": self.job_id}, indent=2) + "\n")


def read_identity(path: Path) -> dict[str, Any] | None:
    """What `write` wrote, or None where there is no such file. Raises BatchError for one that cannot be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BatchError(f"{path} cannot be read: {error}") from None
    if not isinstance(stored, dict) or "format" not in stored:
        raise BatchError(f"{path} is not a batch's job file")
    return stored
