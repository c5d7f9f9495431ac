"""Writes golden/adapters: folders that the PEFT library saved, and its log-probabilities with them.

Run by `make golden-adapters` in the environment `.venv-peft`. With names of families as arguments it writes only those.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from tests.oracle.adapter_cases import ADAPTER_FILES, FOLDER, GOLDEN_FAMILIES, kinds_of, library


def main(names: list[str]) -> None:
    for name in names or GOLDEN_FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            library(name, folder)
            print(keep(name, Path(folder)), flush=True)


def keep(name: str, made: Path) -> str:
    """Replaces the golden files of a family by those that were made; returns a line about them."""
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    files = [Path(kind.name, adapter) for kind in kinds_of(GOLDEN_FAMILIES[name]).values() for adapter in kind.adapters]
    for path in [Path("expected.safetensors"), *(path / file for path in files for file in ADAPTER_FILES)]:
        (FOLDER / name / path).parent.mkdir(parents=True, exist_ok=True)
        content = (made / path).read_bytes().replace(str(made / "base").encode(), b"base")
        (FOLDER / name / path).write_bytes(content)
    size = sum(path.stat().st_size for path in (FOLDER / name).rglob("*") if path.is_file())
    return f"{name}: {len(files)} adapters, {size:,} bytes"


if __name__ == "__main__":
    main(sys.argv[1:])
