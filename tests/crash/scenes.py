"""The commands that are killed, what they read and write, and how two runs of one are compared."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints_convert import verify_manifest
from tests.cli.conftest import write_checkpoint
from tests.crash.server import Moment, Request, Result, Server

TEXT = "".join(f"the weights of token {number} are small; " for number in range(60))
_DISTILL = ("--layers", "1", "--width", "16", "--steps", "4", "--texts", "6", "--length", "32", "--batch-size", "2",
            "--no-copying", "--concurrency", "1")  # fmt: skip
# Enough prompts for several files of answers.
PROMPTS = "".join(f"say {number}\n" for number in range(14))
_HEAD = ("--steps", "8", "--length", "32", "--batch-size", "2", "--held-out", "2", "--dtype", "float32",
         "--concurrency", "1")  # fmt: skip
_QUANTIZE = ("--samples", "8", "--length", "16", "--group-size", "16")


@dataclass(frozen=True)
class Scene:
    """A command in a folder that has `source`, `text.txt`, `prompts.txt` and, for those that replace it, `former`.

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
        Scene("distill", lambda at: ("distill", f"{at}/source", "--data", f"{at}/text.txt", "--out",
              f"{at}/out/draft", *_DISTILL), ("out/draft",), "out/draft.training"),
        Scene("train-head", lambda at: ("train-head", f"{at}/source", "--prompts", f"{at}/prompts.txt", "--out",
              f"{at}/out/head", "--draft-vocab-size", "100", "--store-states", *_HEAD), ("out/head",),
              "out/head.training"),
        Scene("train-head-blocks", lambda at: ("train-head", f"{at}/source", "--own-prompts", "14", "--kind", "dflash",
              "--block-size", "4", "--layers", "1", "--out", f"{at}/out/head", *_HEAD),
              ("out/head",), "out/head.training"),
        Scene("train-demo", lambda at: ("train-demo", "--work-dir", f"{at}/out/work", "--out", f"{at}/out/models"),
              ("out/models/demo", "out/models/demo-draft"), "out/work"),
    )
}  # fmt: skip
# The scenes of a command take turns.
COMMANDS = {
    "convert": ("convert", "convert-huggingface", "convert-overwrite"),
    "quantize": ("quantize", "quantize-overwrite"),
    "distill": ("distill",),
    "train-head": ("train-head", "train-head-blocks"),
    "train-demo": ("train-demo",),
}


def write_inputs(folder: Path, scene: Scene) -> Path:
    """An empty `out` beside what the command reads."""
    write_checkpoint(folder / "source")
    ends = {"eos_token_id": [256, *range(0, 256, 8)]}  # often said, so that prompts and answers end
    (folder / "source" / "generation_config.json").write_text(json.dumps(ends))
    (folder / "text.txt").write_text(TEXT)
    (folder / "prompts.txt").write_text(PROMPTS)
    (folder / "out").mkdir()
    if scene.is_replacing:
        write_checkpoint(folder / scene.outputs[0], seed=1)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 by relative path of all files, and "folder" for empty folders."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
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


class Reference:
    """What a scene has before, and what an undisturbed run of it makes."""

    def __init__(self, server: Server, scene: Scene, folder: Path):
        self.scene, self.folder, self._server = scene, folder, server
        write_inputs(folder / "before", scene)
        self.before = digests(folder / "before")
        # In the same place as the others, since files name their source.
        self.undisturbed = self.run(self.place(), Moment(0, folder=str(folder)))
        (folder / "run").rename(folder / "whole")
        assert self.undisturbed.code == 0, self.undisturbed.stderr
        self.after = contents(folder / "whole")
        assert all(self.output(folder / "whole", name) for name in scene.outputs)

    def place(self) -> Path:
        """A new copy of the folder before the run."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        return shutil.copytree(self.folder / "before", self.folder / "run")

    def measure(self) -> float:
        """Seconds of another undisturbed run, which makes the same, with the programs that the first one compiled."""
        place = self.place()
        again = self.run(place)
        assert again.code == 0, again.stderr
        assert contents(place) == self.after
        return again.seconds

    def run(self, place: Path, moment: Moment | None = None, **options: object) -> Result:
        return self._server.run(Request(self.scene.arguments(place), moment, **options))  # type: ignore[arg-type]

    def output(self, place: Path, name: str) -> dict[str, str]:
        return contents(place / name) if (place / name).exists() else {}

    def is_complete(self, place: Path) -> bool:
        """Whether all outputs are there. Fails if one is there in part."""
        found = []
        for name in self.scene.outputs:
            output = self.output(place, name)
            former = digests(self.folder / "before" / name) if self.scene.is_replacing else {}
            assert output in ({}, former, self.output(self.folder / "whole", name)), f"{name}: {sorted(output)}"
            assert output or not former, f"{name}: the former one is gone"
            found.append(bool(output) and output != former)
        return all(found)

    def check_inputs(self, place: Path) -> None:
        inputs = {name for name in self.before if not name.startswith("out")}
        now = digests(place)
        assert {name: now.get(name) for name in inputs} == {name: self.before[name] for name in inputs}

    def check_repeated(self, place: Path, what: str, removed: str | None = None) -> None:
        """The same command makes what an undisturbed run makes, and leaves nothing else. What was removed of a run that
        was complete without it stays away."""
        is_complete = self.is_complete(place)
        if not is_complete or self.scene.is_replacing:
            again = self.run(place)
            assert again.code == 0, f"{what}: {again.stderr}"
            assert "Traceback" not in again.stderr, f"{what}: {again.stderr}"
            removed = None
        found, expected = contents(place), self.after
        if removed is not None:
            found, expected = (
                {k: v for k, v in one.items() if not k.startswith(f"{removed}/")} for one in (found, expected)
            )
        assert found == expected, f"{what}: {sorted(found.items() ^ expected.items())}"
        self.check_inputs(place)
