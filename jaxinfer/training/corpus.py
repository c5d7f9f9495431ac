"""The training text of the embedded models: the source of the Python standard library."""

import hashlib
import importlib.util
import itertools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Tables, generated data and tests, which are repetitive.
EXCLUDED = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "config-",
            "__pycache__", "ensurepip", "lib-dynload")  # fmt: skip
MAX_FILE_BYTES = 250_000
HELD_OUT_IN = 40  # one file in so many is held out
HELD_OUT_PACKAGES = ("flax", "jax", "numpy", "optax")
MIN_HELD_OUT_CHARS = 1000  # enough for a prompt of 128 tokens


@dataclass(frozen=True)
class Corpus:
    """Texts of whole files, in a fixed order; which files are held out depends on the hash of their names."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def standard_library(root: Path | None = None) -> Corpus:
    """Reads all .py files below `root` (default: this interpreter's standard library), except tests and tables."""
    root = root or Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
    for name, text in _python_files(root):
        (held_out if _is_held_out(name) else train).append(text)
    if not train or not held_out:
        raise FileNotFoundError(f"no Python source under {root}: {len(train)} files to train on")
    return Corpus(tuple(train), tuple(held_out))


def held_out_files(count: int) -> list[tuple[str, str]]:
    """The first `count` files, as (name, text), that the embedded pair never saw: those of the standard library, then
    the source of packages that jaxinfer needs anyway, in the order of their names' hashes.

    The comment that opens a file is left out: it is the same licence in nearly all of them.

    Raises ValueError if there are fewer.
    """
    own = _python_files(Path(sysconfig.get_path("stdlib")))
    files = [(f"lib/{name}", text) for name, text in own if _is_held_out(name)]
    others: list[tuple[str, str]] = []
    for package in HELD_OUT_PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            others += [(f"{package}/{name}", text) for name, text in _python_files(Path(folder)) if "test" not in name]
    files += sorted(others, key=lambda file: hashlib.sha256(file[0].encode()).digest())
    bodies = ((name, _without_opening_comment(text)) for name, text in files)
    bodies = [(name, text) for name, text in bodies if len(text) >= MIN_HELD_OUT_CHARS][:count]
    if len(bodies) < count:
        raise ValueError(f"{count} held-out files asked for, {len(bodies)} are installed")
    return bodies


def rows_at(num_rows: int, step: int, count: int, seed: int) -> np.ndarray:
    """Row numbers of the batch of a step, a function of the step alone; each epoch has its own order."""
    if count > num_rows:
        raise ValueError(f"{num_rows} rows are too few for a batch of {count}")
    if count == 0:
        return np.zeros(0, np.int64)
    epoch, index = divmod(step, num_rows // count)
    return np.random.default_rng((seed, 2, epoch)).permutation(num_rows)[index * count :][:count]


def batch_at(stream: np.ndarray, step: int, *, batch_size: int, length: int, seed: int) -> np.ndarray:
    """The batch [batch_size, length + 1] of a step, a function of the step alone, so that a resumed run is the same.

    Each epoch cuts the stream at another offset and visits the pieces in another order.
    """
    per_epoch = (len(stream) - 2 * length) // length // batch_size
    if per_epoch < 1:
        raise ValueError(f"{len(stream)} tokens are too few for one batch of {batch_size} x {length}")
    epoch, index = divmod(step, per_epoch)
    random = np.random.default_rng((seed, epoch))
    offset = int(random.integers(length))
    starts = offset + length * random.permutation(per_epoch * batch_size)[index * batch_size :][:batch_size]
    return stream[starts[:, None] + np.arange(length + 1)]


def _python_files(root: Path) -> Iterator[tuple[str, str]]:
    """Names, relative to `root`, and texts, by name; no tests, tables or tiny files."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        *folders, file = name.split("/")
        if any(part.startswith(EXCLUDED) for part in folders) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        if file.startswith(("test_", "conftest")) or file.endswith("_test.py"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few files declare another encoding
            continue
        if len(text) > 200:
            yield name, text


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_IN == 0


def _without_opening_comment(text: str) -> str:
    lines = text.splitlines(keepends=True)
    opening = itertools.takewhile(lambda line: line.startswith("#") or not line.strip(), lines)
    return "".join(lines[len(list(opening)) :])
