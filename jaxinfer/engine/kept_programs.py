"""Programs that are traced once and kept: a later process reads StableHLO (`jax.export`) and traces nothing.

To trace the programs of a start needs Flax and Numba, whose imports take most of a second together, and about another
one; to read them takes half a second. XLA then compiles what was read, or takes it from JAX's own cache, which checks
that it fits. The key of an entry has all that its tracing depends on:
the arguments' shapes and structures, static arguments, sources, packages, settings, device, and kernels.
"""

import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax._src import config
from jax._src.export import _export
from jax.extend.core import Primitive
from jax.interpreters import mlir

from cpu_kernels import kernels
from jaxinfer.kept_files import KeptFiles, key_of, sources_key
from jaxinfer.quantization.matmul import KINDS
from pallas_kernels.platform import current_platform

_LOG = logging.getLogger(__name__)
_OURS = ("jaxinfer", "pallas_kernels", "cpu_kernels", "jax", "jaxlib", "numpy")
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "numba", "llvmlite")
_NO_PART_OF_TRACES = re.compile(r"cache|log|dump|profil|traceback|debug|check_tracer_leaks|compilation")
is_on = True  # the suite turns it off: its programs are traced, so that it tests the sources that it runs


def kept(
    function: Callable[..., Any], static_argnums: Sequence[int], outputs: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, for `jax.jit` with the same static arguments: where it is traced, an entry is called in its place.

    outputs: of the same arguments, a tree of the structure of its result.

    An entry is made where there is none, and is called at once, so that what XLA compiles is the same in all processes.
    Calls with named arguments are traced.
    """

    @wraps(function)
    def traced(*arguments: Any, **named: Any) -> Any:
        files = KeptFiles.of("programs") if is_on and not named and _fits_device() else None
        if files is None:
            return function(*arguments, **named)
        places = [place for place in range(len(arguments)) if place not in static_argnums]
        leaves, structure = jax.tree.flatten([arguments[place] for place in places])
        key = _key(function.__name__, arguments, static_argnums, leaves, structure)
        if key is None:
            return function(*arguments)
        program = _read(files, key, leaves)
        if program is None:
            program = _make(files, key, function, outputs, arguments, places, structure, leaves)
        if program is None:
            return function(*arguments)
        return jax.tree.unflatten(jax.tree.structure(outputs(*arguments)), _call.bind(*leaves, exported=program))

    return traced


# `Exported.call` without derivatives, and with results that are on no device by name, as those of a traced program are.
# Programs of both kinds of arguments are compiled apart: sampling was, once for `logits` of either kind.
_call = Primitive("kept_program")
_call.multiple_results = True
_call.def_abstract_eval(lambda *_, exported: exported.out_avals)
mlir.register_lowering(_call, _export._call_exported_lowering)


def _fits_device() -> bool:
    """Tells whether programs are for the CPU of this process, alone. For others nothing was measured yet."""
    return current_platform() == "cpu" and jax.default_backend() == "cpu" and jax.device_count() == 1


def _read(files: KeptFiles, key: str, leaves: Sequence[Any]) -> export.Exported | None:
    if (content := files.read(key)) is None:
        return None
    try:
        (size,) = struct.unpack_from("<I", content)
        needed = json.loads(content[4 : 4 + size])
        program = export.deserialize(bytearray(content[4 + size :]))
        if [(aval.shape, aval.dtype) for aval in program.in_avals] != [(leaf.shape, leaf.dtype) for leaf in leaves]:
            raise ValueError("its arguments are others")
    except Exception as error:  # of flatbuffers, struct, json, or JAX
        files.remove(key, f"of no use ({error})")
        return None
    # Kernels that are not kept, because others took their place, are compiled while the program is traced.
    return program if kernels.load_kept(needed) else None


def _make(
    files: KeptFiles,
    key: str,
    function: Callable[..., Any],
    outputs: Callable[..., Any],
    arguments: tuple[Any, ...],
    places: Sequence[int],
    structure: Any,
    leaves: Sequence[Any],
) -> export.Exported | None:
    def flat(*leaves: Any) -> list[Any]:
        given = list(arguments)
        for place, value in zip(places, jax.tree.unflatten(structure, leaves), strict=True):
            given[place] = value
        result = function(*given)
        wanted, actual = jax.tree.structure(outputs(*given)), jax.tree.structure(result)
        if actual != wanted:
            raise RuntimeError(f"{function.__name__} has results of the structure {actual}, not {wanted}")
        return jax.tree.leaves(result)

    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    lowered = jax.jit(flat)
    try:
        program = export.export(lowered, disabled_checks=_Allowed())(*avals)
        needed = json.dumps(kernels.loaded()).encode()
        files.write(key, struct.pack("<I", len(needed)) + needed + program.serialize())
    except ValueError as error:  # what JAX cannot export
        _LOG.info("%s is not kept: %s", function.__name__, error)
        return None
    return program


class _Allowed(Sequence[export.DisabledSafetyCheck]):
    """Our kernels, which JAX does not know to be the same in later versions: they are known when they are traced."""

    def _checks(self) -> list[export.DisabledSafetyCheck]:
        return [
            export.DisabledSafetyCheck.custom_call(name) for name, index in kernels.loaded().items() if index is None
        ]

    def __len__(self) -> int:
        return len(self._checks())

    def __getitem__(self, index: Any) -> Any:
        return self._checks()[index]


def _key(
    name: str, arguments: tuple[Any, ...], static_argnums: Sequence[int], leaves: Sequence[Any], structure: Any
) -> str | None:
    """None where something has no description that another process shares."""
    static = [_described(arguments[place]) for place in static_argnums if place < len(arguments)]
    shapes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
    text = "\n".join([name, *static, str(structure), *shapes])
    plugged = _plugged_in({*_modules(arguments), *(kind.__module__ for kind in KINDS)})
    if plugged is None or re.search(r"(?: at |=)0x[0-9a-f]{6,}", text):
        return None
    return key_of(text, *plugged, *_surroundings(), *_settings())


def _modules(value: Any) -> Iterator[str]:
    """Names of the modules of the dataclasses in a value."""
    parts: Iterable[Any] = value if isinstance(value, tuple | list) else ()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__module__
        parts = vars(value).values()
    for part in parts:
        yield from _modules(part)


def _plugged_in(modules: set[str]) -> list[str] | None:
    """Sources of the modules that are no part of the product: a policy, draft or type of weights that a user plugged
    in. None where a module has no file."""
    sources = []
    for name in sorted(name for name in modules if name.split(".")[0] not in _OURS):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or not Path(file).is_file():
            return None
        sources.append(f"{name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}")
    return sources


def _described(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={_described(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__module__}.{type(value).__qualname__}({', '.join(fields)})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value)


@cache
def _surroundings() -> tuple[str, ...]:
    """The part of a key that stays the same in a process."""
    folders = (Path(__file__).parents[2] / name for name in ("jaxinfer", "pallas_kernels"))  # `machine` has cpu_kernels
    packages = (f"{name} {_version(name)}" for name in _PACKAGES)
    environment = (
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("XLA_", "JAX_", "NUMBA_")) and not _NO_PART_OF_TRACES.search(name.lower())
    )
    device = jax.devices()[0]
    facts = (device.device_kind, device.client.platform_version, platform.machine(), sys.version)
    # Without the compiler of CPU kernels, which an installation for another device may lack, no program has one.
    processor = kernels.machine() if importlib.util.find_spec("llvmlite") else ()
    return sources_key(*folders), *processor, *packages, *environment, *map(str, facts)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _settings() -> tuple[str, ...]:
    """JAX's configuration, as far as programs may depend on it: of the process, and of the `with` around the call."""
    values = sorted(jax.config.values.items())
    of_process = (f"{name}={value}" for name, value in values if not _NO_PART_OF_TRACES.search(name))
    of_call = (text for text in map(str, config.trace_context()) if " at 0x" not in text)
    return *of_process, *of_call
