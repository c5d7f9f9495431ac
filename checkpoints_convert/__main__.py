"""python -m checkpoints_convert SRC DST: converts a checkpoint."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from checkpoints_convert.checkpoint import DTYPES
from checkpoints_convert.convert import ConvertReport, convert
from checkpoints_convert.files import verify_manifest
from checkpoints_convert.load import requantize_summary
from checkpoints_convert.verify import compare_tensors
from jaxinfer.checks import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the checkpoint was written, 1 with one sentence on stderr when not; usage errors exit with 2."""
    options = _parser().parse_args(arguments)
    log = logging.getLogger("absl")  # Orbax logs there what it then raises
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        report = convert(
            options.src,
            options.dst,
            dtype=options.dtype,
            to=options.to,
            progress=not options.quiet,
            overwrite=options.overwrite,
            revision=options.revision,
            requantize=options.requantize,
            tokenizer=options.tokenizer,
        )
        problems = _verified(report) if options.verify else []
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from the last whole layer", file=sys.stderr)
        return 1
    finally:
        log.setLevel(level)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if options.json:
        print(json.dumps({**report.to_dict(), "problems": problems}))
    elif not options.quiet:
        print(_summary(report))
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_convert",
        description="Convert a checkpoint. A conversion to the native form that was interrupted resumes when repeated.",
    )
    parser.add_argument(
        "src", metavar="SRC", help="checkpoint directory, Hugging Face or native, a GGUF file, or a hub id"
    )
    parser.add_argument("dst", metavar="DST", help="directory to write; it appears when it is whole")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="cast to this dtype; auto keeps it")
    parser.add_argument("--to", choices=("native", "huggingface"), default="native", help="form to write")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--requantize", metavar="NAME", help="a GGUF file's quantized weights: dense, or int4-g128, ..."
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer files to write instead of SRC's own")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DST")
    parser.add_argument("--verify", action="store_true", help="read the result again and compare it with SRC")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    return parser


def _verified(report: ConvertReport) -> list[str]:
    """What is wrong with the written checkpoint, read again. A cast may change values, by what the report says."""
    directory = report.destination
    problems = verify_manifest(directory) if (directory / "manifest.json").exists() else []
    if not problems and not report.cast_errors and not report.requantize_errors:
        problems = [
            f"{difference.name}: {difference.num_different} of {difference.size} values differ"
            for difference in compare_tensors(directory, report.source)
        ]
    return problems


def _summary(report: ConvertReport) -> str:
    lines = [
        f"{report.destination}: {report.config.architecture}, {report.config.dtype}, {format_bytes(report.num_bytes)}"
        f" of parameters in {report.seconds:.1f} s"
    ]
    if report.num_resumed_units:
        lines.append(f"resumed: {report.num_resumed_units} of {report.num_units} units were already written")
    if report.cast_errors:
        name, error = max(report.cast_errors.items(), key=lambda item: item[1])
        lines.append(f"cast: largest relative error {error:.3g}, in {name}")
    if report.requantize_errors:
        lines.append(requantize_summary(report.requantize_errors, report.requantize or ""))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
