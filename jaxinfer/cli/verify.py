"""`jaxinfer verify`: checks a checkpoint's files, and compares its outputs with another checkpoint's."""

from dataclasses import dataclass
from typing import Any

from jaxinfer.cli.command import ERROR, OK
from jaxinfer.cli.options import as_json
from jaxinfer.cli.output import write_report
from jaxinfer.options import MISSING, argument, option
from jaxinfer.progress import Stage
from jaxinfer.tables import facts_text

_NUM_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    path: str = argument(MISSING, "A checkpoint's folder, a GGUF file, a hub id, an alias, or demo.", "PATH")
    against: str | None = option(None, "Another checkpoint of the same model, or a hub id, to compare with.", "MODEL")
    tolerance: float = option(0.0, "Largest allowed difference of hidden states and logits.", "X", min=0.0)
    dtype: str = option("auto", "Compute both in this dtype; auto: as stored.", "DTYPE")
    as_json: bool = as_json("One JSON object.")


def verify(options: VerifyOptions) -> int:
    """Check a checkpoint's files, or compare it with another.

    Each file must match its checksum and, with --against, hidden states and logits must agree within the tolerance; if
    not, the exit code is 1. Checksums are those of the manifest that `jaxinfer convert` writes; for Hugging Face and
    GGUF files, those that the hub's cache or a *.sha256 file knows. Without --against at least one has to be known.
    """
    against, tolerance = options.against, options.tolerance
    with Stage(f"opening {options.path}"):
        import checkpoints_convert
        from checkpoints_convert.files import MANIFEST
        from jaxinfer.store import find_path

        path = find_path(options.path)
        files = checkpoints_convert.verify_files(path)
    if against is None and not files.checked:
        raise checkpoints_convert.CheckpointError(
            path, "no checksum of its files is known: name another checkpoint with --against, or convert it"
        )
    problems, comparison = list(files.problems), None
    if against is not None and not problems:
        with Stage("comparing"):
            other = find_path(against)
            comparison = checkpoints_convert.verify_against(path, other, tolerance=tolerance, dtype=options.dtype)
    holds = not problems
    if comparison is not None:
        holds = comparison.first_diverging is None and comparison.max_logit_difference <= tolerance
    report = {
        "path": path,
        "holds": holds,
        "has_manifest": (path / MANIFEST).exists(),
        "checked": files.checked,
        "unknown": files.unknown,
        "problems": problems,
        "against": against,
        "tolerance": tolerance,
        "comparison": comparison.to_dict() if comparison is not None else None,
    }
    write_report(report, _summary, as_json=options.as_json)
    return OK if holds else ERROR


def _summary(report: dict[str, Any]) -> str:
    facts: dict[str, Any] = {"checkpoint": report["path"]}
    problems, unknown, against, comparison = (report[name] for name in ("problems", "unknown", "against", "comparison"))
    if problems:
        facts["files"] = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
    else:
        facts["files"] = f"{len(report['checked'])} match their checksums" if report["checked"] else "none checked"
    if unknown:
        shown = ", ".join(unknown[:_NUM_SHOWN]) + (", ..." if len(unknown) > _NUM_SHOWN else "")
        facts["without checksum"] = f"{len(unknown)}: {shown}"
    if comparison is not None:
        facts |= {
            "compared with": f"{against} on {comparison['num_tokens']} tokens, tolerance {report['tolerance']:g}",
            "max |dlogit|": f"{comparison['max_logit_difference']:.3g}",
            "KL per token": f"{comparison['mean_kl']:.3g} nats",
            "same top token": f"{100 * comparison['top1_agreement']:.2f} % of positions",
            "first diverging": comparison["first_diverging"] or "none",
        }
        if comparison["first_diverging"] is not None:
            facts["by"] = f"{comparison['layer_differences'][comparison['first_diverging']]:.3g}"
    elif against is not None:
        facts["compared with"] = f"{against}: not done because of the problems"
    facts["result"] = "passed" if report["holds"] else "failed"
    lines = facts_text(facts).splitlines(keepends=True)
    lines[2:2] = [f"  - {problem}\n" for problem in problems]  # below "files"
    return "".join(lines)
