"""One file with all that `python -m benchmarks.on_chip` needs on another machine: `make on-chip-archive`.

    python -m benchmarks.on_chip.archive FILE.tar.gz

It has the tracked files of the product and of the benchmarks, without the demo's weights and the results, and the
packages in this folder, if any. The same tree gives the same bytes.
"""

import argparse
import gzip
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).parent / "packages"
FOLDER = "on_chip"  # into which it is unpacked
PARTS = ("jaxinfer", "pallas_kernels", "cpu_kernels", "checkpoints_convert", "benchmarks", "pyproject.toml", "LICENSE")
LEFT_OUT = ("jaxinfer/data/demo/", "jaxinfer/data/demo-draft/", "benchmarks/results/")
MAX_BYTES = 12 * 2**20
README = """\
Unpack: tar xzf on_chip.tar.gz && cd on_chip
Run, and again until nothing is left: python3 -m benchmarks.on_chip --minutes 9 --out DIR
Bring DIR back; its folder DIR/cache may stay. A run goes on where the results in DIR end.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.on_chip.archive", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="the archive, .tar.gz")
    options = parser.parse_args(argv)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    content = make(ROOT)
    options.file.write_bytes(content)
    print(f"{options.file}: {len(content) / 2**20:.2f} MiB of at most {MAX_BYTES / 2**20:.0f}")
    return int(len(content) > MAX_BYTES)


def make(root: Path) -> bytes:
    """The archive, compressed: sorted names, no times, owners or modes of this machine."""
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        members = {"README.txt": README.encode()} | {name: (root / name).read_bytes() for name in files(root)}
        for name in sorted(members):
            info = tarfile.TarInfo(f"{FOLDER}/{name}")
            info.size, info.mode = len(members[name]), 0o644
            archive.addfile(info, io.BytesIO(members[name]))
    return gzip.compress(unpacked.getvalue(), mtime=0)


def files(root: Path) -> Iterator[str]:
    """Names of what travels, relative to the root of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", *PARTS], cwd=root, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        if name and not name.startswith(LEFT_OUT) and (root / name).is_file():
            yield name
    for path in PACKAGES.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    sys.exit(main())
