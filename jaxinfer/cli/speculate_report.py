"""`jaxinfer speculate-report`: compares drafts of a model on real text, and says which to use at which load."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.api.options import ON_LOADING
from jaxinfer.cli.bench import check_picture, read_integers
from jaxinfer.cli.command import UsageError, say
from jaxinfer.cli.options import ServingOptions, as_json, llm_arguments
from jaxinfer.cli.output import console, note, write_json, write_text
from jaxinfer.cli.prompts import read_prompts
from jaxinfer.options import MISSING, argument, option
from jaxinfer.progress import Stage
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.measure.speculation.measure import DraftReporter, KindPrompt
    from jaxinfer.measure.speculation.report import DraftReport, LengthReport

LENGTHS, LOADS = "1,2,4,8", "1,4,16,64"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    file: Path | None = argument(
        None,
        'Prompts, one per line; in .jsonl, {"prompt": "...", "kind": "code", ...}. Default: 64 questions and tasks in '
        "English, of the kinds chat, code, list and summary.",
        "PROMPTS",
    )
    draft: list[str] = option(
        MISSING,
        "A checkpoint's folder or a hub id, of a model or a trained head; demo-draft, ngram, mtp (the head in the "
        "model's own files), or layers:N (its first N layers). May be repeated, to compare drafts.",
        "DRAFT",
        "--draft -d",
    )
    num_draft_tokens: str = option(LENGTHS, "Draft lengths: tokens drafted per round.", "K,K")
    concurrency: str = option(
        LOADS,
        "Numbers of answers at a time, for speeds with adaptive lengths; those above the number of prompts are left "
        "out.",
        "N,N",
    )
    num_prompts: int | None = option(None, "Use the first N prompts only.", "N", min=1)
    max_tokens: int = option(128, "Maximum number of tokens of each answer.", "N", min=2)
    temperature: float = option(0.0, "0 takes the most probable token.", "X")
    seed: int = option(0, "Seed of all answers, if the temperature is not 0.", "N")
    acceptance: str = option("exact", "exact: the answers of plain decoding; maximal: the same distribution.", "RULE")
    repeats: int = option(3, "Number of measurements, of which the median is shown.", "N", min=1)
    plot: Path | None = option(None, "Draw acceptance and speedup, as .png, .svg or .pdf.", "PATH")
    as_json: bool = as_json("One JSON object.")


def speculate_report(model_options: ServingOptions, options: ReportOptions) -> None:
    """Compare drafts for speculative decoding.

    Runs the prompts with plain decoding and with each draft and draft length, one answer at a time, after warming up;
    then with each number of answers at a time. Shows the acceptance rate, the tokens per round by kind of text, the
    speedup that Leviathan et al. predict from it, the measured speedup, what limits it, and which draft to use when.
    Prompts whose plain answer repeats a run of 16 tokens are left out: loops flatter any draft.
    """
    lengths = read_integers(options.num_draft_tokens, "--num-draft-tokens")
    loads = read_integers(options.concurrency, "--concurrency")
    if options.acceptance not in ("exact", "maximal"):
        raise UsageError(f"--acceptance is exact or maximal, got {options.acceptance!r}")
    check_picture(options.plot, "--plot")
    prompts = None if options.file is None else _prompts(options.file)
    with Stage(f"loading {model_options.model}"):
        from jaxinfer.measure.speculation.measure import DraftReporter, DraftSettings, embedded_prompts

        values = llm_arguments(model_options)
        if "max_seqs" in values:
            raise UsageError("--max-seqs: give --concurrency, the numbers of answers at a time")
        settings = DraftSettings(
            lengths,
            loads,
            {name: getattr(options, name) for name in ("temperature", "seed", "max_tokens")},
            options.acceptance,
            options.repeats,
            {name: value for name, value in values.items() if name not in ON_LOADING},
            {name: values[name] for name in ON_LOADING if name in values},
        )
        prompts = embedded_prompts() if prompts is None else prompts
        reporter = DraftReporter(model_options.model, prompts[: options.num_prompts], settings)
    with contextlib.closing(reporter), Stage("measuring", len(options.draft), "draft") as stage:
        reports = []
        for report in reporter.reports(options.draft, stage.describe):
            reports.append(report)
            if len(options.draft) > 1:  # the next one may take as long
                say(
                    f"{report.draft}: {report.best.stats.mean_accepted_length:.2f} tokens a round and "
                    f"{report.best.measured:.2f}x with {report.best.num_draft_tokens} draft tokens"
                )
            stage.update()
    if options.plot is not None:
        from jaxinfer.measure.speculation.picture import draw

        draw(options.plot, reports, f"{model_options.model}, drafted by {', '.join(options.draft)}")
    if options.as_json:
        write_json(_data(model_options.model, options, reporter, reports))
    else:
        _print(options, reporter, reports)
    if options.plot is not None:
        note(f"wrote {options.plot}")


def _prompts(file: Path) -> "list[KindPrompt]":
    lines = read_prompts((), file)
    from jaxinfer.measure.speculation.measure import OTHER, KindPrompt

    prompts = []
    for line in lines:
        sampling = dict(line.sampling)
        kind = sampling.pop("kind", OTHER)
        if not isinstance(kind, str) or not kind:
            raise UsageError(f"{line.where}: kind must be a word such as code, got {kind!r:.60}")
        prompts.append(KindPrompt(line.prompt, kind, sampling))
    return prompts


def _data(
    model: str, options: ReportOptions, reporter: "DraftReporter", reports: "Sequence[DraftReport]"
) -> dict[str, Any]:
    from jaxinfer.measure.bench.model import machine
    from jaxinfer.measure.speculation.report import recommendation

    here = machine()
    return {
        "model": model,
        "acceptance": options.acceptance,
        "num_prompts": len(reporter.prompts),
        "num_repetitive_prompts": reporter.num_repetitive,
        "plain_tokens_per_second": 1 / reporter.plain.seconds_per_token,
        "plain_tokens_per_second_by_load": {str(load): rate for load, rate in reporter.plain_rates.items()},
        **{name: here[name] for name in ("platform", "device", "jax")},
        "drafts": [report.data() for report in reports],
        "recommendation": recommendation(reports),
    }


def _print(options: ReportOptions, reporter: "DraftReporter", reports: "Sequence[DraftReport]") -> None:
    from jaxinfer.measure.speculation.report import conclusion, recommendation, warnings

    num_prompts = len(reporter.prompts)
    if reporter.num_repetitive:
        total = num_prompts + reporter.num_repetitive
        write_text(f"{reporter.num_repetitive} of {total} prompts are left out: their answers repeat 16 tokens.\n")
    write_text(f"Plain decoding: {1 / reporter.plain.seconds_per_token:.0f} tokens/s for each answer.\n")
    for report in reports:
        write_text(f"\n{report.draft}, one answer at a time\n")
        _print_lengths(report.lengths)
        if report.tokens is not None:
            write_text(f"It has another tokenizer: it {report.tokens}.\n")
        if options.acceptance == "exact" and options.temperature == 0:
            num_different = sum(row.num_different for row in report.lengths)
            number = num_prompts * len(report.lengths)
            write_text(f"Answers that differ from plain decoding: {num_different} of {number}.\n")
        write_text(conclusion(report.lengths) + "\n")
        for warning in warnings(report):
            write_text(warning + "\n")
    _print_kinds(reports)
    _print_loads(reporter, reports)
    for sentence in recommendation(reports):
        write_text(sentence + "\n")


def _print_lengths(rows: "Sequence[LengthReport]") -> None:
    titles = ("limited by", "k", "accepted", "if previous were", "by position", "tokens per round", "draft token")
    cells = [
        (
            row.limit,
            row.num_draft_tokens,
            f"{row.stats.acceptance_rate:.0%}",
            f"{row.stats.conditional_rate:.0%}",
            " ".join(f"{rate:.2f}" for rate in row.stats.acceptance_by_position),
            f"{row.stats.mean_accepted_length:.2f}",
            f"{row.cost_ratio:.2f}",
            f"{row.verify_ratio:.2f}",
            f"{row.expected:.2f}x",
            f"{row.measured:.2f}x",
        )
        for row in rows
    ]
    console().print(make_table((*titles, "verifying", "expected", "measured"), cells))


def _print_kinds(reports: "Sequence[DraftReport]") -> None:
    kinds = list(reports[0].best.by_kind)
    if not kinds:
        return
    write_text("\nTokens per round by kind of text, with the best length\n")
    cells = [
        (
            report.draft,
            report.best.num_draft_tokens,
            *(f"{report.best.by_kind[kind].mean_accepted_length:.2f}" for kind in kinds),
        )
        for report in reports
    ]
    console().print(make_table(("draft", "k", *kinds), cells))


def _print_loads(reporter: "DraftReporter", reports: "Sequence[DraftReport]") -> None:
    loads = list(reporter.plain_rates)
    if not loads:
        return
    write_text("\nTokens/s of all answers and speedup with adaptive lengths, by answers at a time\n")
    cells = [("plain decoding, tokens/s", *(f"{rate:.0f}" for rate in reporter.plain_rates.values()))]
    cells += [(report.draft, *(f"{report.loads[load]:.2f}x" for load in loads)) for report in reports]
    console().print(make_table(("", *map(str, loads)), cells))
