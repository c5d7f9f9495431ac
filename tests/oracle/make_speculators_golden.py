"""Writes golden/speculators: what the speculators library opened of heads that were written here, and heads that it
trained, as it wrote them.

Run by `make golden-heads`. With names as arguments it writes only those.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import checkpoints_convert
from tests.oracle.speculators_cases import (
    FOLDER,
    KINDS,
    VERIFIER,
    WRITTEN,
    WrittenHead,
    checksums,
    form,
    library,
    opened_by_library,
    states_in,
    trained_path,
    write_target,
)

FILES = ("config.json", "model.safetensors")


def main(names: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        target = write_target(Path(folder) / "target")
        for name, case in WRITTEN.items():
            if name in (names or [name]):
                print(write_opened(case, Path(folder) / name, target), flush=True)
        for kind in KINDS:
            if kind in (names or [kind]):
                print(write_trained(kind, Path(folder) / f"trained_{kind}", target), flush=True)


def write_opened(case: WrittenHead, folder: Path, target: Path) -> str:
    """Writes the golden file of a head that is written here; returns a line about it."""
    config, params = case.make()
    checkpoints_convert.save_huggingface(config, params, folder, "float32", speculators=form(target))
    about, tensors = opened_by_library(folder)
    about["config"]["speculators_config"]["verifier"]["name_or_path"] = VERIFIER
    about["written"] = json.loads((folder / "config.json").read_text())
    about["written"]["speculators_config"]["verifier"]["name_or_path"] = VERIFIER
    about["state"] = checksums(states_in(tensors))
    save_file({"logits": tensors["logits"]}, case.path, {"made": json.dumps(about)})
    return f"{case.name}: logits {list(tensors['logits'].shape)}, {case.path.stat().st_size:,} bytes"


def write_trained(kind: str, folder: Path, target: Path) -> str:
    """Writes the golden file of a head that the library trains; returns a line about it."""
    losses = json.loads(library("train", kind, target, folder))
    _, tensors = opened_by_library(folder)
    contents = {name: (folder / name).read_bytes().replace(str(target).encode(), VERIFIER.encode()) for name in FILES}
    files = {name: np.frombuffer(content, np.uint8) for name, content in contents.items()}
    path, made = trained_path(kind), {"losses": losses}
    save_file({"logits": tensors["logits"], **files}, path, {"made": json.dumps(made)})
    return f"trained {kind}: loss {losses[0]:.3f}, then {losses[1]:.3f}, {path.stat().st_size:,} bytes"


if __name__ == "__main__":
    main(sys.argv[1:])
