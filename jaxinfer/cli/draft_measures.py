"""A trained draft in the engine: what is accepted in rounds, and its speed beside plain decoding."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.models import ModelConfig, Params
    from jaxinfer.training.acceptance import Acceptance
    from jaxinfer.training.head_rows import DraftedText

SPEED_TOKENS = 64  # of an answer whose speed is measured, at most
REPEATS = 3


def measure_rounds(
    llm: "LLM", draft: "tuple[ModelConfig, Params]", texts: "Sequence[DraftedText]", num_draft_tokens: int
) -> "Acceptance":
    """Acceptance of a draft in rounds of an engine, of greedy answers to held-out prompts, as long as those are."""
    from jaxinfer.api.llm import LLM
    from jaxinfer.training.acceptance import Acceptance

    asked = _asked(texts)
    longest = max(len(text.tokens) for text in texts)
    options: dict[str, Any] = {"max_model_len": longest, "max_seqs": 8, "num_draft_tokens": num_draft_tokens}
    options["mesh"] = llm.mesh
    with Stage("measuring rounds"), LLM(_live(llm), draft=draft, **options) as drafting:
        drafting.generate(*asked, use_tqdm=False)
        stats = drafting.speculation_stats()
    if stats is None or not stats.num_rounds:
        raise RuntimeError("the engine made no rounds with the draft")
    by_position = tuple(
        accepted / max(proposed, 1) for accepted, proposed in zip(stats.accepted_at, stats.proposed_at, strict=True)
    )
    first_rate = by_position[0] if by_position else 0.0
    return Acceptance(first_rate, stats.accepted, stats.proposed, stats.num_rounds, stats.num_tokens, by_position)


def measure_speeds(
    llm: "LLM", draft: "tuple[ModelConfig, Params]", texts: "Sequence[DraftedText]", loads: Sequence[int]
) -> dict[int, float]:
    """Speed with a draft whose length adapts, beside plain decoding, by the number of answers at a time: greedy answers
    of at most SPEED_TOKENS tokens to held-out prompts, both in turn, the median of REPEATS."""
    from jaxinfer.api.llm import LLM

    longest = max(text.first for text in texts) + SPEED_TOKENS
    shared: dict[str, Any] = {"max_model_len": min(longest, llm.engine.spec.max_model_len), "mesh": llm.mesh}
    speeds = {}
    for load in loads:
        prompts, params = _asked([texts[number % len(texts)] for number in range(max(load, 4))], SPEED_TOKENS)
        ratios = []
        with (
            Stage(f"measuring speed, {load} at a time"),
            LLM(_live(llm), max_seqs=load, **shared) as plain,
            LLM(_live(llm), draft=draft, max_seqs=load, **shared) as drafting,
        ):
            for _ in range(REPEATS + 1):
                seconds = []
                for engine in (plain, drafting):
                    began = time.perf_counter()
                    engine.generate(prompts, params, use_tqdm=False)
                    seconds.append(time.perf_counter() - began)
                ratios.append(seconds[0] / seconds[1])
        speeds[load] = statistics.median(ratios[1:])  # the first time compiles
    return speeds


def speed_line(speeds: Mapping[int, float]) -> str:
    """A sentence of measured speeds."""
    listed = ", ".join(f"{ratio:.2f}x with {load} at a time" for load, ratio in speeds.items())
    return f"speed beside plain decoding: {listed}"


def _live(llm: "LLM") -> Any:
    return llm.config, llm.params, llm.tokenizer


def _asked(texts: "Sequence[DraftedText]", most: int | None = None) -> tuple[list[list[int]], list[Any]]:
    """Prompts of texts, and greedy requests for as many tokens as follow them."""
    from jaxinfer.sampling import SamplingParams

    prompts, params = [], []
    for text in texts:
        first = text.first if text.first > 1 else max(1, len(text.tokens) // 4)
        rest = len(text.tokens) - first
        prompts.append(text.tokens[:first].tolist())
        params.append(SamplingParams(temperature=0.0, max_tokens=min(rest, most or rest), ignore_eos=True))
    return prompts, params
