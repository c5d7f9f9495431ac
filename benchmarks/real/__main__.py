"""jaxinfer, llama.cpp and Transformers on the same published models, in one run: `make bench-real`.

    python -m benchmarks.real [--models NAMES] [--systems NAMES] [--measures NAMES] [--rounds N] [--json FILE]
    python -m benchmarks.real --quick [--models NAMES]

jaxinfer and llama.cpp open the GGUF files of `make models`; Transformers opens float32 checkpoints that `jaxinfer
convert --requantize dense` makes of them. Each figure is of a process of its own; the systems take turns within a
measure, and the measures within a round, so that a slow minute of the machine hits all alike. With --json the file is
written after each figure, and a run with the same settings continues it. --quick measures jaxinfer alone, once, in one
process for each model.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.compare import SystemFailedError, run_process, versions
from benchmarks.peers.systems import why_not
from benchmarks.real.cpu import describe_cpu
from benchmarks.real.measures import QUICK, SYSTEMS, TITLES, figure_of, job_of
from benchmarks.real.models import MODELS, ModelFetchError, fetched_path
from benchmarks.real.report import to_markdown
from jaxinfer.files import cache_folder, write_text_atomically
from jaxinfer.measure.bench.model import machine

_SETTINGS = ("cpu", "instruction_sets", "num_threads", "options", "jax", "packages")  # those of a run that is continued


def work_folder() -> Path:
    """Where compiled programs and converted checkpoints are kept between runs."""
    folder = cache_folder("bench-real")
    if folder is None:
        raise SystemExit("JAXINFER_CACHE_DIR is empty: there is no folder for compiled programs")
    return folder


def dense_checkpoint(name: str, folder: Path) -> Path:
    """The model in float32 as Transformers opens it, made of the GGUF file if it is not there yet."""
    path = folder / f"{name}-dense"
    if not (path / "config.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        command = [sys.executable, "-m", "jaxinfer.cli", "convert", str(fetched_path(name)), str(path)]
        subprocess.run(
            [*command, "--to", "huggingface", "--requantize", "dense", "--dtype", "float32"],
            check=True,
            cwd=Path(__file__).parents[2],
        )
    return path


def empty_report(rounds: int, num_threads: int, options: dict[str, Any]) -> dict[str, Any]:
    """`models` has lists of figures, one of each round, by model, system and measure."""
    return {
        "version": 1,
        "models": {},
        "skipped": {},
        "failed": {},
        "rounds": rounds,
        "num_threads": num_threads,
        "options": options,
        **describe_cpu(),
        **machine(),
        "packages": versions(),
    }


def continued(file: Path | None, report: dict[str, Any]) -> dict[str, Any]:
    """The report with the figures that the file has. Raises SystemExit for a file of other settings, naming one."""
    if file is None or not file.exists():
        return report
    former = json.loads(file.read_text(encoding="utf-8"))
    for name in _SETTINGS:
        if former.get(name) != report[name]:
            raise SystemExit(f"{file} was made with {name}={former.get(name)}, not {report[name]}: remove it first")
    return {**report, "models": former["models"]}


def turns(
    models: list[str], measures: list[str], systems: list[str], rounds: int
) -> Iterator[tuple[int, str, str, str]]:
    """All figures in the order in which they are measured: round, model, measure, system."""
    for number in range(rounds):
        for model in models:
            for measure in measures:
                for system in systems:
                    yield number, model, measure, system


def measure(
    models: list[str], measures: list[str], systems: list[str], report: dict[str, Any], file: Path | None
) -> dict[str, Any]:
    """Measures what the report does not have, and writes it after each figure. A system that fails is left out from
    then on, and named."""
    folder = work_folder()
    for number, model, name, system in turns(models, measures, systems, report["rounds"]):
        figures = report["models"].setdefault(model, {}).setdefault(system, {}).setdefault(name, [])
        if len(figures) > number or system in report["failed"]:
            continue
        try:
            path = dense_checkpoint(model, folder) if system.startswith("transformers") else fetched_path(model)
            job = job_of(system, path, [name], report["num_threads"], report["options"])
            figures.append(figure_of(name, system, run_job(job, name, folder)))
        except (SystemFailedError, subprocess.CalledProcessError) as error:
            report["failed"][system] = str(error).splitlines()[-1]
            print(f"round {number + 1}  {error}", file=sys.stderr, flush=True)
            continue
        print(f"round {number + 1}  {model:<12}{name:<12}{system:<20}{figures[-1]:10.2f}", file=sys.stderr, flush=True)
        if file is not None:
            write_text_atomically(file, json.dumps(report, indent=1) + "\n")
    return report


def run_job(job: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """One process. A cold start has an empty folder of compiled programs; the others have been started before."""
    if name == "start_cold":
        cold = folder / "cold"
        shutil.rmtree(cold, ignore_errors=True)
        cold.mkdir()
        return run_process(job, sys.executable, cold)
    if name == "start_warm":
        run_process(job, sys.executable, folder)
    return run_process(job, sys.executable, folder)


def quick(models: list[str], measures: list[str], report: dict[str, Any]) -> dict[str, Any]:
    """jaxinfer alone, all measures in one process."""
    folder = work_folder()
    for model in models:
        job = job_of("jaxinfer", fetched_path(model), measures, report["num_threads"], report["options"])
        found = run_process(job, sys.executable, folder)
        row = {name: [figure_of(name, "jaxinfer", found)] for name in measures}
        report["models"][model] = {"jaxinfer": row}
    return report


def _names(text: str, known: list[str], option: str, parser: argparse.ArgumentParser) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    return names


def main() -> None:
    from pallas_kernels.platform import num_cores

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas between (default: all)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)} (default: all)")
    parser.add_argument("--measures", help=f"of {', '.join(TITLES)} (default: all; with --quick {', '.join(QUICK)})")
    parser.add_argument("--rounds", type=int, default=3, help="times each figure is measured (default 3)")
    parser.add_argument("--threads", type=int, default=min(2, num_cores()), help="of each system (default 2)")
    parser.add_argument("--activations", metavar="DTYPE", help="the option activations of jaxinfer, such as int8")
    parser.add_argument("--quick", action="store_true", help="jaxinfer alone, once, in one process for each model")
    parser.add_argument("--json", type=Path, help="write the figures to this file after each, or continue it")
    options = parser.parse_args()
    for name in ("rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    models = _names(options.models, list(MODELS), "--models", parser)
    try:
        for name in models:
            fetched_path(name)
    except ModelFetchError as error:
        raise SystemExit(f"error: {error}") from None
    default = ",".join(QUICK if options.quick else TITLES)
    measures = _names(options.measures or default, list(TITLES), "--measures", parser)
    given = {} if options.activations is None else {"activations": options.activations}
    report = empty_report(1 if options.quick else options.rounds, options.threads, given)
    print(f"{report['cpu']}: {', '.join(report['instruction_sets'])}", file=sys.stderr)
    if options.quick:
        print(to_markdown(quick(models, measures, report)))
        return
    systems = _names(options.systems, list(SYSTEMS), "--systems", parser)
    report["skipped"] = {name: why for name in systems if (why := why_not(name, None)) is not None}
    present = [name for name in systems if name not in report["skipped"]]
    print(to_markdown(measure(models, measures, present, continued(options.json, report), options.json)))


if __name__ == "__main__":
    main()
