"""Bits for each part of a model, as few as a budget of quality allows."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.calibration.driver import (
    CalibrationResult,
    LayerReport,
    check_input,
    digest,
    fingerprint_of,
    quantize_model,
)
from jaxinfer.calibration.float_model import FloatModel
from jaxinfer.calibration.journal import CalibrationJournal
from jaxinfer.calibration.options import CalibrationOptions, Keep
from jaxinfer.calibration.sensitivity import Sensitivity, choose_bits, measure_sensitivity

_MAX_ROUNDS = 8
_MARGIN = 0.9  # of the budget that the next choice aims at, since a sum of KLs only approximates theirs together


@dataclass(frozen=True)
class AutoResult:
    """Attributes:
    bits: of each half of each decoder layer. kls: measured after each round, the last of which is the result's.
    """

    result: CalibrationResult
    options: CalibrationOptions
    bits: dict[str, int]
    sensitivity: Sensitivity
    kls: list[float]

    def counts(self) -> dict[int, int]:
        """How many halves of layers have how many bits."""
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

    Parts are measured alone, rounded to nearest. The first choice is the fewest bits everywhere; while the model made
    with a choice has a larger KL, the next is made for a sum of the parts' KLs that is smaller by as much. What
    `options.keep` names has the bits it says.

    Arguments are those of `quantize_model`; each round has a part of the journal. report_part and report_round are
    called after each layer that was measured, and with each choice before it is tried.

    Raises:
      ValueError: a budget that is not positive, or that no choice meets; as `quantize_model`.
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
