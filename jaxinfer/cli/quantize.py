"""`jaxinfer quantize`: writes a checkpoint with quantized weights, calibrated on text."""

import hashlib
import math
import statistics
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.cli.command import UsageError, resumes, say
from jaxinfer.cli.options import as_json, given_values, overwrite
from jaxinfer.cli.output import write_report
from jaxinfer.cli.quantize_files import check_not_quantized, check_room, float_model, planned, write
from jaxinfer.cli.training_data import read_documents
from jaxinfer.options import MISSING, argument, describe, option
from jaxinfer.progress import Stage, is_shown
from jaxinfer.tables import table_text

if TYPE_CHECKING:
    import numpy as np

    from checkpoints_convert.checkpoint import Checkpoint, ParamPath
    from jaxinfer.calibration import AutoResult, CalibrationOptions, CalibrationResult, FloatModel, Keep, LayerReport
    from jaxinfer.calibration.inputs import CalibrationRows
    from jaxinfer.calibration.journal import CalibrationJournal
    from jaxinfer.quantization import QuantizedArray

_WEIGHTED = ("q4_0", "q4_k")  # GGUF's types that an importance matrix is for
_NUM_NOTES = 6  # printed; --json has all
_text = partial(option, None, group="The text")
_gptq = partial(option, None, group="GPTQ and auto")
_awq = partial(option, None, group="AWQ")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    source: str = argument(MISSING, "A checkpoint's folder, a GGUF file, a hub id, or demo.", "SRC")
    destination: Path = argument(
        MISSING, "Folder to write, or a .gguf file; it appears when it is complete and checked.", "DST"
    )
    to: Literal["compressed-tensors", "gguf"] = option("compressed-tensors", "The format to write.")
    type: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k"] | None = option(
        None, "With --to gguf: the type of linear layers' weights; default: q8_0."
    )
    method: Literal["rtn", "gptq", "awq", "smoothquant", "auto"] | None = option(
        None,
        "rtn rounds to nearest, smoothquant makes W8A8, auto is gptq with bits chosen by --max-kl; "
        "default: gptq, and rtn for GGUF.",
    )
    imatrix: Path | None = option(
        None,
        "llama.cpp's importance matrix: weights of the rounding error, for rtn and for GGUF's q4_0 and q4_k.",
        "FILE",
    )
    bits: int | None = option(None, "Bits of the weights; default: 4, and 8 for smoothquant.", "N", min=2, max=8)
    group_size: int | None = option(
        None, "Inputs that share a scale, -1 for all; default: 128, and all for 8 bits.", "N", min=-1
    )
    symmetric: bool = option(True, "Ranges centred on 0, or with a zero point each.", flag="--symmetric/--asymmetric")
    calibration: list[Path] | None = _text("A text file, or a folder of them; may be repeated.", "PATH")
    keep: list[str] | None = option(
        None,
        "Weights with other bits, by default 16; may be repeated: 'layers.0', '*.down_proj=8'.",
        "PATTERN[=BITS]",
    )
    max_kl: float | None = option(None, "With auto: KL divergence that may be lost, in nats per token.", "X")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of scales and of what is not quantized; auto is the checkpoint's."
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub id.", "TEXT")
    overwrite: bool = overwrite("Replace a checkpoint at DST.")
    as_json: bool = as_json("The report as one JSON object.")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of --calibration. None: not given."""

    num_rows: int | None = _text("Number of samples of the text; default: 128.", "N", "--samples", min=2)
    length: int | None = _text("Tokens of each sample; default: 512.", "N", min=2)
    seed: int | None = _text("Selects the samples; default: 0.", "N")


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of the methods that their groups name. None: not given."""

    act_order: bool | None = _gptq(
        "Quantize inputs with large activations first; default: yes.", flag="--act-order/--no-act-order"
    )
    static_groups: bool | None = _gptq(
        "Groups of neighbouring inputs; default: yes. Without them activations are gathered at run time, and "
        "compressed-tensors 0.20 does not open the result.",
        flag="--static-groups/--no-static-groups",
    )
    damping: float | None = _gptq("Added to the Hessian's diagonal, as a multiple of its mean; default: 0.01.", "X")
    search: bool | None = _gptq("Search for the scales of least error.", flag="--search-scales")
    duo_scaling: bool | None = _awq(
        "Scales depend on the weights too; default: yes.", flag="--duo-scaling/--no-duo-scaling"
    )
    clip: bool | None = _awq("Clip large weights; default: yes.", flag="--clip/--no-clip")
    alpha: float | None = option(
        None, "Share of the range that moves to the weights, 0..1; default: 0.8.", "X", group="SmoothQuant"
    )


def quantize(options: QuantizeOptions, text: TextOptions, own: MethodOptions) -> None:
    """Quantize a checkpoint's linear layers, and write them as compressed-tensors or GGUF.

    Layers are read, calibrated on samples of the text and kept in DST.quantizing one at a time; an interrupted run
    continues when the command is repeated. An eighth of the samples is held out to measure the loss of quality. Before
    DST appears, the checkpoint is loaded from the disk and its logits are compared.

    Example: jaxinfer quantize ./model ./model-int4 --method awq --bits 4 --calibration texts.txt
    """
    if options.to == "gguf":
        _check_gguf_usage(options)
    options = replace(options, method=options.method or ("rtn" if options.to == "gguf" else "gptq"))
    _check_usage(options)
    for name in given_values(own):
        methods = str(describe(MethodOptions)[name].group).lower()
        if options.method not in methods.split(" and "):
            raise UsageError(f"{_flag(own, name)} is of --method {methods}, not of {options.method}")
    if not options.calibration and (given := given_values(text)):
        raise UsageError(f"{_flag(text, next(iter(given)))} is of --calibration, which is not given")
    with Stage("starting"):
        from checkpoints_convert.load import open_checkpoint
        from checkpoints_convert.staging import check_destination
        from jaxinfer.calibration.journal import CalibrationJournal
        from jaxinfer.calibration.options import Keep

    try:
        kept = tuple(map(Keep.parse, options.keep or ()))
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from None
    (path, requantize), destination = _source(options), options.destination
    if options.to == "gguf":
        with open_checkpoint(path, requantize=requantize) as opened:
            opened.check_head()
            report = _write_gguf(opened, options)
        write_report(report, gguf_summary, as_json=options.as_json)
        return
    check_destination(destination, overwrite=options.overwrite, source=path)
    work = destination.with_name(destination.name + ".quantizing")
    with open_checkpoint(path, requantize=requantize) as opened:
        opened.check_head()
        companions = opened.companions()  # as they are now: one that is gone when it is copied is an error
        with CalibrationJournal(work / "layers") as journal, Stage("preparing"):
            check_not_quantized(opened)
            calibration = _calibration_options(options, opened, kept, given_values(own))
            check_room(opened, planned(opened, calibration), calibration.dtype, work)
            rows = _read_rows(path, options.calibration, text)
            with resumes("after the last complete layer"):
                fingerprint = hashlib.sha256(opened.fingerprint().encode()).hexdigest()
                model = float_model(opened, fingerprint)
                result, auto = _run(model, calibration, options.max_kl, rows, journal)
            calibration = calibration if auto is None else auto.options
            weights = planned(opened, calibration)
            held_out = None if rows is None else rows.held_out
            difference = write(
                opened,
                companions,
                weights,
                result,
                calibration.dtype,
                held_out,
                journal,
                work,
                destination,
                overwrite=options.overwrite,
            )
            report = report_of(opened, calibration, weights, result, auto, destination, difference)
    write_report(report, summary, as_json=options.as_json)


def _check_usage(options: QuantizeOptions) -> None:
    method, max_kl = options.method, options.max_kl
    if options.to != "gguf" and options.type is not None:
        raise UsageError("--type is of --to gguf")
    if options.imatrix is not None and method != "rtn":
        raise UsageError(f"--imatrix is of --method rtn and --to gguf; {method} measures the activations itself")
    if options.group_size == 0:
        raise UsageError("--group-size is a number of inputs, or -1 for all, not 0")
    if method != "rtn" and not options.calibration:
        raise UsageError(f"--method {method} needs --calibration PATH, the text to calibrate on")
    if (method == "auto") != (max_kl is not None):
        raise UsageError("--max-kl X is needed by --method auto, and by no other")
    if max_kl is not None and not max_kl > 0:
        raise UsageError(f"--max-kl must be positive, got {max_kl}")
    if method == "smoothquant" and options.bits not in (None, 8):
        raise UsageError(f"--method smoothquant makes weights of 8 bits, not {options.bits}")


def _check_gguf_usage(options: QuantizeOptions) -> None:
    """Raises UsageError for options that have no meaning for a GGUF file."""
    if options.method not in (None, "rtn"):
        raise UsageError(f"--to gguf rounds to nearest: --method {options.method} is not applied there")
    given = {
        "--bits": options.bits,
        "--group-size": options.group_size,
        "--calibration": options.calibration,
        "--keep": options.keep,
        "--max-kl": options.max_kl,
        "--asymmetric": None if options.symmetric else True,
        "--dtype": None if options.dtype == "auto" else options.dtype,
    }
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"{flag} is not applied by --to gguf: --type names the type of the weights")
    if options.imatrix is not None and options.type not in _WEIGHTED:
        raise UsageError(f"--imatrix is for --type q4_0 and q4_k; {options.type or 'q8_0'} is rounded without weights")


def _flag(options: Any, name: str) -> str:
    flags = describe(type(options))[name].flags
    return flags[0].partition("/")[0] if flags else f"--{name.replace('_', '-')}"


def _source(options: QuantizeOptions) -> tuple[Path, str | None]:
    """The checkpoint's folder, or a GGUF file, and what its quantized weights are read as: dense, which is said."""
    from checkpoints_convert.gguf.index import find_gguf
    from checkpoints_convert.load import open_checkpoint
    from jaxinfer.store import find_path

    path = find_path(options.source, options.revision)
    if find_gguf(path) is None:
        return path, None
    with open_checkpoint(path) as opened:
        num_quantized = len(opened.quantized())
    if num_quantized:
        say(f"{path}: {num_quantized} weights are quantized already, and are dequantized to be rounded again")
    return path, "dense"


def _calibration_options(
    options: QuantizeOptions, source: "Checkpoint", kept: "tuple[Keep, ...]", own: dict[str, Any]
) -> "CalibrationOptions":
    from jaxinfer.calibration import CalibrationOptions
    from jaxinfer.quantization.gptq import GptqOptions

    gptq = {field.name: own.pop(field.name) for field in fields(GptqOptions) if field.name in own}
    return CalibrationOptions(
        method="gptq" if options.method in ("auto", None) else options.method,
        importance=None if options.imatrix is None else _importance(options.imatrix, source),
        bits=options.bits or (8 if options.method == "smoothquant" else 4),
        group_size=None if options.group_size == -1 else options.group_size or "auto",
        symmetric=options.symmetric,
        keep=kept,
        dtype=source.config.dtype if options.dtype == "auto" else options.dtype,
        gptq=GptqOptions(**gptq),
        **own,
    )


def _importance(path: Path, source: "Checkpoint") -> "dict[str, np.ndarray]":
    """Weights of the rounding error by the names of the linear layers."""
    from checkpoints_convert.gguf.imatrix import by_parameter, read_imatrix
    from jaxinfer.calibration.driver import all_linears

    importance = by_parameter(read_imatrix(path), source.config, path)
    named = {".".join(target[:-1]): array for target, array in importance.items() if target[0] == "layers"}
    linears = all_linears(source.config)
    if missing := [name for name in linears if name not in named]:
        say(f"warning: {len(missing)} of {len(linears)} linear layers are not in {path}, such as {missing[0]}: they are"
            " rounded to nearest")  # fmt: skip
    return named


def _read_rows(path: Path, calibration: list[Path] | None, text: TextOptions) -> "CalibrationRows | None":
    from jaxinfer.calibration.inputs import split_rows
    from jaxinfer.loaded_tokenizers import tokenizer_of

    if not calibration:
        return None
    documents = read_documents(calibration, "--calibration")
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        raise UsageError(f"{path} has no tokenizer, which --calibration needs")
    with Stage("reading the text"):
        encoded = [tokenizer.encode_content(document) for document in documents if document]
    try:
        return split_rows(
            encoded, tokenizer.eos_token_id, **{"num_rows": 128, "length": 512, "seed": 0, **given_values(text)}
        )
    except ValueError as error:
        raise UsageError(f"--calibration: {error}") from None


def _run(
    model: "FloatModel",
    options: "CalibrationOptions",
    max_kl: float | None,
    rows: "CalibrationRows | None",
    journal: "CalibrationJournal",
) -> "tuple[CalibrationResult, AutoResult | None]":
    from jaxinfer.calibration import quantize_model, quantize_within

    num_layers = model.config.num_layers
    tokens, held_out = (None, None) if rows is None else (rows.calibration, rows.held_out)
    if max_kl is None:
        with Stage("quantizing", num_layers, "layer") as stage:
            report = partial(_show_layer, stage)
            return quantize_model(model, options, tokens, held_out, journal=journal, report=report), None
    if rows is None:
        raise UsageError("--max-kl needs --calibration")
    with Stage("measuring", num_layers, "layer") as stage:
        auto = quantize_within(
            model,
            options,
            max_kl,
            rows.calibration,
            rows.held_out,
            journal=journal,
            report=partial(_show_layer, stage),
            report_part=lambda layer: stage.update(),
            report_round=lambda bits: stage.restart("quantizing", num_layers),
        )
    return auto.result, auto


def _show_layer(stage: Stage, done: "LayerReport") -> None:
    errors = [(linear.error, linear.rounded) for linear in done.errors.values() if linear.error and linear.rounded]
    if errors:
        mean, nearest = map(statistics.mean, zip(*errors, strict=True))
        stage.describe(f"layer {done.number}: output error {mean:.2g}, to nearest {nearest:.2g}")
    if is_shown():
        for note in done.notes:
            say(f"layer {done.number}: {note}")
    stage.update()


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
    facts = {
        "wrote": report["path"],
        "weights": f"{report['method']}: {schemes or 'none quantized'}",
        "bytes": f"{report['num_bytes']:,} of {report['source_bytes']:,}",
    }
    if report["num_resumed"]:
        facts["resumed"] = f"{report['num_resumed']} layers were finished before"
    if "auto" in report:
        counts = ", ".join(f"{count} with {bits}" for bits, count in report["auto"]["counts"].items())
        facts["bits"] = f"of half layers: {counts}"
    errors = [
        (linear["error"], linear["rounded"])
        for layer in report["layers"]
        for linear in layer["linears"].values()
        if linear["error"] is not None
    ]
    if errors:
        mean, nearest = map(statistics.mean, zip(*errors, strict=True))
        facts["output error"] = f"{mean:.3g} of the outputs' squares; {nearest:.3g} rounded to nearest"
    notes = [(f"layer {layer['layer']}", note) for layer in report["layers"] for note in layer["notes"]]
    rows = [*facts.items(), *notes[:_NUM_NOTES]]
    if len(notes) > _NUM_NOTES:
        rows.append(("", f"and {len(notes) - _NUM_NOTES} more such notes, all of which --json gives"))
    if (quality := report["quality"]) is not None:
        rows += [
            ("held out", f"{quality['num_tokens']:,} tokens"),
            ("KL per token", f"{quality['kl']:.3g} nats"),
            ("perplexity", f"{quality['perplexity']:.4g}, before {quality['float_perplexity']:.4g}"),
            ("same top token", f"{100 * quality['top1_agreement']:.2f} % of positions"),
        ]
    rows.append(("loaded again", f"logits differ by at most {report['max_logit_difference']:.2g}"))
    return table_text(("", ""), rows, num_left=2)


def _write_gguf(source: "Checkpoint", options: QuantizeOptions) -> dict[str, Any]:
    """Writes the file; returns its report: path, bytes, tensors by type, relative errors and notes."""
    from checkpoints_convert.gguf.imatrix import read_imatrix
    from checkpoints_convert.gguf.write import save_gguf

    kind = (options.type or "q8_0").upper()
    importance = None if options.imatrix is None else read_imatrix(options.imatrix)
    num_tensors = sum(map(len, source.units().values()))
    with Stage("writing", num_tensors, "tensor") as stage:
        written = save_gguf(
            source,
            options.destination,
            kind,
            importance=importance,
            overwrite=options.overwrite,
            report=lambda name: stage.update(),
        )
    return {
        "path": options.destination,
        "method": "rtn",
        "type": kind.lower(),
        "num_bytes": written.num_bytes,
        "source_bytes": source.num_bytes(),
        "kinds": written.kinds,
        "errors": written.errors,
        "notes": list(written.notes),
    }


def gguf_summary(report: dict[str, Any]) -> str:
    """The report of `_write_gguf` in a few lines."""
    errors = report["errors"].values()
    rows = [
        ("wrote", str(report["path"])),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in report["kinds"].items())),
        ("bytes", f"{report['num_bytes']:,} of {report['source_bytes']:,}"),
    ]
    if errors:
        mean = math.sqrt(statistics.mean(error**2 for error in errors))
        rows.append(("rounding error", f"{mean:.3g} of the weights, at most {max(errors):.3g}"))
    rows += [("note", note) for note in report["notes"]]
    return table_text(("", ""), rows, num_left=2)
