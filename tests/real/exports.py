"""Other forms of the published models, each written once for all tests of a session, and what is read of them."""

from pathlib import Path

from typer.testing import CliRunner

from checkpoints_convert import convert
from jaxinfer import LLM
from jaxinfer.cli.main import app


def dense(path: Path, folder: Path) -> Path:
    """A GGUF file as a Hugging Face checkpoint with the same weights in float32, at `folder`."""
    if not folder.exists():
        convert(path, folder, to="huggingface", dtype="float32", requantize="dense", progress=None)
    return folder


def command(*arguments: object) -> str:
    """The text that a command of jaxinfer printed."""
    found = CliRunner().invoke(app, [*map(str, arguments)])
    assert found.exit_code == 0, found.stderr
    return found.stdout


def log_probs(llm: LLM, ids: list[int]) -> list[float]:
    """Log-probabilities of each token of a text but the first, given those before it."""
    return llm.score([ids[:1]], [ids[1:]], use_tqdm=False)[0].raw


def mean_loss(llm: LLM, ids: list[int]) -> float:
    """Nats per token."""
    found = log_probs(llm, ids)
    return -sum(found) / len(found)
