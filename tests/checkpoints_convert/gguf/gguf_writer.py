"""A small GGUF writer for tests, by the letter of ggml's docs/gguf.md; live tests check it with gguf-py's reader."""

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11,
           "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20,
           "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35,
           "MXFP4": 39}  # fmt: skip
# Values of a block, its bytes, and where in it half-precision numbers are.
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q2_K": (256, 84, (80, 82)),
    "Q3_K": (256, 110, (108,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "TQ1_0": (256, 54, (52,)),
    "TQ2_0": (256, 66, (64,)),
    "MXFP4": (32, 17, ()),
    "IQ4_NL": (32, 18, (0,)),
    "IQ4_XS": (256, 136, (0,)),
    "IQ3_XXS": (256, 98, (0,)),
    "IQ3_S": (256, 110, (0,)),
    "IQ2_XXS": (256, 66, (0,)),
    "IQ2_XS": (256, 74, (0,)),
    "IQ2_S": (256, 82, (0,)),
    "IQ1_S": (256, 50, (0,)),
    "IQ1_M": (256, 56, ()),
}
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

# A value with its type: (number of the type, value).
Typed = tuple[int, Any]
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class Blocks:
    """Rows of quantized blocks, uint8 [..., bytes of a row]."""

    def __init__(self, kind: str, raw: np.ndarray):
        self.kind, self.raw = kind, np.ascontiguousarray(raw)

    @property
    def shape(self) -> tuple[int, ...]:
        size, num_bytes, _ = BLOCKS[self.kind]
        return (*self.raw.shape[:-1], self.raw.shape[-1] // num_bytes * size)

    def __getitem__(self, rows: Any) -> "Blocks":
        return Blocks(self.kind, self.raw[rows])


def random_blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> Blocks:
    """Blocks of random bytes, whose half-precision numbers are small: some of them below the normal ones."""
    size, num_bytes, halves = BLOCKS[kind]
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    for place in halves:
        numbers = (random.standard_normal((*raw.shape[:-1], 1)) * 10.0 ** random.integers(-7, -2, (1,))).astype("<f2")
        raw[..., place : place + 2] = numbers.view(np.uint8)
    if kind == "MXFP4":  # the first byte is an exponent
        raw[..., 0] = random.integers(100, 130, raw.shape[:-1], dtype=np.uint8)
    if kind == "IQ1_M":  # the upper bits of the scale are those of the last byte: sign, and the exponent's first three
        raw[..., -1] &= 0x9F
    return Blocks(kind, raw.reshape(*shape[:-1], -1))


def q8_0(weight: np.ndarray) -> Blocks:
    """Rounded to the nearest of 255 values of each 32."""
    groups = weight.astype(np.float32).reshape(*weight.shape[:-1], -1, 32)
    scales = np.abs(groups).max(-1, keepdims=True) / 127
    codes = np.round(groups / np.where(scales, scales, 1)).astype(np.int8)
    raw = np.concatenate([scales.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=-1)
    return Blocks("Q8_0", raw.reshape(*weight.shape[:-1], -1))


def kind_of(value: Any) -> Typed:
    """The type that the converter writes a Python value as."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int) and not isinstance(value[1], str):
        return value
    for python, number in ((bool, 7), (int, 4), (float, 6), (str, 8)):
        if isinstance(value, python):
            return number, value
    return 9, value


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def packed(value: Any) -> bytes:
    """Type and value."""
    number, value = kind_of(value)
    return struct.pack("<I", number) + _bare(number, value)


def _bare(number: int, value: Any) -> bytes:
    if number == 8:
        return string(value)
    if number == 9:
        if isinstance(value, np.ndarray):
            kinds = {"float32": 6, "int32": 5, "uint32": 4, "bool": 7}
            return struct.pack("<IQ", kinds[value.dtype.name], value.size) + value.tobytes()
        of_items = kind_of(value[0])[0] if len(value) else 8
        return struct.pack("<IQ", of_items, len(value)) + b"".join(_bare(of_items, item) for item in value)
    return struct.pack(_FORMATS[number], value)


def header(metadata: dict[str, Any], infos: list[bytes], *, version: int = 3) -> bytes:
    keys = b"".join(string(key) + packed(value) for key, value in metadata.items())
    return struct.pack("<4sIQQ", b"GGUF", version, len(infos), len(metadata)) + keys + b"".join(infos)


def info(name: str | bytes, shape: tuple[int, ...], number: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, offset)


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray | Blocks], *, version: int = 3) -> Path:
    alignment = metadata.get("general.alignment", 32)
    infos, offset = [], 0
    for name, tensor in tensors.items():
        is_quantized = isinstance(tensor, Blocks)
        kind = tensor.kind if is_quantized else _DTYPES[tensor.dtype.name]
        infos.append(info(name, tensor.shape, NUMBERS[kind], offset))
        offset += -(-_raw(tensor).nbytes // alignment) * alignment
    front = header(metadata, infos, version=version)
    with path.open("wb") as file:
        file.write(front + bytes(-len(front) % alignment))
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(_raw(tensor)).tobytes())
            file.write(bytes(-_raw(tensor).nbytes % alignment))
    return path


def _raw(tensor: np.ndarray | Blocks) -> np.ndarray:
    return tensor.raw if isinstance(tensor, Blocks) else tensor


def write_split(path: Path, metadata: dict[str, Any], tensors: dict[str, Any], num_parts: int) -> list[Path]:
    """As llama.cpp's gguf-split: the metadata is in the first part, beside the counts."""
    names, paths = list(tensors), []
    for number in range(num_parts):
        part = {name: tensors[name] for name in names[number::num_parts]}
        split = {"split.no": (2, number), "split.count": (2, num_parts), "split.tensors.count": (5, len(names))}
        paths.append(path.with_name(f"{path.stem}-{number + 1:05}-of-{num_parts:05}.gguf"))
        write(paths[-1], {**(metadata if number == 0 else {}), **split}, part)
    return paths
