"""`jaxinfer batch`: a file of requests in, a file of answers out."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import ERROR, OK, PARTIAL, UsageError, is_interrupt, say
from jaxinfer.cli.options import (
    DraftedServingOptions,
    HostsOptions,
    SamplingOptions,
    as_json,
    follow,
    join_hosts,
    llm_arguments,
    open_llm,
    sampling_values,
)
from jaxinfer.cli.output import note, waiting, write_json
from jaxinfer.options import MISSING, argument, option

if TYPE_CHECKING:
    from jaxinfer.batch import BatchSummary, Job
    from jaxinfer.fleet import RayPool

_files = partial(option, group="Files")
_fleet = partial(option, group="A fleet")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    path_in: Path = argument(MISSING, "Requests, one JSON object per line.", "IN")
    path_out: Path = argument(MISSING, "Answers, one JSON object per line, as they finish.", "OUT")
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
    model_options: DraftedServingOptions,
    hosts_options: HostsOptions,
    sampling_options: SamplingOptions,
    options: BatchOptions,
) -> int:
    """Serve a file of requests.

    A line of IN has OpenAI's batch form, with custom_id, url (/v1/chat/completions or /v1/completions) and body; or it
    is [bold]{"prompt": "...", "temperature": 0.7}[/bold], or the same with "messages". Sampling options given here
    apply where a line has none of its own. --seed is that of the whole job, from which each line's seed is derived.
    The default length is OpenAI's: what fits for chat, 16 tokens for completions.

    After a kill, Ctrl-C or a full disk, run the same command again: it continues where it stopped, every line is
    answered once, with the same tokens. The exit code is 3 if some lines failed, 1 if all did.
    """
    from jaxinfer.batch import open_job

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
    flags = {name: getattr(options, name) for name in ("errors", "resume", "overwrite", "retry_errors")}
    with open_job(options.path_in, options.path_out, **flags) as job:
        _print_start(job)
        try:
            if options.ray:
                with _open_fleet(model_options, options.workers or 2, resources, options.ray_address) as fleet:
                    summary = job.run(fleet, values)
            else:
                with open_llm(model_options) as llm:
                    summary = llm.on_leader(lambda: job.run(llm, values))
        except BaseException as error:
            if is_interrupt(error):
                say(f"\n{job.num_done:,} of {job.num_rows:,} rows are written; the same command continues from there")
            raise
    assert summary is not None  # this is host 0
    _print_end(summary)
    if options.as_json:
        write_json(asdict(summary))
    if summary.failed == 0:
        return OK
    return PARTIAL if summary.ok else ERROR


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
    options: DraftedServingOptions, num_workers: int, resources: dict[str, Any], address: str | None
) -> "RayPool":
    from jaxinfer.fleet import RayPool

    with waiting(f"starting {num_workers} workers"):
        return RayPool(options.model, num_workers, options=llm_arguments(options), resources=resources, address=address)


def _print_start(job: "Job") -> None:
    for row in job.scan.bad_rows:
        say(f"{job.scan.path} line {row.line}: {row.error}")
    num_more = job.scan.num_bad - len(job.scan.bad_rows)
    if num_more:
        say(f"and {num_more:,} more invalid lines")
    if job.num_done:
        note(f"{job.num_done:,} of {job.num_rows:,} rows are done")


def _print_end(summary: "BatchSummary") -> None:
    parts = [f"{summary.rows:,} rows: {summary.ok:,} ok, {summary.failed:,} failed"]
    if summary.resumed == summary.rows:
        parts.append("all were done before")
    else:
        if summary.resumed:
            parts.append(f"{summary.resumed:,} were done before")
        parts.append(f"{summary.output_tokens:,} tokens{' in all' if summary.resumed else ''}")
        parts.append(f"{_duration(summary.seconds)}, {summary.tokens_per_second:.0f} tokens/s")
    parts.append(f"answers in {summary.out}")
    if summary.failed:
        parts.append(f"errors in {summary.errors}")
    say(" · ".join(parts))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
