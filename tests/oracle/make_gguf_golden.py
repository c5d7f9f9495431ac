"""Writes tests/oracle/golden/gguf_blocks.npz: blocks of every GGUF type, and what gguf-py dequantizes them to.

Needs gguf. Run twice, it writes the same arrays.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.checkpoints_convert.gguf.gguf_writer import BLOCKS, FLOATS, random_blocks

PATH = Path(__file__).parent / "golden" / "gguf_blocks.npz"


def blocks_of(kind: str, random: np.random.Generator) -> np.ndarray:
    """uint8 [3, bytes]: two blocks in a row, or 64 numbers."""
    if kind in FLOATS:
        return random.standard_normal((3, 64)).astype(FLOATS[kind]).view(np.uint8)
    return random_blocks(kind, (3, 2 * BLOCKS[kind][0]), random).raw


def by_gguf_py(kind: str, raw: np.ndarray) -> np.ndarray:
    stored = raw if kind == "BF16" or kind not in FLOATS else raw.view(FLOATS[kind])
    return np.asarray(dequantize(stored, GGMLQuantizationType[kind]), np.float32)


def main() -> None:
    random = np.random.default_rng(0)
    arrays = {}
    for kind in (*FLOATS, *BLOCKS):
        arrays[f"{kind}.blocks"] = raw = blocks_of(kind, random)
        arrays[f"{kind}.values"] = by_gguf_py(kind, raw)
    np.savez_compressed(PATH, **arrays)
    print(f"{len(arrays) // 2} types, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
