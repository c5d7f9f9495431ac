"""Planned trials: the roofline and the memory on other chips, from shapes. Nothing runs, and no KL is measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jaxinfer.engine.options import EngineOptions
from jaxinfer.loading import for_length, load_draft_shapes, load_shapes
from jaxinfer.measure.advise.candidates import WHY_NO_OFFLOAD
from jaxinfer.measure.advise.goals import Arguments, TrialResult
from jaxinfer.measure.advise.search import Stop
from jaxinfer.models import ModelConfig, Params
from jaxinfer.planning import MemoryPlan, Place, PlanRequest, make_plan, parse_place
from jaxinfer.planning.roofline import Rates, prefill_seconds
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import describe
from jaxinfer.speculative.statistics import mean_tokens

NUM_DRAFTED = (2, 4, 8)
LOADING = ("dtype", "revision", "quantize", "requantize")
ENGINE = ("kv_policy", "page_size", "prefill_chunk", "memory_fraction", "num_pages", "token_buckets", "decode_slots")
ENGINE += ("deterministic", "steps_per_dispatch")


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans trials of a model on a place.

    Attributes:
      arguments: of `LLM`, in every trial. prompt_tokens, answer_tokens: of the longest request.
      acceptance: probability that a draft token is accepted if those before it were; None if it is not known.
    """

    model: str
    config: ModelConfig
    params: Params
    place: Place
    arguments: Mapping[str, Any]
    prompt_tokens: int
    answer_tokens: int
    max_seqs: int
    acceptance: float | None = None

    @classmethod
    def open(
        cls,
        model: str,
        on: str | Place,
        arguments: Mapping[str, Any],
        *,
        prompt_tokens: int,
        answer_tokens: int,
        max_seqs: int,
        acceptance: float | None = None,
    ) -> "Planner":
        """Reads the headers of a checkpoint. Raises ValueError for an invalid place or length, and as `load_shapes`."""
        place = parse_place(on) if isinstance(on, str) else on
        values = {name: arguments[name] for name in LOADING if name in arguments}
        config, params = load_shapes(model, **values)
        config, _ = for_length(config, prompt_tokens + answer_tokens)
        return cls(model, config, params, place, arguments, prompt_tokens, answer_tokens, max_seqs, acceptance)

    @property
    def is_quantized(self) -> bool:
        """True if the checkpoint's weights are quantized."""
        return bool(describe(self.params))

    def __call__(self, arguments: Arguments, stop: Stop = lambda row: None) -> TrialResult:
        """Plans a trial. A trial that cannot be planned has a reason; only the baseline raises."""
        try:
            return self._planned(arguments)
        except (ValueError, NotImplementedError) as error:
            if not arguments:
                raise
            return TrialResult(arguments, f"cannot be planned: {error}")

    @property
    def why_no_offload(self) -> str | None:
        """Why layers in the host's memory are not planned; None if they are: where the model does not fit."""
        if self.request({}).layout.num_devices > 1:
            return "it is for one device"
        is_needed = not make_plan(self.request({}), compiles=False).fits
        return None if is_needed else WHY_NO_OFFLOAD

    def most_tokens_per_second(self, arguments: Arguments) -> TrialResult | None:
        """The tokens/s of a full batch that the rates allow; None where they depend on more."""
        if {"draft", "method", "mesh", "offload", "prefix_cache"} & set(arguments):
            return None
        row = self(arguments)
        return None if row.reason is not None else TrialResult(arguments, rate=row.rate)

    def request(self, arguments: Arguments, num_draft_tokens: int | None = None) -> PlanRequest:
        """The request for `make_plan`. Raises ValueError for options that are out of range."""
        values = {**self.arguments, **arguments}
        params = self.params
        if (recipe := arguments.get("quantize")) is not None:
            params = jax.eval_shape(partial(quantize_params, how=recipe), params)
        length, max_seqs = self.prompt_tokens + self.answer_tokens, values.get("max_seqs") or self.max_seqs
        options = EngineOptions(
            max_model_len=length,
            max_seqs=max_seqs,
            kv_dtype=values.get("kv_dtype") or "auto",
            num_draft_tokens="auto" if num_draft_tokens is None else num_draft_tokens,
            **{name: values[name] for name in ENGINE if name in values},
        )
        draft = None
        if num_draft_tokens is not None:
            dtype = self.arguments.get("dtype", "auto")
            draft = load_draft_shapes(arguments["draft"], self.model, self.config, self.params, length, dtype)
        batches = tuple(dict.fromkeys((1, max_seqs)))
        return PlanRequest(
            *(self.model, self.config, params, self.place, options, values.get("mesh"), draft, batches),
            offload=values.get("offload", 0),
        )

    def _planned(self, arguments: Arguments) -> TrialResult:
        if "prefix_cache" in arguments:
            return TrialResult(arguments, "not planned: the benefit of prefix reuse depends on the prompts")
        if "draft" in arguments:
            return self._with_draft(arguments)
        return _row(arguments, make_plan(self.request(arguments), compiles=False), self)

    def _with_draft(self, arguments: Arguments) -> TrialResult:
        """Plans rounds of the best draft length at the given acceptance; without one, the break-even acceptance."""
        plain = {name: value for name, value in arguments.items() if name not in ("draft", "num_draft_tokens")}
        base = make_plan(self.request(plain), compiles=False)
        plans = {k: make_plan(self.request(arguments, k), compiles=False) for k in NUM_DRAFTED}
        if self.acceptance is None:
            break_even = {k: _break_even(plan) for k, plan in plans.items()}
            rates = ", ".join(f"{'all' if rate is None else f'{rate:.0%}'} of {k}" for k, rate in break_even.items())
            return TrialResult(
                arguments,
                f"acceptance cannot be planned: one request is faster if more than {rates} draft tokens are "
                f"accepted; set yours with --acceptance X",
            )
        rate = self.acceptance
        row = _row(arguments, base, self)
        best = max(plans, key=lambda k: mean_tokens(rate, k) / plans[k].rounds[0].seconds)
        plan, width = plans[best], mean_tokens(rate, best)
        step, last = plan.rounds[0].seconds / width, plan.rounds[-1]
        return replace(
            row,
            arguments={**arguments, "num_draft_tokens": best},
            tpot=(step,),
            one=(row.ttft[0] + step * (self.answer_tokens - 1),),
            rate=(plan.layout.num_replicas * last.batch * width / last.seconds,),
            acceptance=rate,
            notes=(f"if {rate:.0%} of draft tokens are accepted",),
            **_sizes(plan),
        )


def _row(arguments: Arguments, plan: MemoryPlan, planner: Planner) -> TrialResult:
    if not plan.roofline:
        raise ValueError(f"the rates of {planner.place.name} are unknown")
    first, last = plan.roofline[0], plan.roofline[-1]
    rates = Rates.of(planner.place.chip)
    # A prompt reads the weights at least once.
    read = plan.counted.read_weight_bytes(planner.prompt_tokens) / rates.hbm
    ttft, tpot = max(prefill_seconds(rates, plan.counted, [planner.prompt_tokens]), read), first.seconds
    row = TrialResult(
        arguments,
        ttft=(ttft,),
        tpot=(tpot,),
        one=(ttft + tpot * (planner.answer_tokens - 1),),
        rate=(last.tokens_per_second,),
        notes=() if arguments else (f"a step of {last.batch} sequences is bound by {last.bound}",),
        **_sizes(plan),
    )
    if row.is_exact:
        row = replace(row, kl=0.0, top1=1.0)
    if plan.fits:
        return row
    needed, budget = plan.memory.total / 2**30, plan.memory.budget / 2**30
    return replace(row, reason=f"does not fit: {needed:,.2f} of {budget:,.2f} GiB per device")


def _sizes(plan: MemoryPlan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "weight_bytes": memory.parts["weights"] + memory.parts.get("draft weights", 0),
        "token_bytes": memory.token_bytes,
        "needed_bytes": memory.total,
        "cache_tokens": memory.tokens * plan.layout.num_replicas,
    }


def _break_even(plan: MemoryPlan) -> float | None:
    """The acceptance rate at which a round of one request equals plain steps; None if not even 1 suffices."""
    step, draft_round = plan.roofline[0].seconds, plan.rounds[0]
    wanted, count = draft_round.seconds / step, draft_round.num_draft_tokens
    if mean_tokens(1.0, count) <= wanted:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_tokens(middle, count) < wanted else (low, middle)
    return high
