"""`jaxinfer batch`: a file of requests in, a file of answers out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.command import ERROR, OK, PARTIAL, UsageError, is_interrupt, say
from jaxinfer.cli.options import (
    DraftedServingOptions,
    HostsOptions,
    SamplingOptions,
    follow,
    join_hosts,
    llm_arguments,
    open_llm,
    sampling_values,
)
from jaxinfer.cli.output import note, write_json

if TYPE_CHECKING:
    from jaxinfer.batch import BatchSummary, Job
    from jaxinfer.fleet import RayPool

_FILES = "Files"
_RAY = "A fleet"


def batch(
    model_options: DraftedServingOptions,
    hosts_options: HostsOptions,
    sampling_options: SamplingOptions,
    path_in: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one JSON object a line.")],
    path_out: Annotated[Path, typer.Argument(metavar="OUT", help="Answers, one JSON object a line, as they finish.")],
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Where rows that fail go; default: OUT with .errors.jsonl.", rich_help_panel=_FILES
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            metavar="",
            help="Go on where OUT ends, if it is of the same job; or refuse an OUT that exists.",
            rich_help_panel=_FILES,
        ),
    ] = True,
    retry_errors: Annotated[
        bool,
        typer.Option("--retry-errors", metavar="", help="Try rows again that failed before.", rich_help_panel=_FILES),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", metavar="", help="Start anew and drop what OUT holds.", rich_help_panel=_FILES),
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", metavar="", help="Run on a pool of engines in Ray actors.", rich_help_panel=_RAY)
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Engines; default: 2.", rich_help_panel=_RAY)
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="A running cluster, such as auto; default: this machine.", rich_help_panel=_RAY
        ),
    ] = None,
    worker_resources: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="What Ray reserves for each engine, such as '{\"num_gpus\": 1}'; default: a CPU.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="A summary as JSON, at the end.")] = False,
) -> int:
    """Serve a file of requests.

    A line of IN is OpenAI's batch form, with custom_id, url (/v1/chat/completions or /v1/completions) and body; or
    [bold]{"prompt": "...", "temperature": 0.7}[/bold], or the same with "messages". Sampling options given here are
    for what a line does not say; --seed is the whole job's, and each line gets its own from it. Without a length, as
    with OpenAI, chat may take all that fits and completions 16 tokens.

    Run the same command again after a kill, Ctrl-C or a full disk: it goes on where it was, every line is answered
    once, and with the same tokens. The exit code is 3 where some lines failed, 1 where all did.
    """
    from jaxinfer.batch import open_job

    if overwrite and retry_errors:
        raise UsageError("--overwrite starts anew, so there is nothing to retry: leave --retry-errors out")
    values = sampling_values(sampling_options)
    for name, value in (("workers", workers), ("ray-address", ray_address), ("worker-resources", worker_resources)):
        if value is not None and not ray:
            raise UsageError(f"--{name} is for a fleet: say --ray too")
    resources = _resources(worker_resources)
    if ray and hosts_options.is_given:
        raise UsageError("--ray starts workers by itself, so leave --coordinator and the like out")
    if not join_hosts(hosts_options):
        return follow(model_options)
    with open_job(
        path_in, path_out, errors=errors, resume=resume, overwrite=overwrite, retry_errors=retry_errors
    ) as job:
        _tell_start(job)
        try:
            if ray:
                with _open_fleet(model_options, workers or 2, resources, ray_address) as fleet:
                    summary = job.run(fleet, values)
            else:
                with open_llm(model_options) as llm:
                    summary = llm.on_leader(lambda: job.run(llm, values))
        except BaseException as error:
            if is_interrupt(error):
                say(f"\n{job.num_done:,} of {job.num_rows:,} rows are written; the same command goes on from there")
            raise
    assert summary is not None  # this is host 0
    _tell_end(summary)
    if as_json:
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
    from jaxinfer.cli.output import waiting
    from jaxinfer.fleet import RayPool

    with waiting(f"starting {num_workers} workers"):
        return RayPool(options.model, num_workers, options=llm_arguments(options), resources=resources, address=address)


def _tell_start(job: "Job") -> None:
    for row in job.scan.bad_rows:
        say(f"{job.scan.path} line {row.line}: {row.error}")
    num_more = job.scan.num_bad - len(job.scan.bad_rows)
    if num_more:
        say(f"and {num_more:,} more lines that cannot be served")
    if job.num_done:
        note(f"{job.num_done:,} of {job.num_rows:,} rows are done")


def _tell_end(summary: "BatchSummary") -> None:
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
