"""`jaxinfer advise`: which options pay for a model, measured here, or planned for chips that are not here."""

import contextlib
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.advise_options import (
    CPU_SIZES,
    DEFAULT_MINUTES,
    LATER,
    OWN,
    SIZES,
    AdviseOptions,
    draft_names,
    read_goal,
    read_requests,
    read_sizes,
)
from jaxinfer.cli.command import is_interrupt
from jaxinfer.cli.options import llm_arguments
from jaxinfer.cli.output import console, plain_cell, shows_progress, write_text

if TYPE_CHECKING:
    from jaxinfer.measure.advise.goals import Goal
    from jaxinfer.measure.advise.report import Advice
    from jaxinfer.measure.advise.search import Findings
    from jaxinfer.measure.bench.workload import Workload

PLANNED_MAX_SEQS = 64
# What `jaxinfer plan` takes by the same names.
OF_PLAN = ("quantize", "kv_dtype", "max_seqs", "draft", "num_draft_tokens", "mesh", "page_size", "prefill_chunk")
OF_PLAN += ("memory_fraction", "dtype", "requantize", "revision")


def advise(options: AdviseOptions) -> None:
    """Try what is known to help, and recommend a command line.

    Measures the model as it is, then weights of 8 and 4 bits, an 8-bit cache, batch sizes, drafts and prefix reuse,
    each alone, then those that helped the goal together. Options of the engine that you give are kept and not tried.
    With --on nothing runs: the figures are the roofline's.

    The goal is cost (tokens a second of many requests), latency (the time of one request), users (requests a second
    within --goodput, or tokens of cache that fit) or quality (the least KL that fits --memory).
    """
    goal = read_goal(options)
    workload = read_requests(options)
    arguments = {name: value for name, value in llm_arguments(options).items() if name not in OWN}
    if arguments.get("dtype") == "auto":
        del arguments["dtype"]
    if options.on is not None:
        _planned(options, goal, workload, arguments)
    else:
        _measured(options, goal, workload, arguments)


def _planned(options: AdviseOptions, goal: "Goal", workload: "Workload", arguments: dict[str, Any]) -> None:
    from jaxinfer.measure.advise.candidates import ModelFacts, candidates
    from jaxinfer.measure.advise.planned import Planner
    from jaxinfer.measure.advise.search import search

    max_seqs = options.max_seqs or PLANNED_MAX_SEQS
    planner = Planner.open(
        options.model,
        str(options.on),
        arguments,
        prompt_tokens=workload.prompt_tokens.high,
        answer_tokens=workload.answer_tokens.high,
        max_seqs=max_seqs,
        acceptance=options.acceptance,
    )
    about = ModelFacts(
        given=arguments,
        is_quantized=planner.is_quantized,
        caches_values=planner.config.caches_values,
        sizes=read_sizes(options, SIZES),
        default_size=max_seqs,
        drafts=draft_names(options),
        shared=None,
    )
    trials, left_out = candidates(goal, about)
    found = search(goal, trials, planner, repeats_baseline=False)
    result = _new_result(options, {"planned_for": str(options.on)})
    _finish(options, result, goal, found, left_out, arguments, workload)


def _measured(options: AdviseOptions, goal: "Goal", workload: "Workload", arguments: dict[str, Any]) -> None:
    import jax

    from jaxinfer.cli.distill import read_documents
    from jaxinfer.llm import CPU_MAX_SEQS, DEFAULT_MAX_SEQS
    from jaxinfer.measure.advise import results
    from jaxinfer.measure.advise.candidates import ModelFacts, candidates
    from jaxinfer.measure.advise.measure import AdviseRequest, TrialRunner
    from jaxinfer.measure.advise.search import Findings, search
    from jaxinfer.measure.bench.metrics import parse_goodput
    from jaxinfer.measure.bench.model import machine
    from jaxinfer.measure.bench.runs import RunOptions
    from jaxinfer.quantization.tree import describe

    is_cpu = jax.default_backend() == "cpu"
    sizes = read_sizes(options, CPU_SIZES if is_cpu else SIZES)
    documents, about = _documents(options, read_documents)
    result = _new_result(options, machine())
    found = Findings([], [], [])
    if options.resume and options.json is not None:
        found = results.earlier(options.json, result, draft_names(options)) or found
    num_requests = options.requests or max(*sizes, options.max_seqs or 1)
    how = RunOptions(options.temperature, options.seed, parse_goodput(options.goodput))
    asked = AdviseRequest(
        options.model,
        arguments,
        workload,
        documents,
        num_requests,
        options.repeats,
        options.shared_prefix,
        how,
    )
    minutes = DEFAULT_MINUTES if options.minutes is None else options.minutes
    end = time.monotonic() + 60 * minutes
    left_out: dict[str, str] = {}
    with contextlib.ExitStack() as stack, _progress() as told:
        lab = TrialRunner(asked, told.detail)
        stack.callback(lab.close)
        lab.limit_memory(goal.memory)
        told.trial("loading")
        lab.prepare()
        model = lab.model
        kind = ModelFacts(
            given=arguments,
            is_quantized=bool(describe(model.params)),
            caches_values=model.config.caches_values,
            sizes=sizes,
            default_size=CPU_MAX_SEQS if is_cpu else DEFAULT_MAX_SEQS,
            drafts=draft_names(options),
            shared=lab.shared,
            has_limits=bool(how.limits),
        )
        trials, left_out = candidates(goal, kind)

        def measure(arguments: dict[str, Any]) -> Any:
            from jaxinfer.measure.advise.trials import flags

            told.trial(flags(arguments) or "baseline", len(found.rows) + len(found.base), len(trials) + 2)
            return lab(arguments)

        def save(found: Findings) -> None:
            _write(options, result, found)

        try:
            search(goal, trials, measure, is_over=lambda: time.monotonic() > end, found=found, told=save)
        except BaseException as error:
            if found.base and is_interrupt(error):
                told.stop()
                _finish(options, result, goal, found, left_out, arguments, workload, about)
            raise
    _finish(options, result, goal, found, left_out, arguments, workload, about)


def _documents(options: AdviseOptions, read: Any) -> tuple[tuple[str, ...], str]:
    """Texts, and a word on what they are."""
    if options.texts:
        return tuple(read(options.texts, "--texts")), "KL and prompts: your --texts"
    if options.model in ("demo", "demo-draft"):
        from jaxinfer.measure.advise.texts import NUM_TEXTS
        from jaxinfer.training.corpus import held_out_files

        return tuple(text for _, text in held_out_files(NUM_TEXTS)), (
            "KL and prompts: Python files that the embedded model was not trained on"
        )
    return (), "KL and prompts: text that the model itself made at temperature 1; --texts FILE takes yours"


def _new_result(options: AdviseOptions, machine: dict[str, Any]) -> dict[str, Any]:
    from jaxinfer.measure.advise import results
    from jaxinfer.measure.bench.model import public_name

    said = {name: value for name, value in vars(options).items() if name not in LATER and name != "model"}
    said = {name: value for name, value in said.items() if value not in (None, [])}
    for name in ("tokenizer", "dataset"):
        if name in said:
            said[name] = public_name(str(said[name]))
    for name in ("texts", "draft"):
        if name in said:
            said[name] = [public_name(str(one)) for one in said[name]]
    return results.new(public_name(options.model), json.loads(json.dumps(said)), machine)


def _write(options: AdviseOptions, result: dict[str, Any], found: "Findings") -> None:
    if options.json is not None:
        from jaxinfer.measure.advise.results import with_findings
        from jaxinfer.measure.bench.results import write

        write(options.json, with_findings(result, found))


def _finish(
    options: AdviseOptions,
    result: dict[str, Any],
    goal: "Goal",
    found: "Findings",
    left_out: dict[str, str],
    arguments: dict[str, Any],
    workload: "Workload",
    about: str | None = None,
) -> None:
    """Prints all, and writes it with the advice."""
    from rich.table import Table

    from jaxinfer.measure.advise.report import advice, sections, table
    from jaxinfer.measure.advise.results import public

    its = advice(goal, found, options.model, arguments)
    open_to_all = its if its.row is None else replace(its, row=public(its.row))
    _write(options, {**result, "goal": goal.name, "advice": open_to_all.to_dict(), "not_tried": left_out}, found)
    columns, cells = table(goal, found)
    grid = Table(box=None, pad_edge=False)
    for number, title in enumerate(columns):
        grid.add_column(title, justify="right" if number else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(plain_cell, row))
    target = console()
    write_text(_head(options, workload, about) + "\n\n")
    target.print(grid)
    lines = sections(goal, found, its, left_out, price_per_hour=options.price_per_hour)
    if options.on is not None:
        lines += ["", *_about_plans(options, its, workload)]
    target.print()
    target.print("\n".join(lines), markup=False, soft_wrap=True)


def _about_plans(options: AdviseOptions, its: "Advice", workload: "Workload") -> list[str]:
    lines = [
        "Nothing ran: times are the least that the chips' rates allow, memory is counted, no KL is measured.",
        "Measure the KL of rounded weights before use: jaxinfer advise on a machine that runs the model.",
    ]
    if its.row is not None:
        from jaxinfer.measure.advise.trials import flags

        arguments = {"max_seqs": PLANNED_MAX_SEQS, **its.arguments}
        arguments = {name: value for name, value in arguments.items() if name in OF_PLAN}
        length = workload.prompt_tokens.high + workload.answer_tokens.high
        lines.append(
            f"Memory as the compiler sees it: jaxinfer plan {shlex.quote(options.model)} --on {options.on} "
            f"--context {length} {flags(arguments)}"
        )
    return lines


def _head(options: AdviseOptions, workload: "Workload", about: str | None) -> str:
    where = f"planned for {options.on}" if options.on is not None else "measured here"
    lines = [
        f"{options.model}, {where}, for {options.goal}",
        f"prompts of {workload.prompt_tokens} tokens, answers of {workload.answer_tokens}",
    ]
    if about is not None:
        lines.append(about)
    return "\n".join(lines)


class _Told:
    """What is under way, on a terminal."""

    def __init__(self, status: Any):
        self.status, self.name = status, ""

    def trial(self, name: str, number: int = 0, total: int = 0) -> None:
        self.name = f"{number + 1} of about {total}: {name}" if total else name
        self.detail("")

    def detail(self, text: str) -> None:
        if self.status is not None:
            self.status.update(f"{self.name}  {text}")

    def stop(self) -> None:
        if self.status is not None:
            self.status.stop()


@contextlib.contextmanager
def _progress() -> Iterator[_Told]:
    if not shows_progress():
        yield _Told(None)
        return
    with console(stderr=True).status("loading") as status:
        yield _Told(status)
