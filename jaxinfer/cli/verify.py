"""`jaxinfer verify`: checks a checkpoint's files, and compares its outputs with another checkpoint's."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import ERROR, OK
from jaxinfer.cli.options import as_json
from jaxinfer.cli.output import waiting, write_json, write_text
from jaxinfer.options import MISSING, argument, option
from jaxinfer.tables import facts_text

if TYPE_CHECKING:
    from checkpoints_convert import VerifyReport


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    path: Path = argument(MISSING, "A converted checkpoint's folder.", "PATH")
    against: str | None = option(None, "Another checkpoint of the same model, or a hub id, to compare with.", "MODEL")
    tolerance: float = option(0.0, "Largest allowed difference of hidden states and logits.", "X", min=0.0)
    dtype: str = option("auto", "Compute both in this dtype; auto: as stored.", "DTYPE")
    as_json: bool = as_json("One JSON object.")


def verify(options: VerifyOptions) -> int:
    """Check a checkpoint's files, or compare it with another.

    Each file must match its checksum and, with --against, hidden states and logits must agree within the tolerance; if
    not, the exit code is 1. A checkpoint in Hugging Face's format has no checksums and can only be compared.
    """
    import checkpoints_convert
    from checkpoints_convert.files import MANIFEST

    path, against, tolerance = options.path, options.against, options.tolerance
    has_manifest = (path / MANIFEST).exists()
    problems: list[str] = []
    if has_manifest or against is None:
        with waiting("checking files"):
            problems = checkpoints_convert.verify_manifest(path)
    comparison = None
    if against is not None and not problems:
        with waiting("comparing"):
            comparison = checkpoints_convert.verify_against(path, against, tolerance=tolerance, dtype=options.dtype)
    holds = not problems and (comparison is None or _is_close(comparison, tolerance))
    if options.as_json:
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
        else "match the manifest"
        if has_manifest
        else "not checked: there is no manifest"
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
        facts["compared with"] = f"{against}: not done because of the problems"
    facts["result"] = "passed" if holds else "failed"
    lines = facts_text(facts).splitlines(keepends=True)
    lines[2:2] = [f"  - {problem}\n" for problem in problems]  # below "files"
    return "".join(lines)
