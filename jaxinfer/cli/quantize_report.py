"""What `jaxinfer quantize` reports: as JSON, and for people."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints_convert.checkpoint import Checkpoint, ParamPath
    from jaxinfer.calibration import AutoResult, CalibrationOptions, CalibrationResult
    from jaxinfer.quantization import QuantizedArray

_NUM_NOTES = 6  # that people are told


def report_of(
    source: "Checkpoint",
    options: "CalibrationOptions",
    weights: "dict[ParamPath, QuantizedArray]",
    result: "CalibrationResult",
    auto: "AutoResult | None",
    destination: Path,
    difference: float,
) -> dict[str, Any]:
    """Options, schemes, sizes in bytes, errors of each linear layer and quality.

    Args:
      weights: what is quantized, as written. difference: of logits, after loading.
    """
    from jaxinfer.quantization.tree import describe_scheme

    report = {
        "path": destination,
        "method": options.method if auto is None else "auto",
        "bits": options.bits,
        "symmetric": options.symmetric,
        "num_quantized": len(weights),
        "schemes": dict(Counter(map(describe_scheme, weights.values()))),
        "num_bytes": sum(file.stat().st_size for file in destination.glob("*.safetensors")),
        "source_bytes": source.num_bytes(),
        "num_resumed": sum(layer.is_resumed for layer in result.layers),
        "max_logit_difference": difference,
        "quality": None if result.quality is None else result.quality.to_dict(),
        "layers": [
            {
                "layer": layer.number,
                "divergence": layer.divergence,
                "linears": {
                    name: {"bits": error.bits, "error": error.error, "rounded": error.rounded}
                    | ({"num_experts": error.num_experts, "num_few": error.num_few} if error.num_experts else {})
                    for name, error in layer.errors.items()
                },
                "notes": layer.notes,
            }
            for layer in result.layers
        ],
    }
    if auto is not None:
        report["auto"] = {"bits": auto.bits, "kls": auto.kls, "counts": auto.counts()}
    return report


def summary(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    schemes = "; ".join(f"{count} {scheme}" for scheme, count in report["schemes"].items())
    lines = [
        f"wrote          {report['path']}",
        f"weights        {report['method']}: {schemes or 'none quantized'}",
        f"bytes          {report['num_bytes']:,} of {report['source_bytes']:,}",
    ]
    if report["num_resumed"]:
        lines.append(f"resumed        {report['num_resumed']} layers were finished before")
    if "auto" in report:
        counts = ", ".join(f"{count} with {bits}" for bits, count in report["auto"]["counts"].items())
        lines.append(f"bits           of half layers: {counts}")
    errors = [
        (linear["error"], linear["rounded"])
        for layer in report["layers"]
        for linear in layer["linears"].values()
        if linear["error"] is not None
    ]
    if errors:
        mean, nearest = (sum(values) / len(errors) for values in zip(*errors, strict=True))
        lines.append(f"output error   {mean:.3g} of the outputs' squares; {nearest:.3g} rounded to nearest")
    notes = [(layer["layer"], note) for layer in report["layers"] for note in layer["notes"]]
    lines += [f"layer {number:<8} {note}" for number, note in notes[:_NUM_NOTES]]
    if len(notes) > _NUM_NOTES:
        lines.append(f"               and {len(notes) - _NUM_NOTES} more such notes, all of which --json gives")
    if (quality := report["quality"]) is not None:
        lines += [
            f"held out       {quality['num_tokens']:,} tokens",
            f"KL per token   {quality['kl']:.3g} nats",
            f"perplexity     {quality['perplexity']:.4g}, before {quality['float_perplexity']:.4g}",
            f"same top token {100 * quality['top1_agreement']:.2f} % of positions",
        ]
    lines.append(f"loaded again   logits differ by at most {report['max_logit_difference']:.2g}")
    return "\n".join(lines) + "\n"
