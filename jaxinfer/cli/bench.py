"""`jaxinfer bench`: latency, throughput and load of a model on this machine, beside the roofline measured with them."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.command import UsageError, command
from jaxinfer.cli.options import DraftedServingOptions, ModelArgument, llm_arguments
from jaxinfer.cli.output import console, shows_progress, waiting, write_text
from jaxinfer.cli.workload_options import WorkloadOptions, check_folder, read_workload

if TYPE_CHECKING:
    from jaxinfer.measure.bench.model import Bench
    from jaxinfer.measure.bench.runs import RunOptions

WARM_UP_REQUESTS = 2
# Where a name may be a path: results have its last part only.
PATHS = ("tokenizer", "draft", "dataset")


@dataclass(frozen=True)
class MeasuredModelOptions(DraftedServingOptions):
    """Those of serving, of a model that has no flag and may be a configuration alone."""

    model: ModelArgument
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            metavar="",
            help="Of MODEL take the configuration only; a config.json alone will do.",
            rich_help_panel="Model",
        ),
    ] = False


@dataclass(frozen=True)
class BenchOptions(WorkloadOptions, MeasuredModelOptions):
    """The model and the engine, and what is asked of it."""

    steps_per_dispatch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Decode steps of a dispatch; default: 8, for load 1.", rich_help_panel="Engine"
        ),
    ] = None


OWN = ("random_weights", "prompt_tokens", "answer_tokens", "dataset", "temperature", "seed", "goodput")
OWN += ("price_per_hour", "json")


def latency(
    options: BenchOptions,
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Requests at once.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Batches of each size.")] = 5,
) -> None:
    """Measure batches of requests, one batch at a time.

    Every program is compiled first, and a batch of each size runs before the ones that count.
    """
    from jaxinfer.measure.bench import runs
    from jaxinfer.measure.bench.workload import parse_numbers

    sizes = [int(size) for size in parse_numbers(batch, "--batch", whole=True)]
    workload = read_workload(options)
    arguments = {"max_seqs": max(sizes), **bench_arguments(options)}
    result = new_result(options, "latency", arguments, {"repeats": repeats})
    with session(options, result, arguments) as one:
        for size in sizes:
            batches = [workload.asks(size, one.bench.vocab_size, part) for part in range(repeats + 1)]
            with progress(f"batch {size}", size * (repeats + 1), options) as how:
                one.save(runs.latency(one.bench, batches, how))


def throughput(
    options: BenchOptions,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Number of requests.")] = 64,
) -> None:
    """Measure many requests that come all at once."""
    from jaxinfer.measure.bench import runs

    workload = read_workload(options)
    arguments = bench_arguments(options)
    result = new_result(options, "throughput", arguments, {"requests": requests})
    with session(options, result, arguments) as one:
        warm = workload.asks(WARM_UP_REQUESTS, one.bench.vocab_size, part=1)
        asks = workload.asks(requests, one.bench.vocab_size)
        with progress("requests", requests + len(warm), options) as how:
            one.save(runs.throughput(one.bench, asks, warm, how))


def load(
    options: BenchOptions,
    rate: Annotated[str, typer.Option(metavar="X,X,...", help="Requests a second; inf sends all at once.")] = "1",
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="At each rate.")] = 64,
    burstiness: Annotated[
        float, typer.Option(metavar="X", help="Of the arrivals: 1 is a Poisson process, less comes in bursts.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests sent at once; others wait to be sent.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Keep the rates that --json FILE has already.")
    ] = False,
) -> None:
    """Measure requests that arrive while others run, through the path that streams to clients.

    Time to first token counts from when a request was sent, so not what --max-concurrency made it wait.
    """
    from jaxinfer.measure.bench import results, runs
    from jaxinfer.measure.bench.workload import arrivals, parse_numbers

    rates = parse_numbers(rate, "--rate")
    arrivals(rates[0], 1, burstiness=burstiness)  # before a long start
    if resume and options.json is None:
        raise UsageError("--resume needs --json FILE, which has the rates that are done")
    workload = read_workload(options)
    own = {"requests": requests, "burstiness": burstiness, "max_concurrency": max_concurrency}
    arguments = bench_arguments(options)
    result = new_result(options, "load", arguments, own)
    if resume and options.json is not None:
        result["runs"] = results.finished(options.json, result)
    done = [run["rate"] for run in result["runs"]]
    left = [(one, name) for one in rates if (name := one if math.isfinite(one) else "inf") not in done]
    if not left:
        write_text(f"{options.json} has these rates already\n")
        return
    with session(options, result, arguments, serves=True) as one:
        for number, name in left:
            # The same requests at each rate, so that nothing but the load differs.
            asks = workload.asks(requests, one.bench.vocab_size)
            times = arrivals(number, requests, burstiness=burstiness, seed=options.seed)
            with progress(f"{name} requests/s", requests, options) as how:
                one.save({"rate": name, **runs.load(one.bench, asks, times, how, max_concurrency)})


def plot(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What --json wrote.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The picture, as .png, .svg or .pdf.")],
) -> None:
    """Draw results: latency against load, tokens/s against batch with the roofline, acceptance, memory."""
    from jaxinfer.measure.bench import results
    from jaxinfer.measure.bench.plot import draw

    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--out: {out} ends in neither .png, .svg nor .pdf")
    check_folder(out, "--out")
    titles = draw([results.read(file) for file in files], out)
    write_text(f"{out}: {', '.join(titles)}\n")


def bench_arguments(options: MeasuredModelOptions, own: Sequence[str] = OWN) -> dict[str, Any]:
    """The arguments of `LLM` among the options: all but the command's own."""
    if options.random_weights and options.requantize is not None:
        raise UsageError("--requantize is for a GGUF file's weights, and --random-weights takes none")
    return {name: value for name, value in llm_arguments(options).items() if name not in own}


@dataclass(frozen=True)
class Session:
    """An open model, and the result that its runs are added to; each is written at once."""

    bench: "Bench"
    result: dict[str, Any]
    file: Path | None

    def save(self, run: dict[str, Any]) -> None:
        from jaxinfer.measure.bench import results

        self.result["runs"].append(run)
        if self.file is not None:
            results.write(self.file, self.result)


def new_result(options: BenchOptions, name: str, arguments: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A result without runs. Its options are all that were given, without a path."""
    from jaxinfer.measure.bench import results
    from jaxinfer.measure.bench.model import machine, public_name

    said = {**arguments, **{one: getattr(options, one) for one in OWN if one != "json"}, **own}
    said = {one: public_name(str(value)) if one in PATHS and value else value for one, value in said.items()}
    said = {one: value for one, value in said.items() if value is not None}
    return results.new(name, public_name(options.model), json.loads(json.dumps(said)), machine=machine())


@contextlib.contextmanager
def session(
    options: BenchOptions, result: dict[str, Any], arguments: dict[str, Any], *, serves: bool = False
) -> Iterator[Session]:
    """Opens the model, and prints the tables when the block has ended."""
    from jaxinfer.measure.bench import text
    from jaxinfer.measure.bench.model import opened

    with contextlib.ExitStack() as stack:
        with waiting(f"opening {options.model}, compiling, measuring the roofline"):
            bench = stack.enter_context(
                opened(options.model, arguments, random_weights=options.random_weights, serves=serves)
            )
        result["start"], result["roofline"] = asdict(bench.start), bench.ideal.measured.to_dict()
        yield Session(bench, result, options.json)
    show(text.header(result), *text.rows(result), text.details(result))


def show(head: list[str], columns: list[str], cells: list[list[str]], details: list[str]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(columns):
        table.add_column(title, justify="right" if number else "left")
    for row in cells:
        table.add_row(*row)
    target = console()
    target.print("\n".join(head), markup=False, soft_wrap=True)
    target.print(table)
    target.print("\n".join(details), markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(title: str, total: int, options: BenchOptions) -> Iterator["RunOptions"]:
    """How requests run, with a bar on a terminal that counts those that have ended."""
    from tqdm.auto import tqdm

    from jaxinfer.measure.bench.metrics import parse_goodput
    from jaxinfer.measure.bench.runs import RunOptions

    with tqdm(total=total, desc=title, unit="request", disable=not shows_progress()) as bar:

        def told() -> None:
            bar.update()

        yield RunOptions(
            temperature=options.temperature,
            seed=options.seed,
            limits=parse_goodput(options.goodput),
            price_per_hour=options.price_per_hour,
            told=told,
        )


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure a model here: latency, throughput, load; draw the results.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function in {"latency": latency, "throughput": throughput, "load": load, "plot": plot}.items():
    app.command(_name)(command(_function))
