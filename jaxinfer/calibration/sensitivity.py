"""How much each part of a model suffers from few bits, and how to spend bits under a budget of quality."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.float_model import FloatModel, in_chunks
from jaxinfer.calibration.options import KEEP_AS_IS, CalibrationOptions
from jaxinfer.calibration.quality import compare
from jaxinfer.calibration.work import dequantized, find, linear_names
from jaxinfer.models import Params
from jaxinfer.quantization import quantize

# Half a decoder layer: what engines fuse, such as q, k and v, keeps the same bits.
Part = str  # such as "layers.0.attention"


@dataclass(frozen=True)
class Sensitivity:
    """Attributes:
    kl: KL(float || quantized) in nats per token with that part alone at that many bits, rounded to nearest.
    num_bytes: of the part's weights and scales.
    """

    kl: Mapping[Part, Mapping[int, float]]
    num_bytes: Mapping[Part, Mapping[int, int]]


def measure_sensitivity(
    model: FloatModel,
    options: CalibrationOptions,
    held_out: np.ndarray,
    candidates: Sequence[int],
    *,
    report: Callable[[int], None] = lambda layer: None,
) -> Sensitivity:
    """Rounds one half of one decoder layer at a time, and measures what becomes of the next token.

    Every layer is read once: the hidden states of all variants go through it together, so that those of
    2 * layers * candidates variants are held on the host.

    Args:
      held_out: int32 [rows, T]. candidates: numbers of bits, other than 16. report: called after each layer.
    """
    config, exact = model.config, model.embedded(held_out)
    variants: dict[tuple[Part, int], list[np.ndarray]] = {}
    num_bytes: dict[Part, dict[int, int]] = {}
    for number in range(config.num_layers):
        program, params = LayerProgram.of(config, number), model.layer(number)
        variants = {key: _run(program, params, chunks) for key, chunks in variants.items()}
        parts = dict.fromkeys(name.partition(".")[0] for name in linear_names(program))
        for part in parts:
            names = [name for name in linear_names(program) if name.startswith(part + ".")]
            key = f"layers.{number}.{part}"
            num_bytes[key] = {KEEP_AS_IS: sum(2 * find(params, name)["weight"].size for name in names)}
            for bits in candidates:
                rounded, size = _rounded(params, names, options, bits)
                num_bytes[key][bits] = size
                variants[key, bits] = _run(program, rounded, exact)
        exact = _run(program, params, exact)
        report(number)
    rest = model.without_layers()
    kl: dict[Part, dict[int, float]] = {part: {KEEP_AS_IS: 0.0} for part in num_bytes}
    for (part, bits), chunks in variants.items():
        kl[part][bits] = compare(config, rest, rest, zip(exact, chunks, in_chunks(held_out), strict=True)).kl
    return Sensitivity(kl, num_bytes)


def choose_bits(sensitivity: Sensitivity, max_kl: float) -> dict[Part, int]:
    """Bits for each part, so that the sum of their KLs is at most `max_kl` and the bytes are few.

    Begins with the fewest bits everywhere and, while the sum is too large, gives more to the part that gains most KL
    for a byte.
    """
    kl, sizes = sensitivity.kl, sensitivity.num_bytes
    chosen = {part: min(found) for part, found in kl.items()}

    def gain(part: Part, bits: int) -> float:
        bytes_more = sizes[part][bits] - sizes[part][chosen[part]]
        return (kl[part][chosen[part]] - kl[part][bits]) / max(bytes_more, 1)

    while sum(kl[part][bits] for part, bits in chosen.items()) > max_kl:
        upgrades = [(part, bits) for part in kl for bits in kl[part] if bits > chosen[part]]
        if not upgrades:
            break
        part, bits = max(upgrades, key=lambda upgrade: gain(*upgrade))
        chosen[part] = bits
    return chosen


def _rounded(params: Params, names: list[str], options: CalibrationOptions, bits: int) -> tuple[Params, int]:
    """float32 parameters with some weights rounded, and the bytes these take."""
    result = jax.tree.map(lambda leaf: leaf, params)
    size = 0
    for name in names:
        weight = quantize(find(params, name)["weight"], options.recipe(bits), scale_dtype=options.dtype)
        size += weight.num_bytes
        find(result, name)["weight"] = weight
    return dequantized(result), size


def _run(program: LayerProgram, params: Params, chunks: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(program.forward(params, chunk)) for chunk in chunks]
