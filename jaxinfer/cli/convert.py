"""`jaxinfer convert`: a checkpoint to the native form, back to Hugging Face's, or to another dtype."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxinfer.cli.command import INTERRUPTED, say
from jaxinfer.cli.output import shows_progress, write_json, write_text

if TYPE_CHECKING:
    from checkpoints_convert import ConvertReport


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint's folder, a GGUF file, or a hub id.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write; it appears when it is whole.")],
    to: Annotated[Literal["native", "huggingface"], typer.Option(help="The form to write.")] = "native",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Cast to this; auto keeps what is stored.")
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace a checkpoint at DST.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="TEXT", help="Branch, tag or commit of a hub id.")] = None,
    requantize: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For a GGUF file's quantized weights: dense, or a format such as int4-g128; default: kept exactly.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder with tokenizer files to write instead of SRC's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The report as one JSON object.")] = False,
) -> int | None:
    """Convert a checkpoint.

    The native form has checksums, and a conversion to it that was interrupted goes on when it is repeated.
    """
    import checkpoints_convert

    try:
        report = checkpoints_convert.convert(
            source,
            destination,
            to=to,
            dtype=dtype,
            overwrite=overwrite,
            revision=revision,
            requantize=requantize,
            tokenizer=tokenizer,
            progress=True if shows_progress() else None,
        )
    except KeyboardInterrupt:
        if to != "native":
            raise
        say("interrupted; the same command goes on after the last whole layer")
        return INTERRUPTED
    if as_json:
        write_json(report.to_dict())
    else:
        write_text(_summary(report))
    return None


def _summary(report: "ConvertReport") -> str:
    config = report.config
    lines = [
        f"wrote       {report.destination}",
        f"model       {config.architecture}, {config.num_layers} layers",
        f"parameters  {report.num_bytes:,} bytes of {config.dtype}",
        f"time        {report.seconds:.1f} s",
    ]
    if report.num_resumed_units:
        lines.append(f"resumed     {report.num_resumed_units} of {report.num_units} units were written before")
    if report.cast_errors:
        name, error = max(report.cast_errors.items(), key=lambda item: item[1])
        lines.append(f"cast        largest relative error {error:.3g}, in {name}")
    if report.requantize_errors:
        from checkpoints_convert.load import requantize_summary

        lines.append(f"rounded     {requantize_summary(report.requantize_errors, report.requantize or '')}")
    return "\n".join(lines) + "\n"
