"""`jaxinfer warm`: compiles ahead of time the programs that serving a model needs."""

import time
from dataclasses import dataclass
from typing import Any

from jaxinfer.cli.options import DraftedServingOptions, as_json, model_argument, open_llm, option
from jaxinfer.cli.output import write_report


@dataclass(frozen=True, kw_only=True)
class WarmOptions(DraftedServingOptions):
    """Serving options; the model is given by position."""

    model: str = model_argument()
    jobs: int | None = option(None, "Programs compiled at once.  [default: number of cores, at most 8]", "N", min=1)
    as_json: bool = as_json("One JSON object.")


def warm(options: WarmOptions) -> None:
    """Fill the compilation cache for a model and its options.

    Loads the model with these options and compiles every program that a request can need. The programs are kept on
    disk, and the next start with the same options on this machine reads them.
    """
    from jaxinfer import compilation_cache

    compilation_cache.enable()
    compilation_cache.keep_all()
    start = time.perf_counter()
    with compilation_cache.counting() as counts, open_llm(options) as llm:
        num_programs = llm.warm_up(jobs=options.jobs)
    folder = compilation_cache.folder()
    report = {
        "model": options.model,
        "programs": num_programs,
        "compiled": counts.compiled,
        "from_cache": counts.hits,
        "seconds": time.perf_counter() - start,
        "folder": None if folder is None else str(folder),
    }
    write_report(report, _summary, as_json=options.as_json)


def _summary(report: dict[str, Any]) -> str:
    where = f"kept in {report['folder']}" if report["folder"] else "not kept: JAXINFER_CACHE_DIR is empty"
    return (
        f"{report['programs']} programs of {report['model']} are ready, after {report['seconds']:.1f} s with loading: "
        f"{report['compiled']} compilations, {report['from_cache']} read from the cache; {where}\n"
    )
