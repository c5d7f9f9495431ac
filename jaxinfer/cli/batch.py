"""`jaxinfer batch`: a file of requests in, a file of answers out."""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import ERROR, OK, PARTIAL, UsageError, is_interrupt, say
from jaxinfer.cli.options import (
    ChatServingOptions,
    HostsOptions,
    SamplingOptions,
    as_json,
    follow,
    join_hosts,
    llm_arguments,
    open_llm,
    sampling_values,
)
from jaxinfer.cli.output import note, write_json
from jaxinfer.cli.prompts import STDIN
from jaxinfer.options import argument, option
from jaxinfer.progress import Stage, hidden

if TYPE_CHECKING:
    from jaxinfer.batch import BatchSummary, Job
    from jaxinfer.fleet import RayPool

_files = partial(option, group="Files")
_table = partial(option, group="Tables (.csv, .tsv, .parquet) and texts (.txt)")
_fleet = partial(option, group="A fleet")
_NUM_NAMED = 5  # other models


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    paths: list[str] | None = argument(
        None,
        "The file of requests (JSON lines, .csv, .tsv, .parquet or .txt), and the file for the answers (JSON lines). "
        "-: standard input (JSON lines), standard output.",
        "IN OUT",
    )
    input: str | None = _files(None, "IN by name.", "PATH", "--input --input-file -i")
    output: str | None = _files(None, "OUT by name.", "PATH", "--output --output-file -o")
    errors: Path | None = _files(None, "File for failed rows; default: OUT with .errors.jsonl.", "PATH")
    sort: bool = _files(False, "At the end, put the answers in the order of the rows in IN.")
    resume: bool = _files(
        True,
        "Continue an OUT that an earlier run of this job began; --no-resume: refuse an OUT that has answers.",
        flag="--resume/--no-resume",
    )
    retry_errors: bool = _files(False, "Run rows again that failed in an earlier run.")
    overwrite: bool = _files(False, "Delete the answers in OUT and start again.")
    coordinates: bool = _files(False, "Write with each answer all that it follows from, for jaxinfer replay.")
    prompt_column: str | None = _table(None, "The column that has the prompts; default: prompt.", "NAME")
    prompt: str | None = _table(
        None,
        "Make each prompt from columns: 'Translate: {text}' puts the cell of the column text there; {{ and }} are "
        "braces. The column of a .txt file is named prompt.",
        "TEMPLATE",
    )
    chat: bool = _table(False, "Prompts are messages of a user, for the model's chat template.")
    adapter_column: str | None = _table(
        None, "The column that names the adapter of each row; an empty cell is the model without one.", "NAME"
    )
    keep: list[str] | None = _table(None, "Copy this column to the answers.", "NAME", is_repeated=True)
    ray: bool = _fleet(False, "Run on a pool of engines in Ray actors.")
    workers: int | None = _fleet(None, "Number of engines; default: 2.", "N", min=1)
    ray_address: str | None = _fleet(None, "A running cluster, such as auto; default: this machine.", "ADDRESS")
    worker_resources: str | None = _fleet(
        None, "What Ray reserves for each engine, such as '{\"num_gpus\": 1}'; default: one CPU.", "JSON"
    )
    as_json: bool = as_json("Print a summary as JSON at the end.")


def batch(
    options: BatchOptions,
    model_options: ChatServingOptions,
    sampling_options: SamplingOptions,
    hosts_options: HostsOptions,
) -> int:
    """Answer a file of requests.

    [bold]jaxinfer batch requests.jsonl answers.jsonl -m MODEL[/bold] reads one JSON object a line:
    [bold]{"prompt": "...", "temperature": 0.7}[/bold], or with "messages" for a chat, or OpenAI's batch form
    (custom_id, url, body).

    [bold]jaxinfer batch table.csv answers.jsonl --prompt 'Translate: {text}' --chat -m MODEL[/bold] makes prompts from
    the columns of a table.

    Answers are written as they finish, one JSON object a line, with the custom_id of their row; rows that fail are
    written to a file beside OUT. With - as OUT, both are printed.

    Sampling options given here apply to rows that do not set their own. --seed is the seed of the job, from which each
    row's own is derived. Without --max-tokens, the model's generation_config.json sets the longest answer; if it does
    not, OpenAI's chat rows and those of --chat have as many tokens as fit, others 16.

    After a kill, Ctrl-C or a full disk, run the same command again: it continues where it stopped. Each row is answered
    once, with the tokens that it would have had. The exit code is 3 if some rows failed, 1 if all did.
    """
    path_in, path_out = _paths(options)
    values = sampling_values(sampling_options)
    _check(options, hosts_options, values)
    resources = _resources(options.worker_resources)
    if not join_hosts(hosts_options):
        return follow(model_options)
    with _opened_job(options) as job:
        _print_start(job, _shown(path_in))
        try:
            if options.ray:
                with _open_fleet(model_options, options, resources) as fleet:
                    summary = job.run(fleet, values)
            else:
                with open_llm(model_options) as llm:
                    summary = llm.on_leader(lambda: job.run(llm, values))
        except BaseException as error:
            if is_interrupt(error) and path_out != STDIN:
                say(f"\n{job.num_done:,} of {job.num_rows:,} rows are written; the same command continues from there")
            raise
    assert summary is not None  # this is host 0
    _print_end(summary, is_piped=path_out == STDIN)
    if options.as_json:
        write_json(asdict(summary))
    if summary.failed == 0:
        return OK
    return PARTIAL if summary.ok else ERROR


def _check(options: BatchOptions, hosts_options: HostsOptions, values: Mapping[str, Any]) -> None:
    """Raises UsageError for options that exclude each other, ImportError where an extra for `values` is missing."""
    if options.overwrite and options.retry_errors:
        raise UsageError("--overwrite discards earlier results, so there is nothing to retry: omit --retry-errors")
    for name in ("workers", "ray_address", "worker_resources"):
        if getattr(options, name) is not None and not options.ray:
            raise UsageError(f"--{name.replace('_', '-')} is for a fleet: add --ray")
    if options.ray and hosts_options.is_given:
        raise UsageError("--ray starts workers by itself, so omit --coordinator and the like")
    if "structured" in values:
        from jaxinfer.batch.input import NO_STRUCTURED, has_structured

        if not has_structured():
            raise ImportError(NO_STRUCTURED)


def _paths(options: BatchOptions) -> tuple[str, str]:
    """IN and OUT, each by position or by name. Raises UsageError for too few or too many."""
    by_position = list(options.paths or ())
    paths = [by_position.pop(0) if name is None and by_position else name for name in (options.input, options.output)]
    path_in, path_out = paths
    if path_in is None or path_out is None:
        raise UsageError("a batch needs a file of requests and one for answers: jaxinfer batch IN OUT -m MODEL")
    if by_position:
        raise UsageError(f"{by_position[0]!r} is one path too many: a batch has one IN and one OUT")
    if path_out == STDIN:
        for name in ("as_json", "retry_errors", "overwrite", "sort"):
            if getattr(options, name):
                flag = name.removeprefix("as_").replace("_", "-")
                raise UsageError(f"--{flag} is for answers in a file, and {STDIN} writes them to standard output")
    return path_in, path_out


@contextlib.contextmanager
def _opened_job(options: BatchOptions) -> "Iterator[Job]":
    """The job. Standard input is copied to a file first, since a job reads its input twice; answers for standard output
    are written to a file and printed as they finish, those of failed rows too."""
    from jaxinfer.batch import open_job
    from jaxinfer.batch.errors import BatchError

    path_in, path_out = _paths(options)
    names = ("errors", "resume", "overwrite", "retry_errors", "sort", "prompt_column", "prompt", "chat", "coordinates")
    flags = {**{name: getattr(options, name) for name in names}, "keep": options.keep or ()}
    flags["adapter_column"] = options.adapter_column
    on_line = None
    with contextlib.ExitStack() as stack:
        copied = path_in
        if STDIN in (path_in, path_out):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxinfer-batch-")))
            if path_in == STDIN:
                copied = folder / "in.jsonl"
                with copied.open("wb") as file, Stage("reading standard input"):
                    shutil.copyfileobj(sys.stdin.buffer, file)
            if path_out == STDIN:
                path_out, on_line = folder / "out.jsonl", _print_record
        try:
            with Stage(f"reading {_shown(path_in)}"):
                job = stack.enter_context(open_job(copied, path_out, on_line=on_line, **flags))
            yield job
        except BatchError as error:
            raise BatchError(str(error).replace(str(copied), _shown(path_in))) from None


def _print_record(record: dict[str, Any]) -> None:
    with hidden():  # standard output may be the terminal that has the bar
        write_json(record)


def _shown(path: str) -> str:
    return "standard input" if path == STDIN else path


def _resources(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        resources = json.loads(text)
    except ValueError:
        resources = None
    if not isinstance(resources, dict):
        raise UsageError(f'--worker-resources: {text!r} is not a JSON object, such as {{"num_gpus": 1}}')
    return resources


def _open_fleet(model: ChatServingOptions, options: BatchOptions, resources: dict[str, Any]) -> "RayPool":
    from jaxinfer.fleet import RayPool

    count, address = options.workers or 2, options.ray_address
    with Stage(f"starting {count} workers"):
        return RayPool(model.model, count, options=llm_arguments(model), resources=resources, address=address)


def _print_start(job: "Job", where: str) -> None:
    unit = job.scan.source.unit
    for row in job.scan.bad_rows:
        say(f"{where} {unit} {row.line}: {row.error}")
    num_more = job.scan.num_bad - len(job.scan.bad_rows)
    if num_more:
        say(f"and {num_more:,} more invalid {unit}s")
    if job.num_done:
        note(f"{job.num_done:,} of {job.num_rows:,} rows are done")


def _print_end(summary: "BatchSummary", *, is_piped: bool) -> None:
    parts = [f"{summary.rows:,} rows: {summary.ok:,} ok, {summary.failed:,} failed"]
    if summary.resumed == summary.rows:
        parts.append("all were done before")
    else:
        if summary.resumed:
            parts.append(f"{summary.resumed:,} were done before")
        tokens = f"{summary.prompt_tokens:,} prompt tokens, {summary.output_tokens:,} output tokens"
        parts.append(f"{tokens}{' in all' if summary.resumed else ''}")
        compiling = f" ({_duration(summary.compile_seconds)} compiling)" if summary.compile_seconds >= 0.05 else ""
        parts.append(f"{_duration(summary.seconds)}{compiling}, {summary.tokens_per_second:.0f} output tokens/s")
    if not is_piped:
        parts.append(f"answers in {summary.out}")
    if summary.failed and not is_piped:
        parts.append(f"errors in {summary.errors}")
    if summary.other_models:
        named = ", ".join(f"{name[:60]} ({count:,})" for name, count in list(summary.other_models.items())[:_NUM_NAMED])
        more = len(summary.other_models) - _NUM_NAMED
        parts.append(f"rows that name other models: {named}{f' and {more:,} more' if more > 0 else ''}")
    say(" · ".join(parts))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
