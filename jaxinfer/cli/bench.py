"""`jaxinfer bench`: latency, throughput and load of a model on this machine, beside the measured roofline."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jaxinfer.checks import need_plotting
from jaxinfer.cli.command import UsageError, command
from jaxinfer.cli.names import NamedCommand, NamedGroup
from jaxinfer.cli.options import DraftedServingOptions, llm_arguments, model_argument
from jaxinfer.cli.output import console, write_text
from jaxinfer.options import MISSING, argument, option
from jaxinfer.progress import Stage
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.measure.bench.model import Bench
    from jaxinfer.measure.bench.remote import Server
    from jaxinfer.measure.bench.runs import RunOptions
    from jaxinfer.measure.bench.workload import BenchWorkload

WARM_UP_REQUESTS = 2
VOCAB_SIZE = 1000  # random prompts for a server have token ids below this; most vocabularies are larger
PICTURES = (".png", ".svg", ".pdf")

workload_option = partial(option, group="Workload")
results_option = partial(option, group="Results")
http_option = partial(option, group="Over HTTP")
seed_option = partial(workload_option, 0, "The same seed gives the same requests.", "N", min=0)
json_file_option = partial(results_option, None, "Write all results to this file.", "FILE", "--json")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Requests, and the limits and prices for judging their times."""

    prompt_tokens: str = workload_option("128", "Lengths of prompts, unless --dataset gives prompts.", "N|A:B|log:A:B")
    answer_tokens: str = workload_option(
        "128", "Lengths of answers in tokens; end-of-sequence tokens are ignored.", "N|A:B|log:A:B"
    )
    dataset: Path | None = workload_option(None, 'JSON lines with "prompt" and optionally "output_tokens".', "FILE")
    temperature: float = workload_option(0.0, "0 takes the most probable token.", "X", min=0)
    seed: int = seed_option()
    goodput: str | None = results_option(
        None, "Also count the requests within these limits of ttft, tpot and e2el.", "ttft:MS,..."
    )
    price_per_hour: float | None = results_option(
        None, "Price of the machine, for the cost per million tokens.", "X", min=0
    )
    json: Path | None = json_file_option()


@dataclass(frozen=True, kw_only=True)
class MeasuredModelOptions(DraftedServingOptions):
    """Serving options of a model that is given by position and may be only a configuration."""

    model: str = model_argument()
    random_weights: bool = option(
        False, "Use only the configuration of MODEL (a config.json is enough), with random weights.", group="Model"
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions(WorkloadOptions, MeasuredModelOptions):
    """The model, the engine and the requests."""

    steps_per_dispatch: int | None = option(
        None, "Decode steps of a dispatch; default: 8, or 1 for `bench load`.", "N", min=1, group="Engine"
    )


# Options of the command that are no arguments of `LLM`.
OWN = ("random_weights", "prompt_tokens", "answer_tokens", "dataset", "temperature", "seed", "goodput")
OWN += ("price_per_hour", "json")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    batch: str = option("1", "Batch sizes.", "N,N,...")
    repeats: int = option(5, "Number of batches of each size.", "N", min=1)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    requests: int = option(64, "Number of requests.", "N", min=1)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(BenchOptions):
    model: str = argument(
        "",
        "As for other commands. With --url its name in requests; by default the first that the server lists.",
        "MODEL",
    )
    url: str | None = http_option(
        None,
        "Send the requests to this OpenAI-compatible server, such as http://127.0.0.1:8000. Its API key, if it needs "
        "one, is taken from OPENAI_API_KEY.",
        "URL",
    )
    vocab_size: int | None = http_option(
        None, "Prompts are random token ids below N, unless --dataset gives texts; default: 1,000.", "N", min=1
    )
    rate: str = option("1", "Requests per second; inf sends all at once.", "X,X,...")
    requests: int = option(64, "Number of requests at each rate.", "N", min=1)
    burstiness: float = option(1.0, "Of the arrivals: 1 is a Poisson process, less comes in bursts.", "X")
    max_concurrency: int | None = option(None, "Maximum number of requests in flight; others wait.", "N", min=1)
    resume: bool = option(False, "Keep the rates that --json FILE has already.")


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    files: list[Path] = argument(MISSING, "Files that --json wrote.", "FILE...")
    out: Path = option(MISSING, "The picture, as .png, .svg or .pdf.", "FILE")


def latency(options: LatencyOptions) -> None:
    """Measure batches of requests, one batch at a time.

    All programs are compiled first, and one batch of each size runs before those that are measured.
    """
    with Stage("starting"):
        from jaxinfer.measure.bench import runs
        from jaxinfer.measure.bench.workload import parse_numbers

    sizes = [int(size) for size in parse_numbers(options.batch, "--batch", integers=True)]
    workload = read_workload(options)
    arguments = {"max_seqs": max(sizes), **bench_arguments(options, (*OWN, "batch", "repeats"))}
    result = new_result(options, "latency", arguments, {"repeats": options.repeats})
    with session(options, result, arguments) as (bench, save):
        for size in sizes:
            batches = [workload.requests(size, bench.vocab_size, part) for part in range(options.repeats + 1)]
            with progress(f"batch {size}", size * (options.repeats + 1), options) as run_options:
                save(runs.latency(bench, batches, run_options))


def throughput(options: ThroughputOptions) -> None:
    """Measure many requests that arrive at once."""
    with Stage("starting"):
        from jaxinfer.measure.bench import runs

    workload = read_workload(options)
    arguments = bench_arguments(options, (*OWN, "requests"))
    result = new_result(options, "throughput", arguments, {"requests": options.requests})
    with session(options, result, arguments) as (bench, save):
        warm_up = workload.requests(WARM_UP_REQUESTS, bench.vocab_size, part=1)
        requests = workload.requests(options.requests, bench.vocab_size)
        with progress("requests", len(requests) + len(warm_up), options) as run_options:
            save(runs.throughput(bench, requests, warm_up, run_options))


def load(options: LoadOptions) -> None:
    """Measure requests that arrive over time and are streamed to clients.

    The time to the first token counts from when a request is sent, so it excludes what --max-concurrency makes it wait.
    With --url the requests go to a server that runs already, of this program or another.
    """
    if options.url is None and options.vocab_size is not None:
        raise UsageError("--vocab-size is for a server (--url): the vocabulary of a model that is opened here is known")
    if options.url is None and not options.model:
        raise UsageError("no model: such as jaxinfer bench load demo, or --url URL for a server that runs already")
    with Stage("starting"):
        from jaxinfer.measure.bench import results, runs
        from jaxinfer.measure.bench.runs import RunOptions
        from jaxinfer.measure.bench.workload import arrivals, parse_numbers

    rates = parse_numbers(options.rate, "--rate")
    arrivals(rates[0], 1, burstiness=options.burstiness)  # raises before a long start
    if options.resume and options.json is None:
        raise UsageError("--resume needs --json FILE with the rates that are done")
    workload = read_workload(options)
    own = {name: getattr(options, name) for name in ("requests", "burstiness", "max_concurrency", "vocab_size")}
    arguments = bench_arguments(options, (*OWN, *own, "rate", "resume", "url"))
    remote = None if options.url is None else open_server(options.url, options, arguments)
    result = new_result(options, "load", arguments, own, model=None if remote is None else remote.model)
    if options.resume and options.json is not None:
        result["runs"] = results.earlier_runs(options.json, result)
    done = [run["rate"] for run in result["runs"]]
    left = [(rate, name) for rate in rates if (name := rate if math.isfinite(rate) else "inf") not in done]
    if not left:
        write_text(f"{options.json} has these rates already\n")
        return

    def measure_rates(measure: Callable[..., dict[str, Any]], vocab_size: int, save: Callable[..., None]) -> None:
        for number, name in left:
            # The same requests at each rate, so that only the load differs.
            requests = workload.requests(options.requests, vocab_size)
            times = arrivals(number, options.requests, burstiness=options.burstiness, seed=options.seed)
            with progress(f"{name} requests/s", options.requests, options) as run_options:
                save({"rate": name, **measure(requests, times, run_options, options.max_concurrency)})

    if remote is not None:
        remote.load(workload.requests(1, vocab_size := options.vocab_size or VOCAB_SIZE, part=1), [0.0], RunOptions())
        measure_rates(remote.load, vocab_size, partial(save_run, result, options.json))
        print_result(result)
        return
    with session(options, result, arguments, serves=True) as (bench, save):
        measure_rates(partial(runs.load, bench), bench.vocab_size, save)


def open_server(url: str, options: LoadOptions, arguments: dict[str, Any]) -> "Server":
    """The server of --url. Raises UsageError for an option of a model that is opened here; OSError and RequestError for
    a server that does not answer."""
    from jaxinfer.measure.bench.remote import Server

    for name in ("random_weights" if options.random_weights else None, *arguments):
        if name is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for a model that is opened here, not for a server (--url)")
    with Stage(f"asking {url}"):
        return Server.open(url, options.model)


def plot(options: PlotOptions) -> None:
    """Draw results: latency by load, tokens/s by batch size with the roofline, acceptance, memory."""
    from jaxinfer.measure.bench import results
    from jaxinfer.measure.bench.plot import draw

    check_picture(options.out, "--out")
    with Stage("drawing"):
        titles = draw([results.read_result(file) for file in options.files], options.out)
    write_text(f"{options.out}: {', '.join(titles)}\n")


def read_workload(options: WorkloadOptions) -> "BenchWorkload":
    """Raises UsageError or ValueError for an option that cannot be read."""
    from jaxinfer.measure.bench.metrics import parse_goodput
    from jaxinfer.measure.bench.workload import BenchWorkload, Lengths, read_dataset

    parse_goodput(options.goodput)
    check_folder(options.json, "--json")
    return BenchWorkload(
        Lengths.parse(options.prompt_tokens, "--prompt-tokens"),
        Lengths.parse(options.answer_tokens, "--answer-tokens"),
        () if options.dataset is None else read_dataset(options.dataset),
        options.seed,
    )


def read_integers(text: str, flag: str) -> list[int]:
    """Positive numbers separated by commas, without repeats. Raises UsageError for anything else."""
    from jaxinfer.measure.bench.workload import parse_numbers

    try:
        return [int(number) for number in parse_numbers(text, flag, integers=True)]
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_folder(file: Path | None, flag: str) -> None:
    """Raises UsageError if the folder of a file to write does not exist."""
    if file is not None and not file.resolve().parent.is_dir():
        raise UsageError(f"{flag}: no folder {file.resolve().parent}")


def check_picture(file: Path | None, flag: str) -> None:
    """Raises UsageError, before anything is measured, for a picture that could not be written."""
    if file is not None and file.suffix not in PICTURES:
        raise UsageError(f"{flag}: {file} ends in neither .png, .svg nor .pdf")
    check_folder(file, flag)
    if file is not None:
        need_plotting(flag)


def bench_arguments(options: MeasuredModelOptions, own: Sequence[str]) -> dict[str, Any]:
    """The arguments of `LLM` among the options: all but those in `own`."""
    if options.random_weights and options.requantize is not None:
        raise UsageError("--requantize is for a GGUF file's weights, which --random-weights does not read")
    return {name: value for name, value in llm_arguments(options).items() if name not in own}


def save_run(result: dict[str, Any], file: Path | None, run: dict[str, Any]) -> None:
    """Adds a run to the result, and writes it to the file, if there is one."""
    from jaxinfer.measure.bench import results

    result["runs"].append(run)
    if file is not None:
        results.write_result(file, result)


def print_result(result: dict[str, Any]) -> None:
    from jaxinfer.measure.bench import results

    target = console()
    target.print("\n".join(results.header(result)), markup=False, soft_wrap=True)
    target.print(make_table(*results.rows(result)))
    target.print("\n".join(results.details(result)), markup=False, soft_wrap=True)


def new_result(
    options: BenchOptions, name: str, arguments: dict[str, Any], own: dict[str, Any], *, model: str | None = None
) -> dict[str, Any]:
    """A result without runs. Of paths among the options only the last part is kept. `model`: the name of a server's
    model, whose machine is unknown; None for a model opened here."""
    from jaxinfer.measure.bench import results
    from jaxinfer.measure.bench.model import machine, public_name, public_options

    values = {**arguments, **{key: getattr(options, key) for key in OWN if key != "json"}, **own}
    return {
        "schema": results.SCHEMA,
        "version": results.VERSION,
        "command": name,
        "model": public_name(options.model) if model is None else model,
        "options": public_options(values),
        "machine": machine() if model is None else {},
        "start": None,
        "roofline": None,
        "runs": [],
    }


@contextlib.contextmanager
def session(
    options: BenchOptions, result: dict[str, Any], arguments: dict[str, Any], *, serves: bool = False
) -> "Iterator[tuple[Bench, Callable[[dict[str, Any]], None]]]":
    """Opens the model, and prints the tables when the block ends; yields it, and `save_run` for its result."""
    from jaxinfer.measure.bench.model import opened

    with contextlib.ExitStack() as stack:
        with Stage(f"opening {options.model}, compiling, measuring the roofline"):
            bench = stack.enter_context(
                opened(options.model, arguments, random_weights=options.random_weights, serves=serves)
            )
        result["start"], result["roofline"] = asdict(bench.start), bench.ideal.measured.to_dict()
        yield bench, partial(save_run, result, options.json)
    print_result(result)


@contextlib.contextmanager
def progress(title: str, total: int, options: BenchOptions) -> Iterator["RunOptions"]:
    """Options of a run, and a stage that counts finished requests."""
    from jaxinfer.measure.bench.metrics import parse_goodput
    from jaxinfer.measure.bench.runs import RunOptions

    with Stage(title, total, "request") as stage:
        yield RunOptions(
            temperature=options.temperature,
            seed=options.seed,
            limits=parse_goodput(options.goodput),
            price_per_hour=options.price_per_hour,
            progress=stage.update,
        )


app = typer.Typer(
    cls=NamedGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure a model on this machine: latency, throughput, load; draw the results.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function in {"latency": latency, "throughput": throughput, "load": load, "plot": plot}.items():
    app.command(_name, cls=NamedCommand)(command(_function))
