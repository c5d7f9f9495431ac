"""`jaxinfer advise`: which options pay for a model, measured on this machine or planned for other chips."""

import contextlib
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.bench import WorkloadOptions, read_integers, read_workload, results_option, workload_option
from jaxinfer.cli.command import UsageError, is_interrupt
from jaxinfer.cli.options import ServingOptions, llm_arguments, model_argument
from jaxinfer.cli.output import console, write_text
from jaxinfer.cli.training_data import read_documents, read_texts
from jaxinfer.options import describe, option
from jaxinfer.progress import Stage, hidden
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.measure.advise.goals import Goal, TrialResult
    from jaxinfer.measure.advise.report import Advice
    from jaxinfer.measure.advise.search import Findings
    from jaxinfer.measure.bench.workload import BenchWorkload

_goal = partial(option, group="Goal")
_trials = partial(option, group="Trials")
CPU_SIZES, SIZES = "1,4,16,32", "1,16,64,128,256"


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(WorkloadOptions, ServingOptions):
    """The engine's options, which every trial keeps, and those of the search."""

    model: str = model_argument()
    answer_tokens: str = workload_option("64", "Lengths of answers, which nothing else ends.", "N|A:B|log:A:B")
    goal: str = _goal("cost", "cost, latency, users or quality.", "GOAL")
    on: str | None = _goal(None, "Plan for chips, such as v5e:2x2 or h200x1, without running anything.", "PLACE")
    max_kl: float | None = _goal(None, "Nats per token that quantization may cost; default: 0.05.", "X", min=0)
    memory: float | None = _goal(None, "Limit for weights, cache and temporaries.", "GIB")
    goodput: str | None = results_option(
        None,
        "For --goal users: limits of ttft, tpot and e2el in ms; without them, the tokens of cache that fit.",
        "ttft:MS,...",
    )
    texts: list[Path] | None = workload_option(
        None, "Text for measuring the KL, and for prompts; may be repeated.", "FILE"
    )
    shared_prefix: int = workload_option(0, "Number of tokens that all prompts begin with.", "N", min=0)
    requests: int | None = workload_option(
        None, "Number of requests at a time; default: the largest batch size.", "N", min=1
    )
    calibration: list[Path] | None = workload_option(
        None, "Text to calibrate weights of 4 bits on, by AWQ and GPTQ; may be repeated.", "FILE"
    )
    draft: list[str] | None = _trials(
        None, "A draft to try beside ngram: a model or layers:N; may be repeated.", "DRAFT"
    )
    acceptance: float | None = _trials(
        None, "With --on: probability that a draft token is accepted.", "X", min=0, max=1
    )
    sizes: str | None = _trials(None, f"Batch sizes to try; default: {CPU_SIZES} on a CPU, else {SIZES}.", "N,N,...")
    repeats: int = _trials(3, "Number of repeats of each measurement.", "N", min=2)
    minutes: float | None = _trials(None, "Time limit of the trials; default: 4 on a CPU, else 30.", "N", min=0)
    resume: bool = results_option(False, "Keep the trials that --json FILE has.")


# Options that do not affect measurements: --resume accepts a file written with other values of them.
LATER = ("json", "resume", "minutes", "goal", "max_kl", "price_per_hour")
# Options of running a trial, which a plan does not use. Its sequences are as long as prompt and answer.
RUNS = ("max_kl", "dataset", "texts", "shared_prefix", "requests", "temperature", "seed", "goodput", "minutes")
RUNS += ("calibration", "repeats", "resume", "tokenizer", "memory", "prefix_cache", "max_model_len")
CPU_MINUTES, DEFAULT_MINUTES = 4.0, 30.0
PLANNED_MAX_SEQS = 64
# Options that `jaxinfer plan` has under the same names.
OF_PLAN = ("quantize", "kv_dtype", "kv_policy", "max_seqs", "draft", "num_draft_tokens", "mesh", "page_size")
OF_PLAN += ("prefill_chunk", "memory_fraction", "dtype", "requantize", "revision")


def advise(options: AdviseOptions) -> None:
    """Try the options that are known to help, and recommend a command line.

    The model is measured as it is, then with weights of 8 and 4 bits, a cache of 8 bits, other batch sizes, drafts and
    without prefix reuse, each alone, then those together that helped. Where memory is limited or requests are
    long, also with caches of 4 bits and policies that drop a part of the cache. Engine options that you give are kept
    and not tried. With --on nothing runs: the figures are the roofline's.

    The goal is cost (tokens/s of many requests), latency (the time of one request), users (requests/s within
    --goodput, or tokens of cache that fit) or quality (the least KL that fits --memory).
    """
    goal = read_goal(options)
    workload = read_workload(options)
    arguments = {name: value for name, value in llm_arguments(options).items() if name in describe(ServingOptions)}
    if arguments.get("dtype") == "auto":
        del arguments["dtype"]
    (_measured if options.on is None else _planned)(options, goal, workload, arguments)


def read_goal(options: AdviseOptions) -> "Goal":
    """Raises UsageError for options that exclude each other."""
    from jaxinfer.measure.advise.goals import DEFAULT_MAX_KL, GOALS, Goal

    if options.goal not in GOALS:
        raise UsageError(f"--goal: {options.goal!r} is none of {', '.join(GOALS)}")
    if options.memory is not None and not options.memory > 0:
        raise UsageError(f"--memory must be positive, got {options.memory:g} GiB")
    if options.resume and options.json is None:
        raise UsageError("--resume needs --json FILE with the trials that are done")
    if options.goodput is not None and options.goal != "users":
        raise UsageError(f"--goodput is for --goal users, not {options.goal}")
    if options.dataset is not None and options.shared_prefix:
        raise UsageError("--shared-prefix is for prompts cut from texts, and --dataset gives the prompts")
    defaults = {field.name: field.default for field in fields(options)}
    for name in RUNS if options.on is not None else ("acceptance",):
        if getattr(options, name) != defaults[name]:
            what = "nothing runs with --on" if options.on is not None else "it is measured, unless --on PLACE is given"
            raise UsageError(f"--{name.replace('_', '-')}: {what}")
    memory = None if options.memory is None else int(options.memory * 2**30)
    return Goal(
        options.goal, DEFAULT_MAX_KL if options.max_kl is None else options.max_kl, memory, options.on is not None
    )


def draft_names(options: AdviseOptions) -> list[str]:
    own = ["demo-draft"] if options.model == "demo" and not options.draft else []
    return list(dict.fromkeys(["ngram", *own, *(options.draft or ())]))


def _planned(options: AdviseOptions, goal: "Goal", workload: "BenchWorkload", arguments: dict[str, Any]) -> None:
    from jaxinfer.measure.advise.candidates import ModelFacts, candidates, mesh_shapes
    from jaxinfer.measure.advise.planned import Planner
    from jaxinfer.measure.advise.search import Search

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
    facts = ModelFacts(
        given=arguments,
        is_quantized=planner.is_quantized,
        caches_values=planner.config.caches_values,
        sizes=read_integers(options.sizes or SIZES, "--sizes"),
        default_size=max_seqs,
        drafts=draft_names(options),
        shared=None,
        longest=workload.prompt_tokens.high + workload.answer_tokens.high,
        num_layers=planner.config.num_layers,
        meshes=[mesh for mesh in mesh_shapes(planner.place.num_devices) if mesh != str(planner.request({}).layout)],
        why_no_offload=planner.why_no_offload,
    )
    trials, left_out = candidates(goal, facts)
    left_out.pop("calibrated weights", None)  # nothing runs
    findings = Search(goal, planner, repeats=False).run(trials)
    report = _Report(options, goal, workload, arguments, {"planned_for": str(options.on)})
    report.finish(findings, left_out)


def _measured(options: AdviseOptions, goal: "Goal", workload: "BenchWorkload", arguments: dict[str, Any]) -> None:
    start = time.monotonic()
    with Stage("starting"):
        import jax

        from jaxinfer.engine.spec import CPU_MAX_SEQS, DEFAULT_MAX_SEQS
        from jaxinfer.measure.advise.candidates import candidates
        from jaxinfer.measure.advise.goals import flags
        from jaxinfer.measure.advise.measure import TrialRunner, TrialSettings
        from jaxinfer.measure.advise.report import earlier_findings
        from jaxinfer.measure.advise.search import Findings, Search
        from jaxinfer.measure.bench.metrics import parse_goodput
        from jaxinfer.measure.bench.model import machine
        from jaxinfer.measure.bench.runs import RunOptions

        is_cpu = jax.default_backend() == "cpu"
        sizes = read_integers(options.sizes or (CPU_SIZES if is_cpu else SIZES), "--sizes")
        documents, source = _documents(options)
        report = _Report(options, goal, workload, arguments, machine(), source)
    findings = Findings([], [], [])
    if options.resume and options.json is not None:
        findings = earlier_findings(options.json, report.result, draft_names(options)) or findings
    settings = TrialSettings(
        options.model,
        arguments,
        workload,
        documents,
        tuple(read_documents(options.calibration, "--calibration")) if options.calibration else (),
        num_requests=options.requests or max(*sizes, options.max_seqs or 1),
        repeats=options.repeats,
        num_shared=options.shared_prefix,
        run_options=RunOptions(options.temperature, options.seed, parse_goodput(options.goodput)),
    )
    minutes = (CPU_MINUTES if is_cpu else DEFAULT_MINUTES) if options.minutes is None else options.minutes

    def used() -> float:
        return (time.monotonic() - start) / (60 * minutes) if minutes else 1.0

    with Stage("loading") as stage, contextlib.closing(TrialRunner(settings, stage.describe, goal.memory)) as runner:
        runner.prepare()
        facts = runner.facts(sizes, CPU_MAX_SEQS if is_cpu else DEFAULT_MAX_SEQS, draft_names(options))
        trials, left_out = candidates(goal, facts)

        def measure(arguments: dict[str, Any], stop: Any) -> Any:
            number, total = len(findings.rows) + len(findings.base) + len(findings.finals) + 1, len(trials) + 12
            stage.restart(f"{number} of about {total}: {flags(arguments) or 'baseline'}")
            return runner(arguments, stop)

        if findings.base:
            runner.reference = findings.base[0]
        bound = _roofline_bound(options, workload, arguments, facts.default_size)
        try:
            Search(goal, measure, used=used, findings=findings, report=report.write, bound=bound).run(trials)
        except BaseException as error:
            if findings.base and is_interrupt(error):
                with hidden():
                    report.finish(findings, left_out)
            raise
    report.finish(findings, left_out)


def _roofline_bound(
    options: AdviseOptions, workload: "BenchWorkload", arguments: dict[str, Any], max_seqs: int
) -> "Callable[[dict[str, Any]], TrialResult | None]":
    """A function from a trial's arguments to the most tokens/s that the chip's rates allow, with the shortest
    sequences. It returns None where no bound is known: an unlisted chip, a data set, or a mesh."""
    import jax

    from jaxinfer.planning import Place, chip_of_kind

    chip = chip_of_kind(jax.devices()[0].device_kind)
    if chip is None or workload.dataset or arguments.get("mesh") is not None:
        return lambda arguments: None
    from jaxinfer.measure.advise.planned import Planner

    place = Place(chip.title, chip, 1)
    return Planner.open(
        *(options.model, place, arguments), prompt_tokens=workload.prompt_tokens.low, answer_tokens=1, max_seqs=max_seqs
    ).most_tokens_per_second


def _documents(options: AdviseOptions) -> tuple[tuple[str, ...], str]:
    """Texts, and a sentence on where they are from."""
    from jaxinfer.measure.advise.measure import NUM_TEXTS

    texts = tuple(read_texts(options.texts, options.model, NUM_TEXTS))
    source = "your --texts" if options.texts else "Python files that the embedded model was not trained on"
    if not texts:
        source = "text sampled from the model at temperature 1; --texts FILE uses yours"
    return texts, f"KL and prompts: {source}"


class _Report:
    """The result of the command: a file that is written after each trial, and what is printed at the end."""

    def __init__(
        self,
        options: AdviseOptions,
        goal: "Goal",
        workload: "BenchWorkload",
        arguments: dict[str, Any],
        machine: dict[str, Any],
        source: str | None = None,
    ):
        from jaxinfer.measure.advise.report import new_result
        from jaxinfer.measure.bench.model import public_name, public_options

        self.options, self.goal, self.workload, self.arguments = options, goal, workload, arguments
        self.source = source
        values = {name: value for name, value in vars(options).items() if name not in LATER and name != "model"}
        self.result = new_result(public_name(options.model), public_options(values), machine)

    def write(self, findings: "Findings") -> None:
        if self.options.json is not None:
            from jaxinfer.measure.advise.report import with_findings
            from jaxinfer.measure.bench.results import write_result

            write_result(self.options.json, with_findings(self.result, findings))

    def finish(self, findings: "Findings", left_out: dict[str, str]) -> None:
        """Prints everything, and writes it with the advice."""
        from jaxinfer.measure.advise.report import about, advice, public, sections, table

        recommendation = advice(self.goal, findings, self.options.model, self.arguments)
        row = recommendation.row
        shared = recommendation if row is None else replace(recommendation, row=public(row))
        self.result |= {"goal": self.goal.name, "advice": shared.to_dict(), "not_tried": left_out}
        self.write(findings)
        target = console()
        write_text("\n".join(self._head()) + "\n\n")
        target.print(make_table(*table(self.goal, findings)))
        lines = sections(self.goal, findings, recommendation, left_out, price_per_hour=self.options.price_per_hour)
        if self.options.on is None:
            lines += ["", f"  measured on {about(self.result['machine'])}; {'; '.join(self._head()[1:])}"]
        if self.options.on is not None:
            lines += ["", *self._about_plans(recommendation)]
        target.print()
        target.print("\n".join(lines), markup=False, soft_wrap=True)

    def _head(self) -> list[str]:
        options, workload = self.options, self.workload
        where = f"planned for {options.on}" if options.on is not None else "measured on this machine"
        return [
            f"{options.model}, {where}, for {options.goal}",
            f"prompts of {workload.prompt_tokens} tokens, answers of {workload.answer_tokens}",
            *([] if self.source is None else [self.source]),
        ]

    def _about_plans(self, found_advice: "Advice") -> list[str]:
        from jaxinfer.measure.advise.goals import flags

        lines = [
            "Nothing ran: times are lower bounds from the chips' rates, memory is counted, no KL is measured.",
            "Measure the KL of quantized weights before use: jaxinfer advise on a machine that runs the model.",
        ]
        if found_advice.row is not None:
            arguments = {"max_seqs": PLANNED_MAX_SEQS, **found_advice.arguments}
            arguments = {name: value for name, value in arguments.items() if name in OF_PLAN}
            length = self.workload.prompt_tokens.high + self.workload.answer_tokens.high
            lines.append(
                f"Memory by the compiler's analysis: jaxinfer plan {shlex.quote(self.options.model)} "
                f"--on {self.options.on} --context {length} {flags(arguments)}"
            )
        return lines
