"""`jaxinfer verify`: are a checkpoint's files whole, and does it compute what another one does?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.command import ERROR, OK
from jaxinfer.cli.output import waiting, write_json, write_text

if TYPE_CHECKING:
    from checkpoints_convert import VerifyReport


def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A converted checkpoint's folder.")],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Another checkpoint of the same model, or a hub id: run both and compare.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Largest difference of hidden states and logits that passes.")
    ] = 0.0,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Compute both in this dtype; auto: as stored.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object.")] = False,
) -> int:
    """Check a checkpoint's files, or compare it with another.

    Every file must have its checksum and, with --against, hidden states and logits must agree within the tolerance; if
    not, the exit code is 1. A checkpoint of Hugging Face's form has no checksums, so it can only be compared.
    """
    import checkpoints_convert
    from checkpoints_convert.files import MANIFEST

    has_manifest = (path / MANIFEST).exists()
    problems: list[str] = []
    if has_manifest or against is None:
        with waiting("checking files"):
            problems = checkpoints_convert.verify_manifest(path)
    comparison = None
    if against is not None and not problems:
        with waiting("comparing"):
            comparison = checkpoints_convert.verify_against(path, against, tolerance=tolerance, dtype=dtype)
    holds = not problems and (comparison is None or _is_close(comparison, tolerance))
    if as_json:
        write_json(
            {
                "path": path,
                "holds": holds,
                "has_manifest": has_manifest,
                "problems": problems,
                "against": against,
                "tolerance": tolerance,
                "comparison": comparison.to_dict() if comparison is not None else None,
            }
        )
    else:
        write_text(_summary(path, has_manifest, problems, against, comparison, tolerance, holds))
    return OK if holds else ERROR


def _is_close(report: "VerifyReport", tolerance: float) -> bool:
    return report.first_diverging is None and report.max_logit_difference <= tolerance


def _summary(
    path: Path,
    has_manifest: bool,
    problems: list[str],
    against: str | None,
    report: "VerifyReport | None",
    tolerance: float,
    holds: bool,
) -> str:
    facts: dict[str, Any] = {"checkpoint": path}
    facts["files"] = (
        f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
        if problems
        else "as its manifest says"
        if has_manifest
        else "not checked: it has no manifest"
    )
    if report is not None:
        facts |= {
            "compared with": f"{against} on {report.num_tokens} tokens, tolerance {tolerance:g}",
            "max |dlogit|": f"{report.max_logit_difference:.3g}",
            "KL per token": f"{report.mean_kl:.3g} nats",
            "same top token": f"{100 * report.top1_agreement:.2f} % of positions",
            "first diverging": report.first_diverging or "none",
        }
        if report.first_diverging is not None:
            facts["by"] = f"{report.layer_differences[report.first_diverging]:.3g}"
    elif against is not None:
        facts["compared with"] = f"{against}: not done, the files are not whole"
    facts["result"] = "holds" if holds else "does not hold"
    lines = [f"{name:<17}{value}" for name, value in facts.items()]
    position = 2  # under "files"
    lines[position:position] = [f"  - {problem}" for problem in problems]
    return "\n".join(lines) + "\n"
