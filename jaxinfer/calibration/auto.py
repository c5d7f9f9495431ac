"""Choosing the bits of each part of a model: as few as a limit on the KL divergence allows."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.driver import (
    CalibrationResult,
    LayerReport,
    check_input,
    digest,
    fingerprint_of,
    quantize_model,
)
from jaxinfer.calibration.inputs import FloatModel, in_chunks
from jaxinfer.calibration.journal import CalibrationJournal
from jaxinfer.calibration.layer_state import dequantized, find, linear_names
from jaxinfer.calibration.options import KEEP_AS_IS, CalibrationOptions, Keep
from jaxinfer.calibration.quality import compare
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
    """Bits for each part, so that the sum of their KLs is at most `max_kl`, with few bytes (greedily).

    Starts with the fewest bits everywhere and, while the sum is too large, increases those of the part whose KL falls
    most per byte.
    """
    kl, sizes = sensitivity.kl, sensitivity.num_bytes
    chosen = {part: min(by_bits) for part, by_bits in kl.items()}

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
    """float32 parameters with the weights `names` rounded, and the quantized bytes of these."""
    result = jax.tree.map(lambda leaf: leaf, params)
    size = 0
    for name in names:
        weight = quantize(find(params, name)["weight"], options.recipe(bits), scale_dtype=options.dtype)
        size += weight.num_bytes
        find(result, name)["weight"] = weight
    return dequantized(result), size


def _run(program: LayerProgram, params: Params, chunks: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(program.forward(params, chunk)) for chunk in chunks]


_MAX_ROUNDS = 8
_MARGIN = 0.9  # of the KL that the next choice aims at: a sum of KLs only approximates the KL of all parts together


@dataclass(frozen=True)
class AutoResult:
    """Attributes:
    bits: of each half of each decoder layer. kls: measured after each round; the last is the result's.
    """

    result: CalibrationResult
    options: CalibrationOptions
    bits: dict[str, int]
    sensitivity: Sensitivity
    kls: list[float]

    def counts(self) -> dict[int, int]:
        """Number of halves of layers by bits."""
        return dict(sorted(Counter(self.bits.values()).items()))


def quantize_within(
    model: FloatModel,
    options: CalibrationOptions,
    max_kl: float,
    tokens: np.ndarray | None,
    held_out: np.ndarray,
    *,
    journal: CalibrationJournal | None = None,
    report: Callable[[LayerReport], None] = lambda done: None,
    report_part: Callable[[int], None] = lambda layer: None,
    report_round: Callable[[dict[str, int]], None] = lambda bits: None,
) -> AutoResult:
    """Quantizes with 16, 8 or `options.bits` bits for each half of a layer, so that KL(float || quantized) measured on
    `held_out` is at most `max_kl`.

    The KL of each part alone is measured with rounding to nearest. The first choice is the fewest bits everywhere.
    While the quantized model has a larger KL than `max_kl`, the next choice aims at a sum of the parts' KLs that is
    smaller by the same factor. Weights named by `options.keep` have the bits given there.

    Arguments are those of `quantize_model`; each round has a part of the journal. report_part is called after each
    layer that was measured, report_round with each choice before it is tried.

    Raises:
      ValueError: `max_kl` is not positive, or no choice meets it; as `quantize_model`.
    """
    if not max_kl > 0:
        raise ValueError(f"max_kl must be positive, got {max_kl}")
    if options.method == "smoothquant":
        raise ValueError("smoothquant has 8 bits everywhere: there is nothing to choose")
    check_input(model.config, options, tokens, held_out)
    if journal is not None:
        journal.begin(fingerprint_of(model, options, tokens) | {"max_kl": max_kl, "held_out": digest(held_out)})
    candidates = sorted({options.bits, 8})
    sensitivity = measure_sensitivity(model, options, held_out, candidates, report=report_part)
    budget, kls = float("inf"), []
    for _ in range(_MAX_ROUNDS):
        bits = choose_bits(sensitivity, budget)
        chosen = replace(options, keep=(*(Keep(part, count) for part, count in bits.items()), *options.keep))
        report_round(bits)
        part = None if journal is None else journal.part(f"round-{len(kls) + 1}")
        result = quantize_model(model, chosen, tokens, held_out, journal=part, report=report)
        kls.append(result.quality.kl if result.quality is not None else float("nan"))
        if kls[-1] <= max_kl:
            return AutoResult(result, chosen, bits, sensitivity, kls)
        predicted = sum(sensitivity.kl[part][count] for part, count in bits.items())
        if not predicted > 0:
            break
        budget = _MARGIN * min(predicted, predicted * max_kl / kls[-1])
    raise ValueError(
        f"no choice of bits had a KL of at most {max_kl:g}: measured {', '.join(f'{kl:.4g}' for kl in kls)}; "
        f"allow more, or keep less quantized"
    )
