"""`jaxinfer convert`: a checkpoint to the native format, back to Hugging Face's, or to another dtype."""

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxinfer.cli.command import ERROR, resumes, say
from jaxinfer.cli.options import as_json, overwrite
from jaxinfer.cli.output import write_report
from jaxinfer.options import MISSING, argument, option
from jaxinfer.progress import Stage
from jaxinfer.tables import facts_text

if TYPE_CHECKING:
    from checkpoints_convert import ConvertReport


NAMES = ("to", "dtype", "overwrite", "revision", "requantize", "tokenizer")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    source: str = argument(MISSING, "A checkpoint's folder, a GGUF file, a hub id, or demo.", "SRC")
    destination: str = argument(MISSING, "Folder to write; it appears when it is complete.", "DST")
    to: Literal["native", "huggingface"] = option("native", "The format to write.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "Cast to this type; auto does not cast.")
    overwrite: bool = overwrite("Replace a checkpoint at DST.")
    revision: str | None = option(None, "Branch, tag or commit of a hub id.", "TEXT")
    requantize: str | None = option(
        None,
        "Quantized weights of a GGUF file become dense, or a format such as int4-g128; default: unchanged.",
        "NAME",
    )
    tokenizer: str | None = option(None, "Folder with tokenizer files to write instead of SRC's own.", "PATH")
    verify: bool = option(False, "Read the result again and compare its values with SRC's.")
    as_json: bool = as_json("The report as one JSON object.")


def convert(options: ConvertOptions) -> int | None:
    """Convert a checkpoint.

    The native format has checksums, and an interrupted conversion to it continues when it is repeated.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs there what it then raises
    resumed = resumes("after the last complete layer") if options.to == "native" else contextlib.nullcontext()
    with resumed, Stage(f"opening {options.source}"):
        import checkpoints_convert
        from jaxinfer.store import find_path

        report = checkpoints_convert.convert(
            find_path(options.source, options.revision),
            options.destination,
            **{name: getattr(options, name) for name in NAMES if name != "revision"},
        )
    with Stage("comparing"):
        problems = _problems(report) if options.verify else []
    for problem in problems:
        say(f"error: {problem}")
    data = {**report.to_dict(), **({"problems": problems} if options.verify else {})}
    write_report(data, lambda _: _summary(report), as_json=options.as_json)
    return ERROR if problems else None


def _problems(report: "ConvertReport") -> list[str]:
    """Problems of the written checkpoint, read again. A cast may change values, by what the report says."""
    from checkpoints_convert import compare_tensors, verify_manifest
    from checkpoints_convert.files import MANIFEST

    problems = verify_manifest(report.destination) if (report.destination / MANIFEST).exists() else []
    if not problems and not report.cast_errors and not report.requantize_errors:
        problems = [
            f"{difference.name}: {difference.num_different} of {difference.size} values differ"
            for difference in compare_tensors(report.destination, report.source)
        ]
    return problems


def _summary(report: "ConvertReport") -> str:
    config = report.config
    facts = {
        "wrote": report.destination,
        "model": f"{config.architecture}, {config.num_layers} layers",
        "parameters": f"{report.num_bytes:,} bytes of {config.dtype}",
        "time": f"{report.seconds:.1f} s",
    }
    if report.num_resumed_units:
        facts["resumed"] = f"{report.num_resumed_units} of {report.num_units} units were written before"
    if report.cast_errors:
        name, error = max(report.cast_errors.items(), key=lambda item: item[1])
        facts["cast"] = f"largest relative error {error:.3g}, in {name}"
    if report.requantize_errors:
        from checkpoints_convert.load import requantize_summary

        facts["rounded"] = requantize_summary(report.requantize_errors, report.requantize or "")
    return facts_text(facts)
