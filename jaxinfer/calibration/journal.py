"""The finished layers of a calibration on the disk, from which a killed run resumes.

A directory with `calibration.json` (the fingerprint of the run) and one file per finished layer, written atomically.
Calibrations that are parts of it, such as the rounds of a search, are subdirectories.
"""

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import jax.numpy as jnp
import numpy as np

from jaxinfer.files import Closable, atomic_writer, naming
from jaxinfer.models import Params
from jaxinfer.quantization import NestedScales, QuantizedArray, Scheme

_STATE = "calibration.json"
_REPORT = "report"
_PART = "part-"


class CalibrationJournal(Closable):
    """The finished layers in `directory`, which `begin` creates and locks against other processes until `close`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._file: TextIO | None = None
        self._parts: list[CalibrationJournal] = []

    def begin(self, fingerprint: dict[str, Any]) -> None:
        """Opens the journal; removes layers of a calibration with another fingerprint.

        Raises ValueError for a directory that another process uses, or that is no journal.
        """
        state = self.directory / _STATE
        if self._file is None:
            if self.directory.exists() and any(self.directory.iterdir()) and not state.exists():
                raise ValueError(f"{self.directory} exists and is no calibration under way: move it away")
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = self._locked(state)
        wanted, file = json.dumps(fingerprint, sort_keys=True), self._file
        file.seek(0)
        if file.read() != wanted:
            self._clear()
            with naming(state):
                file.truncate(0)
                file.write(wanted)
                file.flush()
                os.fsync(file.fileno())

    def part(self, name: str) -> "CalibrationJournal":
        """The journal of a part of this calibration, closed and removed with it."""
        self._parts.append(CalibrationJournal(self.directory / f"{_PART}{name}"))
        return self._parts[-1]

    def __contains__(self, number: int) -> bool:
        return self._path(number).exists()

    def write(self, number: int, params: Params, report: dict[str, Any]) -> None:
        """Records a finished layer."""
        with atomic_writer(self._path(number)) as file:
            np.savez(file, allow_pickle=False, **_flat(params), **{_REPORT: np.array(json.dumps(report))})

    def read(self, number: int) -> tuple[Params, dict[str, Any]]:
        """A finished layer and its report. Raises ValueError, naming the file, if it is damaged."""
        path = self._path(number)
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            return _nested(arrays), json.loads(str(arrays[_REPORT]))
        except Exception:  # numpy and zipfile raise many types
            raise ValueError(f"{path} is damaged: remove it, and its layer is calibrated again") from None

    def remove(self) -> None:
        """Removes the journal."""
        self._clear()
        (self.directory / _STATE).unlink()
        self.close()
        self.directory.rmdir()

    def close(self) -> None:
        for part in self._parts:
            part.close()
        if self._file is not None:
            file, self._file = self._file, None
            with naming(self.directory / _STATE):  # what could not be written before is tried again
                file.close()

    def _locked(self, state: Path) -> TextIO:
        file = state.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ValueError(f"{self.directory}: another process calibrates there") from None
        return file

    def _clear(self) -> None:
        for pattern in ("layers.*", ".layers.*.part"):  # the second is of a process that was killed
            for path in self.directory.glob(pattern):
                path.unlink()
        for path in self.directory.glob(_PART + "*"):
            CalibrationJournal(path)._clear()
            (path / _STATE).unlink(missing_ok=True)
            with suppress(OSError):  # it has other files
                path.rmdir()

    def _path(self, number: int) -> Path:
        return self.directory / f"layers.{number}.npz"


def _flat(params: Params, prefix: str = "") -> dict[str, np.ndarray]:
    """Arrays of NumPy's own dtypes by name; a quantized weight is several arrays, and its scheme as JSON."""
    arrays: dict[str, np.ndarray] = {}
    for key, leaf in params.items():
        name = prefix + key
        if isinstance(leaf, dict):
            arrays |= _flat(leaf, name + ".")
        elif isinstance(leaf, QuantizedArray):
            if isinstance(leaf.scales, NestedScales):
                raise TypeError(f"{name}: a layer with nested scales is not calibrated")
            arrays[name + ":values"] = np.asarray(leaf.values.astype(jnp.int8))
            arrays[name + ":scales"] = np.asarray(leaf.scales.astype(jnp.float32))
            if leaf.zeros is not None:
                arrays[name + ":zeros"] = np.asarray(leaf.zeros)
            if leaf.permutation is not None:
                arrays[name + ":permutation"] = np.asarray(leaf.permutation)
            types = {"values": leaf.values.dtype.name, "scales": leaf.scales.dtype.name}
            arrays[name + ":scheme"] = np.array(json.dumps(asdict(leaf.scheme) | types))
        else:
            arrays[name] = np.asarray(leaf, np.float32)
    return arrays


def _nested(flat: dict[str, np.ndarray]) -> Params:
    params: Params = {}

    def put(name: str, leaf: Any) -> None:
        node = params
        *folders, last = name.split(".")
        for part in folders:
            node = node.setdefault(part, {})
        node[last] = leaf

    for name, array in flat.items():
        if name.endswith(":scheme"):
            name = name.removesuffix(":scheme")
            scheme = json.loads(str(array))
            parts = {part: flat.get(f"{name}:{part}") for part in ("values", "scales", "zeros", "permutation")}
            arrays = {part: jnp.asarray(array) for part, array in parts.items() if array is not None}
            for part in ("values", "scales"):
                arrays[part] = arrays[part].astype(scheme.pop(part))
            put(name, QuantizedArray(**arrays, scheme=Scheme(**scheme | {"block": tuple(scheme["block"])})))
        elif ":" not in name and name != _REPORT:
            put(name, jnp.asarray(array))
    return params
