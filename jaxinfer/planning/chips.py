"""Chips by name, with the figures of chips.json, and places of one or several of them."""

import difflib
import json
import math
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pallas_kernels import ahead_of_time

# Of a GPU's memory JAX takes this share at its start, unless the environment variable says another.
GPU_SHARE, GPU_SHARE_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"
MAX_GPUS = 8


@dataclass(frozen=True)
class Chip:
    """The figures of one chip: bytes, bytes/s and FLOP/s; those of one device are a `devices_per_chip`-th.

    Attributes:
      name: as users write it. title: as its vendor does. platform: "tpu" or "gpu".
      usable_bytes: what programs may use of hbm_bytes.
      flops: FLOP/s by what is multiplied: "bf16", "int8", "fp8"; None where the chip has no such rate.
      link_bandwidth: of all links to other chips, both directions together.
      can_compile: whether programs can be compiled for it ahead of time. sources: (title, url, date) of the figures.
    """

    name: str
    title: str
    platform: str
    devices_per_chip: int
    hbm_bytes: int
    usable_bytes: int
    hbm_bandwidth: float
    flops: dict[str, float | None]
    link_bandwidth: float
    chips_per_host: int
    can_compile: bool
    device_kinds: tuple[str, ...]
    sources: tuple[tuple[str, str | None, str], ...]


@dataclass(frozen=True)
class Place:
    """`num_chips` chips of one kind, which compute together. `name` is how it was written, such as "v6e:2x4"."""

    name: str
    chip: Chip
    num_chips: int

    @property
    def num_devices(self) -> int:
        """Devices as JAX sees them."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def device_bytes(self) -> int:
        """Usable memory of one device."""
        return self.chip.usable_bytes // self.chip.devices_per_chip


@cache
def chips() -> dict[str, Chip]:
    """All of chips.json, by name."""
    data = json.loads(files("jaxinfer.planning").joinpath("chips.json").read_text(encoding="utf-8"))
    return {name: _chip(name, fields) for name, fields in data["chips"].items()}


def _chip(name: str, fields: dict[str, Any]) -> Chip:
    values = {key: value for key, value in fields.items() if key != "notes"}
    if values["usable_bytes"] is None:
        share = float(os.environ.get(GPU_SHARE_VARIABLE) or GPU_SHARE)
        values["usable_bytes"] = int(share * values["hbm_bytes"])
    values["device_kinds"] = tuple(values["device_kinds"])
    values["sources"] = tuple((one["title"], one["url"], one["date"]) for one in values["sources"])
    return Chip(name=name, **values)


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls so (`device.device_kind`), None for one that is not listed."""
    return next((chip for chip in chips().values() if device_kind in chip.device_kinds), None)


def parse_place(text: str) -> Place:
    """A place from "v6e:2x2" (a slice of TPUs), "h200x8" (GPUs) or a chip's name alone (one of it).

    Raises ValueError for a chip that is not listed, with the nearest one that is, and for a count that makes no sense.
    """
    found = re.fullmatch(r"(?P<slice>.+):(?P<bounds>\d+(x\d+)*)|(?P<several>.+)x(?P<count>\d+)|(?P<one>.+)", text)
    if found is None:
        raise ValueError("a place is empty: write v6e:2x2 or h200x1")
    if text in chips():
        name, num_chips = text, 1
    elif found["slice"]:
        name, num_chips = found["slice"], math.prod(map(int, found["bounds"].split("x")))
    elif found["several"]:
        name, num_chips = found["several"], int(found["count"])
    else:
        name, num_chips = text, 1
    if name not in chips():
        near = difflib.get_close_matches(name, chips(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(chips())}"
        raise ValueError(f"no chip is called {name!r}: {hint}")
    chip = chips()[name]
    if found["slice"] and chip.platform == "gpu":
        raise ValueError(f"{text!r}: GPUs are written {name}x{num_chips}")
    if num_chips < 1 or (chip.platform == "gpu" and num_chips > MAX_GPUS):
        raise ValueError(f"{text!r}: {num_chips} chips; GPUs are planned for from 1 to {MAX_GPUS}, the GPUs of a host")
    return Place(text, chip, num_chips)


def larger_places(place: Place) -> list[Place]:
    """Places of more of the same chips, the next larger first."""
    chip = place.chip
    if chip.platform == "gpu":
        return [Place(f"{chip.name}x{n}", chip, n) for n in (2, 4, 8) if n > place.num_chips]
    slices = [(bounds, math.prod(map(int, bounds.split("x")))) for bounds in ahead_of_time.slices(chip.name)]
    return [Place(f"{chip.name}:{bounds}", chip, n) for bounds, n in slices if n > place.num_chips]
