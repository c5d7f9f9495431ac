"""Loaded weights: which models of this process can share them, and checks of how they are to be read."""

import importlib.util
import logging
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.extras import install_hint
from jaxinfer.quantization import Selection
from jaxinfer.store import find_model
from pallas_kernels.packed_matmul import unsupported

OF_ALIAS = "as the alias says"
_LOG = logging.getLogger(__name__)


def weights_key(
    model: str | Path,
    revision: str | None = None,
    quantize: str | None = OF_ALIAS,
    requantize: str | None = None,
    *,
    dtype: str = "auto",
    verify: bool | None = None,
    mesh: Mesh | None = None,
    activations: str = "float32",
) -> Hashable:
    """Equal for calls of `load_model` that give equal parameters: of the same files, unchanged, read alike."""
    named = find_model(model, revision, fetch=False)
    chosen = selection(quantize, {} if requantize else named.options)
    opening = {"requantize": requantize, "verify": verify}
    return files_key(named.path, dtype, chosen, mesh, opening, activations)


def files_key(
    path: Any, dtype: str, chosen: Selection | None, mesh: Mesh | None, opening: Mapping[str, Any], activations: str
) -> Hashable:
    """The key of weights that are read from these files."""
    if not isinstance(path, Path):  # in an object store: whether they have changed is not known
        return object()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(str(file), state.st_size, state.st_mtime_ns, state.st_ino) for file in files for state in (file.stat(),)]
    kinds = dtype, resolved_dtype(dtype), activations
    return (*states, *kinds, None if chosen is None else chosen.recipe, mesh, *sorted(opening.items()))


def resolved_dtype(dtype: str) -> str:
    """The dtype that a model is opened in on the default device."""
    return "float32" if dtype == "auto" and jax.default_backend() == "cpu" else dtype


def selection(quantize: str | None, settings: Mapping[str, str]) -> Selection | None:
    """The recipe that weights are rounded to: `quantize`, or else that of the alias's settings."""
    name = settings.get("quantize") if quantize == OF_ALIAS else quantize
    return None if name is None else Selection(name)


def check_not_rounded(file: Any, quantized: Mapping[tuple[str, ...], str], chosen: Selection | None) -> None:
    """Raises ValueError, with what makes it possible, if `chosen` would round what a GGUF file has quantized.

    Args:
      quantized: names of what the file has quantized, by path of the parameter.
    """
    names = [name for path, name in quantized.items() if path[0] == "layers"]
    if names and chosen is not None:
        others = f" and {len(names) - 1} others are" if len(names) > 1 else " is"
        raise ValueError(
            f"{file}: {names[0]!r}{others} quantized already, and quantize would round them again: that needs "
            "requantize='dense' (--requantize dense) as well, which makes them floating point first"
        )


def check_activations(activations: str, mesh: Mesh | None) -> None:
    """Raises ValueError where no products with packed weights could round activations."""
    if activations == "float32":
        return
    reason = f"it is for one device, and the mesh is {mesh}" if mesh is not None else unsupported(jax.default_backend())
    if reason is not None:
        is_plain = mesh is None and importlib.util.find_spec("numba") is None
        hint = f": {install_hint('cpu')}" if is_plain and jax.default_backend() == "cpu" else ""
        raise ValueError(f"activations={activations!r}: {reason}{hint}")


@cache
def tell_what_is_slower() -> None:
    """Logs, once, what a plain installation on a CPU lacks."""
    if jax.default_backend() == "cpu" and importlib.util.find_spec("numba") is None:
        _LOG.warning(
            "Numba is not installed: on this CPU, products with quantized and 16-bit weights, attention and decoding "
            f"are several times slower, and weights take more memory. Install it with: {install_hint('cpu')}"
        )
