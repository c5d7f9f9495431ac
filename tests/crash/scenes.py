"""The commands that are killed, what they read and write, and how two runs of one are compared."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints_convert import verify_manifest
from tests.cli.conftest import write_checkpoint

TEXT = "".join(f"the weights of token {number} are small; " for number in range(60))
_DISTILL = ("--layers", "1", "--width", "16", "--steps", "4", "--texts", "6", "--length", "32", "--batch-size", "2",
            "--no-copying")  # fmt: skip
_QUANTIZE = ("--samples", "8", "--length", "16", "--group-size", "16")


@dataclass(frozen=True)
class Scene:
    """A command in a folder that has `source`, `text.txt` and, for those that replace it, `former`.

    Attributes:
      arguments: of the command line. outputs: what appears when it is complete.
      work: the folder in which it works before that. is_replacing: an output is there before.
    """

    name: str
    arguments: Callable[[Path], Sequence[str]]
    outputs: tuple[str, ...]
    work: str
    is_replacing: bool = False


SCENES = {
    scene.name: scene
    for scene in (
        Scene("convert", lambda at: ("convert", f"{at}/source", f"{at}/out/native"), ("out/native",),
              "out/native.partial"),
        Scene("convert-huggingface", lambda at: ("convert", f"{at}/source", f"{at}/out/hf", "--to", "huggingface"),
              ("out/hf",), "out/hf.partial"),
        Scene("convert-overwrite", lambda at: ("convert", f"{at}/source", f"{at}/out/native", "--overwrite"),
              ("out/native",), "out/native.partial", is_replacing=True),
        Scene("quantize", lambda at: ("quantize", f"{at}/source", f"{at}/out/int4", "--calibration", f"{at}/text.txt",
              *_QUANTIZE), ("out/int4",), "out/int4.quantizing"),
        Scene("quantize-overwrite", lambda at: ("quantize", f"{at}/source", f"{at}/out/int4", "--method", "rtn",
              "--group-size", "16", "--overwrite"), ("out/int4",), "out/int4.quantizing", is_replacing=True),
        Scene("distill", lambda at: ("distill", "--target", f"{at}/source", "--data", f"{at}/text.txt", "--out",
              f"{at}/out/draft", *_DISTILL), ("out/draft",), "out/draft.training"),
        Scene("train-demo", lambda at: ("train-demo", "--work-dir", f"{at}/out/work", "--out", f"{at}/out/models"),
              ("out/models/demo", "out/models/demo-draft"), "out/work"),
    )
}  # fmt: skip
# The scenes of a command take turns.
COMMANDS = {
    "convert": ("convert", "convert-huggingface", "convert-overwrite"),
    "quantize": ("quantize", "quantize-overwrite"),
    "distill": ("distill",),
    "train-demo": ("train-demo",),
}


def write_inputs(folder: Path, scene: Scene) -> Path:
    """An empty `out` beside what the command reads; the folder is readable for everybody."""
    write_checkpoint(folder / "source")
    (folder / "text.txt").write_text(TEXT)
    (folder / "out").mkdir()
    if scene.is_replacing:
        write_checkpoint(folder / scene.outputs[0], seed=1)
    for path in (folder, *folder.parents):
        if path.stat().st_uid == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 by relative path of all files, and "folder" for empty folders."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


def contents(folder: Path) -> dict[str, str]:
    """What two runs have in common: as `digests`, but without what Orbax writes, which holds times and names drawn at
    random. Of a converted checkpoint the manifest says what values that has; the checkpoints of a training are names.
    """
    found: dict[str, str] = {}
    opaque = {path.parent for name in ("_METADATA", "_CHECKPOINT_METADATA") for path in
              folder.rglob(name)}  # fmt: skip
    outermost = {path for path in opaque if not opaque & set(path.parents)}
    for name, digest in digests(folder).items():
        path = folder / name
        inside = next((one for one in outermost if one in path.parents), None)
        if inside is not None:
            found[f"{inside.relative_to(folder)}/"] = "written by Orbax"
        elif path.name == "manifest.json":
            assert verify_manifest(path.parent) == []
            manifest = json.loads(path.read_text())
            values = {key: manifest[key] for key in ("parameters", "arrays")}
            found[name] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        else:
            found[name] = digest
    return found
