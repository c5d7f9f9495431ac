"""Chips by name, with the figures of chips.json, and the rates of a device."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# JAX allocates this share of a GPU's memory at its start, unless the environment variable sets another.
GPU_SHARE, GPU_SHARE_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"


class Source(NamedTuple):
    """Source of figures of a chip; `figures` are names of fields of `Chip`."""

    title: str
    url: str | None
    date: str
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Chip:
    """The figures of one chip: bytes, bytes/s and FLOP/s; those of one device are these divided by `devices_per_chip`.
    The defaults are of a device that is not listed.

    Attributes:
      name: the name in options. title: the vendor's name. platform: "tpu" or "gpu".
      hbm_bytes: of a GPU as its driver reports it. usable_bytes: the part of them that programs may use.
      l2_bytes: the cache before a GPU's memory; 0 for TPUs, which have none, and None where it is not known.
      flops: FLOP/s by the type of the operands: "bf16", "int8", "fp8"; None if the chip has no such rate.
      link_bandwidth: of all links to other chips, both directions added.
      host_bandwidth: from the host's memory to the chip.
      can_compile: whether programs can be compiled for it ahead of time.
    """

    name: str
    title: str
    platform: str
    devices_per_chip: int = 1
    hbm_bytes: int = 0
    usable_bytes: int = 0
    l2_bytes: int | None = None
    hbm_bandwidth: float = 0.0
    flops: dict[str, float | None] = field(default_factory=dict)
    link_bandwidth: float = 0.0
    host_bandwidth: float = 0.0
    chips_per_host: int = 1
    can_compile: bool = False
    device_kinds: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Rates:
    """Bytes/s and FLOP/s of a device; FLOP/s by the type of the operands."""

    hbm: float
    links: float
    flops: dict[str, float]
    host: float = math.inf

    @classmethod
    def of(cls, chip: Chip) -> "Rates":
        share = chip.devices_per_chip
        known = {name: rate / share for name, rate in chip.flops.items() if rate is not None}
        # A chip without a rate of its own for a type multiplies it as bf16.
        flops = {name: known.get(name, known["bf16"]) for name in chip.flops}
        return cls(chip.hbm_bandwidth / share, chip.link_bandwidth / share / 2, flops, chip.host_bandwidth / share)

    def compute_seconds(self, flops: Mapping[str, float]) -> float:
        return sum(number / self.flops[kind] for kind, number in flops.items())


@cache
def chips() -> dict[str, Chip]:
    """All of chips.json, by name."""
    data = json.loads(files("jaxinfer").joinpath("chips.json").read_text(encoding="utf-8"))
    share = float(os.environ.get(GPU_SHARE_VARIABLE) or GPU_SHARE)
    by_name = {}
    for name, values in data["chips"].items():
        values.pop("notes", None)
        if values["usable_bytes"] is None:
            values["usable_bytes"] = int(share * values["hbm_bytes"])
        values["device_kinds"] = tuple(values["device_kinds"])
        values["sources"] = tuple(
            Source(**{**source, "figures": tuple(source["figures"])}) for source in values["sources"]
        )
        by_name[name] = Chip(name, **values)
    return by_name


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip with this name in JAX (`device.device_kind`); None if it is not listed."""
    return next((chip for chip in chips().values() if device_kind in chip.device_kinds), None)
