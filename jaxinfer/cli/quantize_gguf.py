"""`jaxinfer quantize --to gguf`: checks of its options, the file, and the report."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import UsageError
from jaxinfer.cli.output import write_json, write_text
from jaxinfer.progress import Stage
from jaxinfer.tables import table_text

if TYPE_CHECKING:
    import numpy as np

    from checkpoints_convert.checkpoint import Checkpoint

_WEIGHTED = ("q4_0", "q4_k")


def check_gguf_usage(options: Any) -> None:
    """Raises UsageError for `QuantizeOptions` that have no meaning for a GGUF file."""
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


def quantize_to_gguf(options: Any, path: Path, requantize: str | None) -> None:
    """Writes the checkpoint at `path` as `QuantizeOptions` say, and prints the report; `requantize` as of
    `open_checkpoint`."""
    from checkpoints_convert.load import open_checkpoint

    with open_checkpoint(path, requantize=requantize) as source:
        source.check_head()
        report = _write(source, options)
    if options.as_json:
        write_json(report)
    else:
        write_text(gguf_summary(report))


def _write(source: "Checkpoint", options: Any) -> dict[str, Any]:
    """Writes the file; returns its report: path, bytes, tensors by type, relative errors and notes."""
    from checkpoints_convert.gguf.write import save_gguf

    kind = (options.type or "q8_0").upper()
    importance = None if options.imatrix is None else read_importance(options.imatrix)
    num_tensors = sum(map(len, source.units().values()))
    with Stage("writing", num_tensors, "tensor") as stage:
        found = save_gguf(
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
        "num_bytes": found.num_bytes,
        "source_bytes": source.num_bytes(),
        "kinds": found.kinds,
        "errors": found.errors,
        "notes": list(found.notes),
    }


def read_importance(path: Path) -> "dict[str, np.ndarray]":
    from checkpoints_convert.gguf.imatrix import read_imatrix

    return read_imatrix(path)


def gguf_summary(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    errors = report["errors"].values()
    rows = [
        ("wrote", str(report["path"])),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in report["kinds"].items())),
        ("bytes", f"{report['num_bytes']:,} of {report['source_bytes']:,}"),
    ]
    if errors:
        mean = math.sqrt(sum(error**2 for error in errors) / len(errors))
        rows.append(("rounding error", f"{mean:.3g} of the weights, at most {max(errors):.3g}"))
    rows += [("note", note) for note in report["notes"]]
    return table_text(("", ""), rows, num_left=2)
