"""`jaxinfer convert`: a checkpoint to the native format, back to Hugging Face's, or to another dtype."""

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.cli.command import ERROR, resumes, say
from jaxinfer.cli.options import as_json, overwrite
from jaxinfer.cli.output import write_report
from jaxinfer.options import MISSING, argument, option
from jaxinfer.progress import Stage
from jaxinfer.tables import facts_text

if TYPE_CHECKING:
    from checkpoints_convert import ConvertReport


NAMES = ("to", "dtype", "overwrite", "requantize", "tokenizer", "base_model")


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
    merge_lora: str | None = option(
        None,
        "Folder of a PEFT LoRA adapter to merge: weights become dense; its tokenizer and chat template replace SRC's.",
        "PATH",
    )
    base_model: str | None = option(
        None, "Name of SRC in the adapter's config; default: the last part of SRC's folder or hub id.", "NAME"
    )
    verify: bool = option(False, "Read the result again and compare its values with SRC's, or with the merged ones.")
    as_json: bool = as_json("The report as one JSON object.")


def convert(options: ConvertOptions) -> int | None:
    """Convert a checkpoint, or merge an adapter into it.

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
            adapter=options.merge_lora,
            **{name: getattr(options, name) for name in NAMES},
        )
    with Stage("comparing"):
        problems = _problems(report, options) if options.verify else []
    for problem in problems:
        say(f"error: {problem}")
    data = {**report.to_dict(), **({"problems": problems} if options.verify else {})}
    write_report(data, lambda _: _summary(report), as_json=options.as_json)
    return ERROR if problems else None


def _problems(report: "ConvertReport", options: ConvertOptions) -> list[str]:
    """Problems of the written checkpoint, read again. A cast may change values, by what the report says."""
    from checkpoints_convert import compare_tensors, verify_manifest
    from checkpoints_convert.adapters import open_merged
    from checkpoints_convert.files import MANIFEST

    problems = verify_manifest(report.destination) if (report.destination / MANIFEST).exists() else []
    if problems or report.cast_errors or report.requantize_errors:
        return problems
    with contextlib.ExitStack() as stack:
        source: Any = report.source
        if report.adapter is not None:
            source = stack.enter_context(open_merged(source, report.adapter, dtype=options.dtype))
        differences = compare_tensors(report.destination, source)
    return [
        f"{difference.name}: {difference.num_different} of {difference.size} values differ"
        for difference in differences
    ]


def _summary(report: "ConvertReport") -> str:
    config = report.config
    facts = {
        "wrote": report.destination,
        "model": f"{config.architecture}, {config.num_layers} layers",
        "parameters": f"{report.num_bytes:,} bytes of {config.dtype}",
        "time": f"{report.seconds:.1f} s",
    }
    if report.adapter is not None:
        facts["merged"] = f"{report.adapter}, which changes {report.num_changed} parameters"
    if report.num_dequantized:
        facts["dequantized"] = f"{report.num_dequantized} quantized parameters of the base, which are dense here"
    if report.num_resumed_units:
        facts["resumed"] = f"{report.num_resumed_units} of {report.num_units} units were written before"
    if report.cast_errors:
        name, error = max(report.cast_errors.items(), key=lambda item: item[1])
        facts["cast"] = f"largest relative error {error:.3g}, in {name}"
    if report.requantize_errors:
        from checkpoints_convert.load import requantize_summary

        facts["rounded"] = requantize_summary(report.requantize_errors, report.requantize or "")
    return facts_text(facts)
