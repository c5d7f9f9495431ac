"""Which job a file of results belongs to: kept in a small file beside it, compared before a job goes on."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.results import write_atomically

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

FORMAT = 1
_NUM_SAMPLED = 16  # values of each of three rows of each array
_PROBE = "Ünïcode, 12345  spaces\n\ttabs; <|endoftext|> 你好"


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


def model_fingerprint(llm: "LLM", max_model_len: int) -> str:
    """SHA-256 over the configuration, every parameter's name, shape, dtype and some of its values, and the tokenizer.

    Three rows' first values of each array tell checkpoints of one architecture apart without reading all weights.
    """
    import jax
    import numpy as np

    from jaxinfer.quantization.tree import is_quantized, weights

    digest = hashlib.sha256()
    digest.update(repr((llm.config, sorted(llm.eos_token_ids), max_model_len)).encode())
    engine = llm.engine
    if engine.kv_dtype != engine.dtype.name:  # what is stored is not what was computed
        digest.update(f"kv_dtype={engine.kv_dtype}".encode())
        for scales in jax.tree.leaves(engine.kv_scales):
            digest.update(np.asarray(scales).tobytes())
    schemes = [leaf.scheme for leaf in weights(llm.params) if is_quantized(leaf)]
    if schemes:
        digest.update(repr(schemes).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(llm.params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        for row in _sampled_rows(leaf):
            digest.update(np.asarray(row).tobytes())
    if (tokenizer := llm.tokenizer) is not None:
        parts = (tokenizer.token_map_digest(), tokenizer.chat_template, tokenizer.encode(_PROBE))
        digest.update(repr(parts).encode())
    return digest.hexdigest()


def _sampled_rows(leaf: Any) -> list[Any]:
    if leaf.ndim == 0:
        return [leaf]
    if leaf.ndim == 1:
        return [leaf[:_NUM_SAMPLED]]
    middle = (0,) * (leaf.ndim - 2)
    return [leaf[(*middle, row)][:_NUM_SAMPLED] for row in (0, leaf.shape[-2] // 2, leaf.shape[-2] - 1)]
