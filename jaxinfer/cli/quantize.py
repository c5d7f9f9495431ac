"""`jaxinfer quantize`: a checkpoint with weights of few bits, made by looking at what goes through it."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxinfer.cli.command import INTERRUPTED, UsageError, say
from jaxinfer.cli.distill import read_documents
from jaxinfer.cli.output import shows_progress, waiting, write_json, write_text
from jaxinfer.cli.quantize_checks import check_not_quantized, check_room, planned
from jaxinfer.cli.quantize_report import report_of, summary
from jaxinfer.cli.quantize_write import rest_of, unit_reader, write

if TYPE_CHECKING:
    from checkpoints_convert.checkpoint import Checkpoint
    from jaxinfer.calibration import AutoResult, CalibrationOptions, CalibrationResult, FloatModel, LayerReport
    from jaxinfer.calibration.inputs import CalibrationRows
    from jaxinfer.calibration.journal import CalibrationJournal

_TEXT = "The text"
_GPTQ, _AWQ, _SMOOTHQUANT = "GPTQ and auto", "AWQ", "SmoothQuant"


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint's folder, a hub id, or demo.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; it appears when it is checked.")],
    method: Annotated[
        Literal["rtn", "gptq", "awq", "smoothquant", "auto"],
        typer.Option(help="rtn rounds to nearest, smoothquant makes W8A8, auto is gptq with bits chosen by --max-kl."),
    ] = "gptq",
    bits: Annotated[
        int | None, typer.Option(metavar="N", min=2, max=8, help="Of the weights; 4, and 8 for smoothquant.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=-1, help="Inputs that share a scale, -1 for all; 128, and all for 8 bits."),
    ] = None,
    symmetric: Annotated[
        bool,
        typer.Option("--symmetric/--asymmetric", metavar="", help="Ranges centred on 0, or with a zero point each."),
    ] = True,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A text file, or a folder of them; may be repeated.", rich_help_panel=_TEXT),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Pieces of the text to look at; 128.", rich_help_panel=_TEXT)
    ] = None,
    length: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Tokens of each piece; 512.", rich_help_panel=_TEXT)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Which pieces they are; 0.", rich_help_panel=_TEXT)
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN[=BITS]",
            help="Weights with other bits, 16 if not said; may be repeated: 'layers.0', '*.down_proj=8'.",
        ),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(metavar="X", help="With auto: nats per token that may be lost.")
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option(
            "--act-order/--no-act-order", metavar="", help="Large activations first; yes.", rich_help_panel=_GPTQ
        ),
    ] = None,
    static_groups: Annotated[
        bool | None,
        typer.Option(
            "--static-groups/--no-static-groups",
            metavar="",
            help="Groups of neighbours; yes. Without, activations are gathered at run time, and "
            "compressed-tensors 0.20 does not open the result.",
            rich_help_panel=_GPTQ,
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(metavar="X", help="Added to the Hessian's diagonal, times its mean; 0.01.", rich_help_panel=_GPTQ),
    ] = None,
    search_scales: Annotated[
        bool | None,
        typer.Option("--search-scales", metavar="", help="Scales of least error, by search.", rich_help_panel=_GPTQ),
    ] = None,
    duo_scaling: Annotated[
        bool | None,
        typer.Option(
            "--duo-scaling/--no-duo-scaling", metavar="", help="Scales by weights too; yes.", rich_help_panel=_AWQ
        ),
    ] = None,
    clip: Annotated[
        bool | None,
        typer.Option("--clip/--no-clip", metavar="", help="Cut off large weights; yes.", rich_help_panel=_AWQ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(metavar="X", help="How much moves to the weights, 0..1; 0.8.", rich_help_panel=_SMOOTHQUANT),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of scales and of what is not quantized; auto is the checkpoint's."),
    ] = "auto",
    revision: Annotated[str | None, typer.Option(metavar="TEXT", help="Branch, tag or commit of a hub id.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace a checkpoint at DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The report as one JSON object.")] = False,
) -> int | None:
    """Quantize a checkpoint's linear layers, and write it as compressed-tensors.

    One layer at a time is read, calibrated on pieces of the text, and kept in DST.quantizing; a run that was
    interrupted goes on when the command is repeated. An eighth of the pieces is held out to measure what was lost. The
    checkpoint is loaded from the disk and its logits compared before DST appears.

    Example: jaxinfer quantize ./model ./model-int4 --method awq --bits 4 --calibration texts.txt
    """
    of_gptq = {
        "damping": damping,
        "act_order": act_order,
        "static_groups": static_groups,
        "search": search_scales,
    }
    of_awq = {"duo_scaling": duo_scaling, "clip": clip}
    of_text = {"num_rows": samples, "length": length, "seed": seed}
    _check_usage(method, bits, group_size, calibration, max_kl)
    _check_belongs(method, "gptq and auto", method in ("gptq", "auto"), of_gptq)
    _check_belongs(method, "awq", method == "awq", of_awq)
    _check_belongs(method, "smoothquant", method == "smoothquant", {"alpha": alpha})
    if not calibration and (given := _given(of_text)):
        raise UsageError(f"--{_option(next(iter(given)))} is of --calibration, which is not given")
    import checkpoints_convert
    from checkpoints_convert.load import open_checkpoint
    from checkpoints_convert.staging import check_destination
    from jaxinfer.calibration import CalibrationOptions, Keep
    from jaxinfer.calibration.journal import CalibrationJournal
    from jaxinfer.data import embedded_path
    from jaxinfer.quantization.gptq import GptqOptions

    try:
        kept = tuple(Keep.parse(text) for text in keep or ())
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from None
    path = embedded_path(source) or checkpoints_convert.resolve(source, revision=revision)
    if checkpoints_convert.tokenizer_files(path) is not None:
        raise UsageError(f"{path} is a GGUF file: convert it first, jaxinfer convert {path} DIRECTORY")
    check_destination(destination, overwrite=overwrite, source=path)
    work = destination.with_name(destination.name + ".quantizing")
    with open_checkpoint(path) as opened, CalibrationJournal(work / "layers") as journal:
        check_not_quantized(opened)
        options = CalibrationOptions(
            method="gptq" if method == "auto" else method,
            bits=bits or (8 if method == "smoothquant" else 4),
            group_size=None if group_size == -1 else group_size or "auto",
            symmetric=symmetric,
            keep=kept,
            dtype=opened.config.dtype if dtype == "auto" else dtype,
            gptq=GptqOptions(**_given(of_gptq)),
            **_given(of_awq | {"alpha": alpha}),
        )
        check_room(opened, planned(opened, options), options.dtype, work)
        rows = _read_rows(path, calibration, **{"num_rows": 128, "length": 512, "seed": 0} | _given(of_text))
        try:
            result, auto = _run(_model(opened), options, max_kl, rows, journal)
        except KeyboardInterrupt:
            say("interrupted; the same command goes on after the last whole layer")
            return INTERRUPTED
        options = options if auto is None else auto.options
        weights = planned(opened, options)
        held_out = None if rows is None else rows.held_out
        difference = write(opened, weights, result, options.dtype, held_out, work, destination, overwrite=overwrite)
        report = report_of(opened, options, weights, result, auto, destination, difference)
    if as_json:
        write_json(report)
    else:
        write_text(summary(report))
    return None


def _check_usage(
    method: str, bits: int | None, group_size: int | None, calibration: list[Path] | None, max_kl: float | None
) -> None:
    if group_size == 0:
        raise UsageError("--group-size is a number of inputs, or -1 for all, not 0")
    if method != "rtn" and not calibration:
        raise UsageError(f"--method {method} needs --calibration PATH, the text to look at")
    if (method == "auto") != (max_kl is not None):
        raise UsageError("--max-kl X is needed by --method auto, and by no other")
    if max_kl is not None and not max_kl > 0:
        raise UsageError(f"--max-kl must be positive, got {max_kl}")
    if method == "smoothquant" and bits not in (None, 8):
        raise UsageError(f"--method smoothquant makes weights of 8 bits, not {bits}")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_belongs(method: str, owner: str, is_owner: bool, options: dict[str, Any]) -> None:
    if not is_owner and (given := _given(options)):
        raise UsageError(f"--{_option(next(iter(given)))} is of --method {owner}, not of {method}")


def _option(name: str) -> str:
    return {"num_rows": "samples", "search": "search-scales"}.get(name, name.replace("_", "-"))


def _read_rows(path: Path, calibration: list[Path] | None, **pieces: int) -> "CalibrationRows | None":
    from jaxinfer.calibration.inputs import split_rows
    from jaxinfer.text import Tokenizer

    if not calibration:
        return None
    documents = read_documents(calibration, "--calibration")
    with waiting("reading the text"):
        tokenizer = Tokenizer.from_dir(path)
        encoded = [tokenizer.encode_content(text) for text in documents if text]
    try:
        return split_rows(encoded, tokenizer.eos_token_id, **pieces)
    except ValueError as error:
        raise UsageError(f"--calibration: {error}") from None


def _model(source: "Checkpoint") -> "FloatModel":
    from jaxinfer.calibration import FloatModel

    fingerprint = hashlib.sha256(source.fingerprint().encode()).hexdigest()
    return FloatModel(source.config, unit_reader(source), rest_of(source), fingerprint)


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
        with _bar("layers", num_layers) as bar:
            report = _reporter(bar)
            return quantize_model(model, options, tokens, held_out, journal=journal, report=report), None
    if rows is None:
        raise UsageError("--max-kl needs --calibration")
    with _bar("measuring", num_layers) as measuring, _bar("layers", num_layers) as bar:
        report = _reporter(bar)
        auto = quantize_within(
            model,
            options,
            max_kl,
            rows.calibration,
            rows.held_out,
            journal=journal,
            report=report,
            report_part=lambda layer: measuring.update(),
            report_round=lambda bits: bar.reset(),
        )
    return auto.result, auto


@contextmanager
def _bar(description: str, total: int) -> Iterator[Any]:
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=description, unit="layer", disable=not shows_progress()) as bar:
        yield bar


def _reporter(bar: Any) -> Any:
    def report(done: "LayerReport") -> None:
        errors = [(one.error, one.rounded) for one in done.errors.values() if one.error and one.rounded]
        if errors:
            mean, nearest = (sum(values) / len(errors) for values in zip(*errors, strict=True))
            bar.set_postfix_str(f"layer {done.number}: output error {mean:.2g}, to nearest {nearest:.2g}")
        if shows_progress():
            for note in done.notes:
                bar.write(f"layer {done.number}: {note}", file=sys.stderr)
        bar.update()

    return report
