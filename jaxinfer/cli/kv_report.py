"""`jaxinfer kv-report`: what caches of fewer bits and policies of the cache cost a model."""

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.api.options import ON_LOADING, LLMOptions
from jaxinfer.checks import need_plotting
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import given, given_values, model_argument
from jaxinfer.cli.output import console, note, write_json
from jaxinfer.cli.training_data import read_texts
from jaxinfer.options import option
from jaxinfer.progress import Stage
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.measure.kv_report.measure import CacheReporter, ReportSettings
    from jaxinfer.measure.kv_report.report import CacheFigures

_caches = partial(option, group="Caches")
_texts = partial(option, group="Texts")
_results = partial(option, group="Results")
ENGINE = ("page_size", "prefill_chunk", "memory_fraction")
PICTURE, RESULT = "kv_report.png", "kv_report.json"


@given(LLMOptions, (*ON_LOADING, *ENGINE))
@dataclass(frozen=True, kw_only=True)
class KVReportOptions:
    """The model, its engine, the caches to compare, the texts and where results go."""

    model: str = model_argument()
    kv_dtypes: str | None = _caches(
        None,
        "What caches store; default: auto (what the model computes in), bfloat16, int8, fp8_e4m3, int8_int4 and int4.",
        "DTYPE,...",
    )
    policies: str | None = _caches(
        None,
        "Which keys stay, such as all,sinks(4)+window(256),h2o(256); default: all, and windows of half and "
        "a quarter of a text. Where some cut prompts, the first half of a text is a prompt, the second is measured.",
        "POLICY,...",
    )
    texts: list[Path] | None = _texts(
        None, "Text for all measurements; may be repeated. demo brings some of its own.", "FILE"
    )
    text_tokens: int | None = _texts(
        None, "Tokens of each piece of the texts; default: 512, or what the model takes.", "N", min=2
    )
    num_texts: int = _texts(8, "Pieces of the texts, at most.", "N", min=1)
    answers: int = _texts(8, "Pieces that are continued greedily, at most; 0 for none.", "N", min=0)
    answer_tokens: int = _texts(32, "Tokens of each of these answers.", "N", min=2)
    needles: int = _texts(4, "Lines to copy at each depth and length of the needle task; 0 for none.", "N", min=0)
    json: Path | None = _results(None, "Write everything measured as JSON; - for standard output.", "FILE")
    out: Path | None = _results(None, f"Write {RESULT} and {PICTURE}, KL by bytes.", "FOLDER")

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...


def kv_report(options: KVReportOptions) -> None:
    """Measure what smaller caches cost.

    Compares the full cache, of what the model computes in, with each combination of --kv-dtypes and --policies: the KL
    of the next token, perplexity, most probable tokens, greedy answers, bytes, time per token, and whether a line of
    code can be copied from each depth of a text. What the model refuses is listed with the reason.
    """
    kv_dtypes, policies = _read_caches(options)
    if options.out is not None:
        need_plotting("--out")
        if options.out.exists() and not options.out.is_dir():
            raise UsageError(f"--out {options.out} is a file: give a folder")
    documents = read_texts(options.texts, options.model, options.num_texts)
    if not documents:
        raise UsageError("--texts FILE is missing: give text as the model will read it")
    with Stage(f"loading {options.model}"):
        from jaxinfer.loading import load_model
        from jaxinfer.measure.kv_report.measure import CacheReporter, ReportSettings

        values = given_values(options)
        settings = ReportSettings(
            kv_dtypes,
            policies,
            {name: values[name] for name in ENGINE if name in values},
            text_tokens=options.text_tokens,
            num_texts=options.num_texts,
            num_answers=options.answers,
            answer_tokens=options.answer_tokens,
            num_needles=options.needles,
        )
        model = load_model(options.model, **{name: values[name] for name in ON_LOADING if name in values})
        reporter = CacheReporter(model, documents, settings)
    rows: list[CacheFigures] = []
    with contextlib.closing(reporter), Stage("measuring", len(reporter.choices), "cache") as stage:
        for row in reporter.rows(stage.describe):
            rows.append(row)
            stage.update()
    result = _result(options, settings, reporter, rows)
    is_printed = options.json is not None and str(options.json) == "-"
    if is_printed:
        write_json(result)
    else:
        _print(options, reporter, rows)
    _write(options, result, rows, None if is_printed else options.json)


def _read_caches(options: KVReportOptions) -> tuple[list[str], list[str] | None]:
    """Values of --kv-dtypes, by default all, and of --policies."""
    from jaxinfer.cache.kv_dtype import check_kv_dtype
    from jaxinfer.measure.kv_report.report import DEFAULT_KV_DTYPES, read_policies

    names = DEFAULT_KV_DTYPES if options.kv_dtypes is None else options.kv_dtypes.split(",")
    try:
        kv_dtypes = [check_kv_dtype(name.strip(), "--kv-dtypes") for name in names]
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        return kv_dtypes, None if options.policies is None else read_policies(options.policies)
    except ValueError as error:
        raise UsageError(f"--policies: {error}") from None


def _result(
    options: KVReportOptions, settings: "ReportSettings", reporter: "CacheReporter", rows: "list[CacheFigures]"
) -> dict[str, Any]:
    from jaxinfer.measure.bench.model import machine, public_name
    from jaxinfer.measure.kv_report.report import SCHEMA, VERSION

    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": public_name(options.model),
        "machine": machine(),
        "num_texts": len(reporter.texts),
        "text_tokens": reporter.num_tokens,
        "num_predicted_tokens": reporter.num_predicted,
        "answer_tokens": settings.answer_tokens,
        "rows": [row.to_dict() for row in rows],
    }


def _print(options: KVReportOptions, reporter: "CacheReporter", rows: "list[CacheFigures]") -> None:
    from jaxinfer.measure.kv_report import report

    target = console()

    def say(*lines: str) -> None:
        for line in lines:
            target.print(line, markup=False, soft_wrap=True)

    texts = f"{len(reporter.texts)} texts of up to {reporter.num_tokens:,} tokens"
    say(f"{options.model}: {texts}, {reporter.num_predicted:,} predicted")
    target.print(make_table(report.TITLES, report.table(rows), num_left=2))
    say(f"answers: greedy ones of {options.answer_tokens} tokens, equal to the full cache's; KiB/text: kept of a text")
    if refused := report.refusals(rows):
        say("", "Refused", *(f"  {line}" for line in refused))
    titles, cells = report.needle_table(rows)
    if titles:
        say("", *report.NEEDLE_HEAD)
        target.print(make_table(titles, cells, num_left=2))
        say(*report.needle_lines(rows))


def _write(options: KVReportOptions, result: dict[str, Any], rows: "list[CacheFigures]", json: Path | None) -> None:
    from jaxinfer.measure.bench.results import write_result

    files = [] if json is None else [json]
    if options.out is not None:
        from jaxinfer.measure.kv_report.picture import draw

        options.out.mkdir(parents=True, exist_ok=True)
        draw(rows, options.out / PICTURE, f"{result['model']}: texts of {result['text_tokens']:,} tokens")
        files.append(options.out / RESULT)
    for file in files:
        write_result(file, result)
    if files:
        note(f"wrote {', '.join(str(file) for file in files)}")
