"""Heads in the speculators library's form that are written here, and what that library makes of them.

The library runs in a process of its own (`speculators_reference.py`), in the environment `.venv-heads`. What it found
is kept in golden/speculators, which `make golden-heads` writes.
"""

import json
import os
import subprocess
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

import checkpoints_convert
from checkpoints_convert import SpeculatorsForm
from jaxinfer.models import ModelConfig, Params, RopeConfig, abstract_params, bind_draft_head
from jaxinfer.speculative import HeadDraft, head_for
from jaxinfer.training.head_rows import index_of
from jaxinfer.training.head_start import head_config, with_embedding
from tests.models.test_draft_head import blocks_after, drafted, log_softmax
from tests.oracle.head_cases import DRAFT_VOCAB, MASK_TOKEN, VOCAB, HeadCase, inputs, kept_tokens
from tests.tiny import TINY

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "golden" / "speculators"
PYTHON = Path(os.environ.get("SPECULATORS_PYTHON", ROOT / ".venv-heads" / "bin" / "python"))
ANCHORS = (1, 2, 3, 8, 15, 20)
TOLERANCE = 1e-5
TARGET = replace(TINY, vocab_size=VOCAB, num_layers=4)
VERIFIER = "target"  # in golden files, in place of the folder
KINDS = ("eagle3", "dflash")  # of heads that the library trains
_LLAMA3 = RopeConfig(rotary_dim=8, kind="llama3", theta=5e5, factor=8.0, original_length=32)
Opened = tuple[dict[str, Any], dict[str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class WrittenHead:
    """Attributes:
    kind: as of `head_config`. is_reduced: it drafts the tokens `kept_tokens` alone.
    fields: of its configuration that differ from those of a head that is trained here; head: of `draft_head`.
    """

    name: str
    kind: str
    is_reduced: bool = False
    num_layers: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The golden file."""
        return FOLDER / f"{self.name}.safetensors"

    def make(self) -> tuple[ModelConfig, Params]:
        """The head, as `train-head` has it when it writes."""
        config = head_config(
            TARGET,
            self.kind,
            vocab_size=DRAFT_VOCAB if self.is_reduced else None,
            num_layers=self.num_layers,
            taps=(1, 2, 3),
            block_size=4,
            mask_token=MASK_TOKEN,
        )
        assert config.draft_head is not None
        config = replace(config, **self.fields, draft_head=replace(config.draft_head, **self.head))
        params = random_weights(config, self.name)
        if self.is_reduced:
            params["draft_index"] = jnp.asarray(index_of(kept_tokens(0), VOCAB))
        return with_embedding(config, params, target_params()) if self.kind == "eagle3" else (config, params)


WRITTEN = {
    head.name: head
    for head in (
        WrittenHead("eagle3", "eagle3", is_reduced=True),
        WrittenHead(
            "eagle3_norms",
            "eagle3",
            num_layers=2,
            fields={"rope": _LLAMA3},
            head={"tap_norms": "each", "returns_normed": True, "adds_normed": True},
        ),
        WrittenHead("dflash", "dflash", num_layers=2),
        WrittenHead(
            "dflash_window",
            "dflash",
            is_reduced=True,
            num_layers=2,
            fields={"sliding_windows": (6, None)},
            head={"drafts_at_root": True},
        ),
    )
}


def random_weights(config: ModelConfig, name: str) -> Params:
    """Parameters by NumPy, a function of the name: large enough for each to show in the logits."""
    random = np.random.default_rng(zlib.crc32(name.encode()))

    def leaf(path: Any, shape: Any) -> jax.Array:
        noise = random.standard_normal(shape.shape, np.float32)
        is_norm = "norm" in path[-2].key if len(path) > 1 else False
        if is_norm:
            return jnp.asarray(1 + np.float32(0.1) * noise)
        return jnp.asarray(noise * np.float32(0.7 if path[-1].key == "embed" else 1.2 * shape.shape[0] ** -0.5))

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))


def target_params() -> Params:
    return random_weights(TARGET, "target")


def write_target(folder: Path) -> Path:
    return checkpoints_convert.save_huggingface(TARGET, target_params(), folder, "float32")


def form(verifier: Path | str, num_drafts: int = 3) -> SpeculatorsForm:
    return SpeculatorsForm(str(verifier), TARGET.architecture, num_drafts)


def logits(config: ModelConfig, params: Params, target: tuple[ModelConfig, Params]) -> np.ndarray:
    """Logits of a head at `ANCHORS`: of its chains [A, 3, Vd], or of its blocks [A, B, Vd]."""
    config, taps = head_for(config, target[0])
    head = config.draft_head
    assert head is not None
    bound = bind_draft_head(*HeadDraft("head", config, params, taps).models(*target)[0])
    given = inputs(HeadCase("head", head.kind, {}, {}, taps=head.tap_layers), 0)
    states = bound.states(jnp.split(jnp.asarray(given["taps"]), len(taps), axis=1))
    if head.is_block:
        hidden = blocks_after(bound, given["tokens"], states)
        return np.stack([np.asarray(bound.logits(hidden(anchor))) for anchor in ANCHORS])
    return drafted(bound, given["tokens"], states)[0][:, list(ANCHORS)].swapaxes(0, 1)


def differ(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of log-probabilities."""
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.3
    return float(np.abs(log_softmax(ours) - log_softmax(theirs)).max())


def library(*arguments: Any) -> str:
    """Runs `speculators_reference.py`; returns what it prints. Raises RuntimeError with its errors."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-m", "tests.oracle.speculators_reference", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout


def opened_by_library(folder: Path) -> Opened:
    """Reads the files of `open_head`: about a head, and its tensors."""
    library("open", folder, out := folder.with_name(folder.name + ".opened"))
    return read_tensors(out)


def read_tensors(path: Path) -> Opened:
    """The metadata and tensors of a golden file, or of `opened_by_library`."""
    with safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["made"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def states_in(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state of the library's model, by its own names."""
    return {name.removeprefix("state."): tensor for name, tensor in tensors.items() if name.startswith("state.")}


def trained_path(kind: str) -> Path:
    """The golden file of a head that the library trained."""
    return FOLDER / f"trained_{kind}.safetensors"


def checksums(tensors: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    """Shape and CRC-32 of each tensor."""
    return {name: [list(tensor.shape), zlib.crc32(tensor.tobytes())] for name, tensor in tensors.items()}
