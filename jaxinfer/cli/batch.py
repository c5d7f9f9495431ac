"""`jaxinfer batch`: a file of requests in, a file of answers out."""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
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
_fleet = partial(option, group="A fleet")
_NUM_NAMED = 5  # other models


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    paths: list[str] | None = argument(
        None,
        "Requests, and answers as they finish: one JSON object per line; -: standard input, standard output.",
        "IN OUT",
    )
    input: str | None = _files(None, "IN by name.", "PATH", "--input --input-file -i")
    output: str | None = _files(None, "OUT by name.", "PATH", "--output --output-file -o")
    errors: Path | None = _files(None, "File for failed rows; default: OUT with .errors.jsonl.", "PATH")
    resume: bool = _files(
        True, "Continue OUT if it belongs to the same job; or refuse an existing OUT.", flag="--resume/--no-resume"
    )
    retry_errors: bool = _files(False, "Retry rows that failed before.")
    overwrite: bool = _files(False, "Discard what OUT holds and start again.")
    ray: bool = _fleet(False, "Run on a pool of engines in Ray actors.")
    workers: int | None = _fleet(None, "Number of engines; default: 2.", "N", min=1)
    ray_address: str | None = _fleet(None, "A running cluster, such as auto; default: this machine.", "ADDRESS")
    worker_resources: str | None = _fleet(
        None, "What Ray reserves for each engine, such as '{\"num_gpus\": 1}'; default: one CPU.", "JSON"
    )
    as_json: bool = as_json("Print a summary as JSON at the end.")


def batch(
    model_options: ChatServingOptions,
    hosts_options: HostsOptions,
    sampling_options: SamplingOptions,
    options: BatchOptions,
) -> int:
    """Serve a file of requests.

    IN and OUT may be - for standard input and standard output, where failed lines are written too, or follow
    -i and -o.

    A line of IN has OpenAI's batch form, with custom_id, url (/v1/chat/completions or /v1/completions) and body; or it
    is [bold]{"prompt": "...", "temperature": 0.7}[/bold], or the same with "messages". Sampling options given here
    apply where a line has none of its own. --seed is that of the whole job, from which each line's seed is derived.
    The default length is OpenAI's: what fits for chat, 16 tokens for completions.

    After a kill, Ctrl-C or a full disk, run the same command again: it continues where it stopped, every line is
    answered once, with the same tokens. The exit code is 3 if some lines failed, 1 if all did.
    """
    path_in, path_out = _paths(options)
    if options.overwrite and options.retry_errors:
        raise UsageError("--overwrite discards earlier results, so there is nothing to retry: omit --retry-errors")
    values = sampling_values(sampling_options)
    for name in ("workers", "ray_address", "worker_resources"):
        if getattr(options, name) is not None and not options.ray:
            raise UsageError(f"--{name.replace('_', '-')} is for a fleet: add --ray")
    resources = _resources(options.worker_resources)
    if options.ray and hosts_options.is_given:
        raise UsageError("--ray starts workers by itself, so omit --coordinator and the like")
    if not join_hosts(hosts_options):
        return follow(model_options)
    with _opened_job(options) as job:
        _print_start(job, _shown(path_in))
        try:
            if options.ray:
                with _open_fleet(model_options, options.workers or 2, resources, options.ray_address) as fleet:
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


def _paths(options: BatchOptions) -> tuple[str, str]:
    """IN and OUT, each by position or by name. Raises UsageError for too few or too many."""
    by_position = list(options.paths or ())
    found = [by_position.pop(0) if name is None and by_position else name for name in (options.input, options.output)]
    path_in, path_out = found
    if path_in is None or path_out is None:
        raise UsageError("a batch needs a file of requests and one for answers: jaxinfer batch IN OUT -m MODEL")
    if by_position:
        raise UsageError(f"{by_position[0]!r} is one path too many: a batch has one IN and one OUT")
    if path_out == STDIN:
        for name in ("as_json", "retry_errors", "overwrite"):
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
    flags = {name: getattr(options, name) for name in ("errors", "resume", "overwrite", "retry_errors")}
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


def _open_fleet(
    options: ChatServingOptions, num_workers: int, resources: dict[str, Any], address: str | None
) -> "RayPool":
    from jaxinfer.fleet import RayPool

    with Stage(f"starting {num_workers} workers"):
        return RayPool(options.model, num_workers, options=llm_arguments(options), resources=resources, address=address)


def _print_start(job: "Job", where: str) -> None:
    for row in job.scan.bad_rows:
        say(f"{where} line {row.line}: {row.error}")
    num_more = job.scan.num_bad - len(job.scan.bad_rows)
    if num_more:
        say(f"and {num_more:,} more invalid lines")
    if job.num_done:
        note(f"{job.num_done:,} of {job.num_rows:,} rows are done")


def _print_end(summary: "BatchSummary", *, is_piped: bool) -> None:
    parts = [f"{summary.rows:,} rows: {summary.ok:,} ok, {summary.failed:,} failed"]
    if summary.resumed == summary.rows:
        parts.append("all were done before")
    else:
        if summary.resumed:
            parts.append(f"{summary.resumed:,} were done before")
        parts.append(f"{summary.output_tokens:,} tokens{' in all' if summary.resumed else ''}")
        parts.append(f"{_duration(summary.seconds)}, {summary.tokens_per_second:.0f} tokens/s")
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
