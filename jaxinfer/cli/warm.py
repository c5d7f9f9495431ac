"""`jaxinfer warm`: compiles ahead of time what serving a model will need, so that the first request pays nothing."""

import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jaxinfer.cli.options import DraftedServingOptions, ModelArgument, open_llm
from jaxinfer.cli.output import shows_progress, write_json, write_text


@dataclass(frozen=True)
class WarmOptions(DraftedServingOptions):
    """Those of serving; the model has no flag."""

    model: ModelArgument


def warm(
    options: WarmOptions,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object.")] = False,
) -> None:
    """Fill the compilation cache for a model and its options.

    Loads the model as serving it with the same options would and compiles every program that a request can need. What
    was compiled is kept on disk, so the next start on this machine reads it instead.
    """
    from jaxinfer import compilation_cache

    compilation_cache.enable()
    compilation_cache.keep_all()
    start = time.perf_counter()
    with compilation_cache.counting() as counts, open_llm(options) as llm:
        num_programs = llm.warm_up(use_tqdm=shows_progress())
    folder = compilation_cache.folder()
    report = {
        "model": options.model,
        "programs": num_programs,
        "compiled": counts.compiled,
        "from_cache": counts.hits,
        "seconds": time.perf_counter() - start,
        "folder": None if folder is None else str(folder),
    }
    if as_json:
        write_json(report)
    else:
        write_text(_summary(report))


def _summary(report: dict[str, Any]) -> str:
    where = f"kept in {report['folder']}" if report["folder"] else "not kept: JAXINFER_CACHE_DIR is empty"
    return (
        f"{report['programs']} programs of {report['model']} are ready, after {report['seconds']:.1f} s with loading: "
        f"{report['compiled']} compilations, {report['from_cache']} read from the cache; {where}\n"
    )
