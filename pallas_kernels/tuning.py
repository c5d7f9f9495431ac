"""Block sizes measured on a chip: a JSON table for each kind of chip. Without one, kernels use their heuristics.

A table maps "operation implementation program", then facts of the call, to block sizes. The facts are heads, widths and
dtypes, never the batch or its lengths: other block sizes round sums differently, and a result must not depend on the
other sequences of the batch. Tables in the folder PALLAS_KERNELS_TABLES come before those of the package.
`python -m pallas_kernels.tune` writes them.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

FOLDER = Path(__file__).parent / "tables"
SizesType = TypeVar("SizesType")
_forced: dict[str, dict[str, int]] = {}


def chip() -> str:
    """The kind of device that a program is traced for, as a file name: "tpu_v6_lite", "nvidia_h200", "cpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def tuned(heuristic: SizesType, name: str, facts: str) -> SizesType:
    """`heuristic`, a dataclass of ints, with the sizes in this chip's table replaced.

    `name` is "operation implementation program"; the sizes may depend on `facts` only. Raises ValueError if the table
    has an unknown size, or one that is not a positive int.
    """
    sizes = _forced.get(name) or table(chip()).get(name, {}).get(facts)
    if not sizes:
        return heuristic
    known = {field.name for field in fields(heuristic)}  # type: ignore[arg-type]
    for size, value in sizes.items():
        if size not in known or type(value) is not int or value < 1:
            raise ValueError(
                f"block size {size}={value!r} of {name!r} ({facts}) is not a positive int of {sorted(known)}"
            )
    return replace(heuristic, **sizes)  # type: ignore[type-var]


@functools.cache
def table(chip_name: str) -> dict[str, dict[str, dict[str, int]]]:
    """The sizes measured on a chip, empty if there are none. Raises ValueError for a file that is not a table."""
    for folder in filter(None, (os.environ.get("PALLAS_KERNELS_TABLES"), FOLDER)):
        path = Path(folder) / f"{chip_name}.json"
        if path.exists():
            return read(path)["sizes"]
    return {}


def read(path: Path) -> dict[str, Any]:
    """Reads a table with its chip and versions. Raises ValueError with the path for a file that is not a table."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(sizes, dict) for of_name in contents["sizes"].values() for sizes in of_name.values()):
            raise TypeError("sizes are not nested objects")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a table of block sizes: {error!r}") from error
    return contents


@contextlib.contextmanager
def force(name: str, **sizes: int) -> Iterator[None]:
    """Overrides the table for kernels traced inside; for tuning and tests."""
    before = _forced.get(name)
    _forced[name] = sizes
    try:
        yield
    finally:
        _forced.pop(name)
        if before is not None:
            _forced[name] = before
