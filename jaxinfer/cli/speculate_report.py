"""`jaxinfer speculate-report`: the speedup of a draft on given prompts, the best draft length, and what limits it."""

import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.api.options import ON_LOADING
from jaxinfer.cli.bench import check_picture, read_integers
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import ServingOptions, as_json, llm_arguments
from jaxinfer.cli.output import console, note, write_json, write_text
from jaxinfer.cli.prompts import PromptLine, read_prompts
from jaxinfer.options import MISSING, argument, option
from jaxinfer.progress import Stage
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.loading import LoadedModel
    from jaxinfer.sampling import SamplingParams
    from jaxinfer.speculative import SpeculationStats

LENGTHS = "1,2,4,8"


@dataclass(frozen=True)
class Run:
    """A run of the prompts with one draft length, 0 for plain decoding.

    Attributes:
      seconds_per_token: of one answer, without its first token. host_share: share of the time in which the host's
        thread worked. answers: token ids. num_tokens: tokens after the first ones, of all repeats. stats: of all
        repeats; None for plain decoding. tokens: what the draft drafts of the model's tokens, where it has others.
    """

    num_draft_tokens: int
    seconds_per_token: float
    host_share: float
    answers: list[list[int]]
    num_tokens: int
    stats: "SpeculationStats | None" = None
    tokens: str | None = None


@dataclass(frozen=True)
class LengthReport:
    """One draft length compared with plain decoding.

    Attributes:
      cost_ratio: time of drafting one token, in plain decode steps. verify_ratio: likewise, of the rest of a round.
      expected: speedup by Leviathan et al. (2023, theorem 3.8). measured: the measured speedup.
      tokens: as of `Run`.
    """

    num_draft_tokens: int
    stats: "SpeculationStats"
    cost_ratio: float
    verify_ratio: float
    expected: float
    measured: float
    host_share: float
    num_different: int
    tokens: str | None = None

    @property
    def if_perfect(self) -> dict[str, float]:
        """The speedup if one of the costs were zero, or if every draft token were accepted."""
        per_round, k = self.verify_ratio + self.num_draft_tokens * self.cost_ratio, self.num_draft_tokens
        length = self.measured * per_round  # tokens per round
        return {
            "acceptance": (k + 1) / per_round,
            "draft cost": length / self.verify_ratio,
            "verify cost": length / (1 + k * self.cost_ratio),
            "host": self.measured / (1 - self.host_share),
        }

    @property
    def limit(self) -> str:
        """The cost whose absence would gain most."""
        return max(self.if_perfect, key=lambda name: self.if_perfect[name])

    def data(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "acceptance_rate": self.stats.acceptance_rate,
            "conditional_rate": self.stats.conditional_rate,
            "acceptance_by_position": self.stats.acceptance_by_position,
            "mean_accepted_length": self.stats.mean_accepted_length,
            "cost_ratio": self.cost_ratio,
            "verify_ratio": self.verify_ratio,
            "expected_speedup": self.expected,
            "measured_speedup": self.measured,
            "host_share": self.host_share,
            "num_different_answers": self.num_different,
            "speedup_if_perfect": self.if_perfect,
            "limited_by": self.limit,
        }


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    file: Path = argument(MISSING, 'Prompts, one per line; in .jsonl, {"prompt": "...", ...}.', "PROMPTS")
    draft: str = option(
        MISSING,
        "A checkpoint's folder or a hub id, of a model or a trained head; demo-draft, ngram, mtp (the head in the "
        "model's own files), or layers:N (its first N layers).",
        "DRAFT",
        "--draft -d",
    )
    num_draft_tokens: str = option(LENGTHS, "Draft lengths: tokens drafted per round.", "K,K")
    max_tokens: int = option(128, "Maximum number of tokens of each answer.", "N", min=2)
    temperature: float = option(0.0, "0 takes the most probable token.", "X")
    seed: int = option(0, "Seed of all answers, if the temperature is not 0.", "N")
    acceptance: str = option("exact", "exact: the answers of plain decoding; maximal: the same distribution.", "RULE")
    repeats: int = option(3, "Number of measurements, of which the median is shown.", "N", min=1)
    plot: Path | None = option(None, "Draw acceptance and speedup, as .png, .svg or .pdf.", "PATH")
    as_json: bool = as_json("One JSON object.")


def speculate_report(model_options: ServingOptions, options: ReportOptions) -> None:
    """Measure speculative decoding.

    Runs the prompts with plain decoding and with each draft length, one answer at a time unless --max-seqs is given,
    after warming up. Shows the acceptance rate, the speedup that Leviathan et al. predict from it, the measured
    speedup, what limits it, and the best draft length.
    """
    lengths = read_integers(options.num_draft_tokens, "--num-draft-tokens")
    if options.acceptance not in ("exact", "maximal"):
        raise UsageError(f"--acceptance is exact or maximal, got {options.acceptance!r}")
    check_picture(options.plot, "--plot")
    lines = read_prompts((), options.file)
    with Stage(f"loading {model_options.model}"):
        bench = _Bench(model_options, options.draft, options.acceptance, lines, options.repeats)
        params = bench.params({name: getattr(options, name) for name in ("temperature", "seed", "max_tokens")})
    with contextlib.closing(bench):
        rows, plain = bench.measure(lengths, params)
    if options.plot is not None:
        draw(options.plot, rows, f"{model_options.model}, drafted by {options.draft}")
    plain_rate = 1 / plain.seconds_per_token
    if options.as_json:
        from jaxinfer.measure.bench.model import machine

        here, best = machine(), max(rows, key=lambda row: row.measured)
        report = {
            "model": model_options.model,
            "draft": options.draft,
            "acceptance": options.acceptance,
            "num_prompts": len(lines),
            "plain_tokens_per_second": plain_rate,
            **{name: here[name] for name in ("platform", "device", "jax")},
            "lengths": [row.data() for row in rows],
            "best_num_draft_tokens": best.num_draft_tokens if best.measured > 1 else 0,
            "conclusion": conclusion(rows),
            **({} if (tokens := rows[0].tokens) is None else {"tokens": tokens}),
        }
        write_json(report)
        return
    print_rows(rows)
    if rows[0].tokens is not None:
        write_text(f"The draft has another tokenizer: it {rows[0].tokens}.\n")
    if options.acceptance == "exact" and options.temperature == 0:
        num_different = sum(row.num_different for row in rows)
        write_text(f"Answers that differ from plain decoding: {num_different} of {len(lines) * len(rows)}.\n")
    write_text(f"Plain decoding: {plain_rate:.0f} tokens/s for each answer.\n{conclusion(rows)}\n")
    if options.plot is not None:
        note(f"wrote {options.plot}")


def conclusion(rows: list[LengthReport]) -> str:
    """Advice on the draft, and what limits the speedup."""
    best = max(rows, key=lambda row: row.measured)
    k, limit = best.num_draft_tokens, best.limit
    cause = {
        "acceptance": f"acceptance: {best.stats.conditional_rate:.0%} of the draft tokens are accepted if those before "
        f"them were; with all accepted, the speedup would be",
        "draft cost": f"the draft: one of its tokens takes {best.cost_ratio:.2f} of a plain step; if it were free, the "
        f"speedup would be",
        "verify cost": f"verifying: a round without its draft takes {best.verify_ratio:.2f} plain steps; with 1, the "
        f"speedup would be",
        "host": f"the host, which works for {best.host_share:.0%} of the time; without it, the speedup would be",
    }[limit]
    if best.measured > 1:
        start = f"Use num_draft_tokens={k}: {best.measured:.2f}x plain decoding."
    else:
        start = f"Decode without this draft: {k} draft tokens are best, with {best.measured:.2f}x plain decoding."
    return f"{start} It is limited mostly by {cause} {best.if_perfect[limit]:.2f}x."


class _Bench:
    """Runs engines one after another over a model that is loaded once. Plain decoding is measured first and last."""

    def __init__(self, options: ServingOptions, draft: str, acceptance: str, lines: list[PromptLine], repeats: int):
        from jaxinfer.loading import load_model
        from jaxinfer.speculative import OWN_HEAD, names_kind

        values = llm_arguments(options)
        loading = {name: values.pop(name) for name in ON_LOADING if name in values}
        self.model = load_model(options.model, **loading)
        self.draft_name, self.acceptance, self.lines, self.repeats = draft, acceptance, lines, repeats
        self.draft_model: LoadedModel | None = None
        if draft == OWN_HEAD and self.model.source is not None:
            self.draft_model = load_model(self.model.source, dtype=loading.get("dtype", "auto"), is_mtp=True)
        elif not names_kind(draft):
            opening = {"dtype": loading.get("dtype", "auto"), "verify": loading.get("verify"), "is_draft": True}
            self.draft_model = load_model(draft, **opening)
        self.engine: dict[str, Any] = {"max_seqs": 1, **values}

    def params(self, values: dict[str, Any]) -> "list[SamplingParams]":
        """Sampling parameters of each prompt, with the end-of-sequence ids, which live parameters do not have."""
        from jaxinfer.sampling import SamplingParams

        values = {**values, "stop_token_ids": list(self.model.eos_token_ids)}
        return [SamplingParams.from_dict({**values, **line.sampling}) for line in self.lines]

    def measure(self, lengths: list[int], params: "list[SamplingParams]") -> tuple[list[LengthReport], Run]:
        first = self._run(params, 0)
        drafting = self._draft_seconds(params)
        runs = [self._run(params, k, draft=self._draft(), acceptance=self.acceptance) for k in lengths]
        last = self._run(params, 0)
        seconds = statistics.mean((first.seconds_per_token, last.seconds_per_token))
        plain = replace(first, seconds_per_token=seconds)
        return [compare(run, plain, drafting / seconds) for run in runs], plain

    def _draft(self) -> Any:
        return self.draft_name if self.draft_model is None else live(self.draft_model)

    def _draft_seconds(self, params: "list[SamplingParams]") -> float:
        """Seconds per token of the draft alone; 0 for n-grams. Of a head, which cannot run alone, the share of the
        model's that it has in its bytes."""
        from jaxinfer.quantization.tree import num_bytes
        from jaxinfer.speculative import draft_by_name

        if self.draft_model is not None and self.draft_model.config.draft_head is not None:
            of_model = self._run(params, 0).seconds_per_token
            return of_model * num_bytes(self.draft_model.params) / num_bytes(self.model.params)
        if self.draft_model is not None:
            return self._run(params, 0, model=live(self.draft_model)).seconds_per_token
        target = self.model.config, self.model.params
        draft = draft_by_name(self.draft_name, *target)
        models = [] if draft is None else [(*own, self.model.tokenizer) for own in draft.models(*target)]
        return sum(self._run(params, 0, model=model).seconds_per_token for model in models)

    def _run(self, params: "list[SamplingParams]", num_draft_tokens: int, model: Any = None, **drafting: Any) -> Run:
        from jaxinfer.api.llm import LLM

        if num_draft_tokens:
            drafting["num_draft_tokens"] = num_draft_tokens
        if model is None and str(self.engine.get("kv_dtype")).startswith("fp8"):  # live parameters have no scales
            drafting["kv_scales"] = self.model.kv_scales
        what = f"{num_draft_tokens} drafted tokens" if num_draft_tokens else "plain decoding"
        with (
            Stage(f"measuring {what}"),
            LLM(model or live(self.model), **self.engine, **drafting) as llm,
        ):
            return _measured(llm, [line.prompt for line in self.lines], params, num_draft_tokens, self.repeats)

    def close(self) -> None:
        import jax

        for model in (self.model, self.draft_model):
            if model is not None:
                for leaf in jax.tree.leaves(model.params):
                    leaf.delete()


def live(model: "LoadedModel") -> Any:
    """The model for `LLM`, which does not free live parameters."""
    return model.config, model.params, model.tokenizer


def _measured(
    llm: "LLM", prompts: list[Any], params: "list[SamplingParams]", num_draft_tokens: int, repeats: int
) -> Run:
    llm.generate(prompts, params, use_tqdm=False)  # compiles
    before = llm.speculation_stats()
    seconds, shares, outputs, total = [], [], [], 0
    for _ in range(repeats):
        wall, worked = time.perf_counter(), time.thread_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        shares.append((time.thread_time() - worked) / (time.perf_counter() - wall))
        timings = [output.timings for output in outputs if output.timings is not None]
        spent = sum(timing.total_time - timing.time_to_first_token for timing in timings)
        num_tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
        if num_tokens < 1:
            raise UsageError("every answer ends with its first token: try other prompts, there is nothing to measure")
        seconds.append(spent / num_tokens)
        total += num_tokens
    after = llm.speculation_stats()
    return Run(
        num_draft_tokens,
        statistics.median(seconds),
        statistics.median(shares),
        [output.outputs[0].token_ids for output in outputs],
        total,
        None if after is None or before is None else after - before,
        llm.engine.spec.draft.describe_own().get("tokens"),
    )


def compare(run: Run, plain: Run, cost_ratio: float) -> LengthReport:
    """Compares a run with plain decoding. The time of a round follows from the tokens per round; all of it that is not
    drafting counts as verifying."""
    from jaxinfer.speculative import SpeculationStats, expected_speedup

    stats, k = run.stats or SpeculationStats(), run.num_draft_tokens
    measured = plain.seconds_per_token / run.seconds_per_token
    # Tokens that were generated without a draft took one plain step each.
    steps = run.num_tokens / measured - max(run.num_tokens - stats.num_tokens, 0)
    per_round = steps / stats.num_rounds if stats.num_rounds else 1.0
    return LengthReport(
        num_draft_tokens=k,
        stats=stats,
        cost_ratio=cost_ratio,
        verify_ratio=max(per_round - k * cost_ratio, 0.01),
        expected=expected_speedup(stats.conditional_rate, k, cost_ratio),
        measured=measured,
        host_share=min(run.host_share, 0.99),
        num_different=sum(
            answer != plain_answer for answer, plain_answer in zip(run.answers, plain.answers, strict=True)
        ),
        tokens=run.tokens,
    )


def print_rows(rows: list[LengthReport]) -> None:
    titles = ("limited by", "k", "accepted", "if previous were", "by position", "tokens per round", "draft token")
    cells = [
        (
            row.limit,
            row.num_draft_tokens,
            f"{row.stats.acceptance_rate:.0%}",
            f"{row.stats.conditional_rate:.0%}",
            " ".join(f"{rate:.2f}" for rate in row.stats.acceptance_by_position),
            f"{row.stats.mean_accepted_length:.2f}",
            f"{row.cost_ratio:.2f}",
            f"{row.verify_ratio:.2f}",
            f"{row.expected:.2f}x",
            f"{row.measured:.2f}x",
        )
        for row in rows
    ]
    console().print(make_table((*titles, "verifying", "expected", "measured"), cells))


def draw(path: Path, rows: list[LengthReport], title: str) -> None:
    """Draws acceptance by position, and the expected and the measured speedup by draft length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        rates = row.stats.acceptance_by_position
        left.plot(range(1, len(rates) + 1), rates, marker="o", label=f"k = {row.num_draft_tokens}")
    left.set(xlabel="position in the round", ylabel="acceptance rate", ylim=(0, 1.02))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False)
    lengths = [row.num_draft_tokens for row in rows]
    right.plot(lengths, [row.expected for row in rows], marker="o", linestyle="--", color="0.6", label="expected")
    right.plot(lengths, [row.measured for row in rows], marker="o", color="C0", label="measured")
    right.axhline(1, color="C3", linewidth=1, label="plain decoding")
    right.set(xlabel="draft tokens (k)", ylabel="speedup over plain decoding", xticks=lengths)
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
