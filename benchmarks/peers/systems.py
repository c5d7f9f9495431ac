"""The systems by name: how to know whether each is here, and how to open it."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class System(Protocol):
    """A model that is open. Greedy, and no token ends an answer. `close`, where it has one, ends its threads."""

    # Whether the first run of a shape compiles, so that a warm-up has to make whole answers.
    compiles_shapes: bool

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Answers of exactly so many tokens, to requests that come all at once."""
        ...


@dataclass(frozen=True)
class Peer:
    """One way to run a model.

    Attributes:
      package: what must be installed, None for nothing. open: from a checkpoint's folder, a draft's, the number
        of threads, and of some systems options by name. speculates: makes the "pair" row only. needs_gpu,
        own_python: where it runs. keeps_programs: what it compiled serves its next process.
    """

    package: str | None
    open: Callable[..., System]
    speculates: bool = False
    needs_gpu: bool = False
    own_python: bool = False
    keeps_programs: bool = False


def _jaxinfer(**options: Any) -> Callable[..., System]:
    def make(folder: Path, draft: Path | None, num_threads: int, **given: Any) -> System:
        from benchmarks.peers.with_jaxinfer import Jaxinfer

        return Jaxinfer(folder, draft, **options, **given)

    return make


def _transformers(mode: str) -> Callable[[Path, Path | None, int], System]:
    def make(folder: Path, draft: Path | None, num_threads: int) -> System:
        from benchmarks.peers.with_transformers import Continuous, Generate

        if mode == "continuous":
            return Continuous(folder, num_threads)
        return Generate(folder, draft, mode, num_threads)

    return make


def _llama_cpp(folder: Path, draft: Path | None, num_threads: int, **given: Any) -> System:
    from benchmarks.peers.with_llama_cpp import LlamaCpp

    return LlamaCpp(folder, num_threads, **given)


def _easydel(folder: Path, draft: Path | None, num_threads: int) -> System:
    from benchmarks.peers.with_easydel import EasyDeL

    return EasyDeL(folder)


def _vllm(folder: Path, draft: Path | None, num_threads: int) -> System:
    from benchmarks.peers.with_vllm import Vllm

    return Vllm(folder)


PEERS = {
    "jaxinfer": Peer(None, _jaxinfer(), keeps_programs=True),
    "jaxinfer_draft": Peer(None, _jaxinfer(drafts="model"), speculates=True),
    "jaxinfer_ngram": Peer(None, _jaxinfer(drafts="ngram"), speculates=True),
    "transformers_eager": Peer("transformers", _transformers("eager")),
    "transformers_static": Peer("transformers", _transformers("static")),
    "transformers_compiled": Peer("transformers", _transformers("compiled")),
    "transformers_continuous": Peer("transformers", _transformers("continuous")),
    "transformers_assisted": Peer("transformers", _transformers("assisted"), speculates=True),
    "transformers_lookup": Peer("transformers", _transformers("lookup"), speculates=True),
    "llama_cpp": Peer("llama_cpp", _llama_cpp),
    "easydel": Peer("easydel", _easydel, own_python=True),
    "vllm": Peer("vllm", _vllm, needs_gpu=True),
}


def chosen(names: str) -> list[str]:
    """The systems that a comma-separated list means: names, or the first word of several ("transformers").

    Raises ValueError for a word that means none.
    """
    found: list[str] = []
    for word in names.split(","):
        matching = [name for name in PEERS if name == word or (name.startswith(f"{word}_") and word != "llama")]
        if not matching:
            raise ValueError(f"{word!r} is none of {', '.join(PEERS)}")
        found += [name for name in matching if name not in found]
    return found


def why_not(name: str, easydel_python: str | None) -> str | None:
    """Why a system cannot run here; None where it can."""
    peer = PEERS[name]
    if peer.own_python:
        return None if easydel_python else "no --easydel-python"
    if peer.package is not None and importlib.util.find_spec(peer.package) is None:
        return f"{peer.package} is not installed"
    if peer.package == "transformers" and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if name == "llama_cpp" and importlib.util.find_spec("gguf") is None:
        return "gguf is not installed"
    if peer.needs_gpu and not _has_gpu():
        return "no CUDA GPU"
    return None


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
