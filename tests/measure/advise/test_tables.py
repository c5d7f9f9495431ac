"""The search beside an exhaustive one of the same options, over tables of figures: recorded, and of a roofline."""

import json
import random

import pytest

from benchmarks.advice import (
    ANSWER_TOKENS,
    DEFAULT_SIZE,
    DRAFTS,
    FILE,
    PROMPT_TOKENS,
    SIZES,
    WITHIN,
    best_of,
    combinations,
)
from jaxinfer.measure.advise.candidates import ModelFacts, candidates
from jaxinfer.measure.advise.goals import GOALS, Goal, TrialResult, flags, median
from jaxinfer.measure.advise.search import Search, recommended


class Table:
    """Figures of each combination; counts what was looked up."""

    def __init__(self, rows: list[TrialResult]):
        self.rows = {str(row.arguments): row for row in rows}
        self.asked: set[str] = set()

    def __call__(self, arguments, stop=lambda row: None) -> TrialResult:
        self.asked.add(str(arguments))
        return self.rows[str(arguments)]

    def search(self, goal: Goal) -> TrialResult:
        singles = [row.arguments for row in self.rows.values() if len(row.arguments) == 1]
        found = recommended(goal, Search(goal, self).run(singles))
        assert found is not None
        return self.rows[str(found[0].arguments)]


KINDS = {
    "quantize": ["int8", "int4-g128"],
    "kv_dtype": ["int8", "fp8_e4m3"],
    "max_seqs": [1, 16, 128, 256],
    "draft": ["ngram", "small"],
}


def roofline_rows(seed: int) -> list[TrialResult]:
    """A model on a chip, of random sizes and rates: steps are bound by memory or by FLOPs and take a little more, and a
    draft pays while a batch is small. Caches compete with weights for the bandwidth."""
    draw = random.Random(seed)
    weights, token, context = draw.uniform(1, 140), draw.uniform(0.02, 0.5) / 1000, draw.choice([500, 2000, 8000])
    bandwidth, flops, overhead = draw.uniform(500, 5000), draw.uniform(100, 1000) * 1000, draw.uniform(0, 3e-4)
    accepted = {"ngram": draw.uniform(0.1, 0.6), "small": draw.uniform(0.4, 0.85)}
    shares = {"ngram": 0.0, "small": draw.uniform(0.05, 0.4)}
    dequantize = {"int8": draw.uniform(1, 1.3), "int4-g128": draw.uniform(1, 1.6)}
    sizes = {"int8": 0.5, "int4-g128": 0.26, "fp8_e4m3": 0.5}
    kls = {"int8": 0.001, "int4-g128": draw.choice([0.02, 0.08]), "fp8_e4m3": 0.004}

    def seconds(arguments, batch: int, width: int) -> float:
        recipe, kv_dtype = arguments.get("quantize"), arguments.get("kv_dtype")
        read = weights * sizes.get(recipe, 1) + batch * context * token * sizes.get(kv_dtype, 1)
        computed = batch * width * weights * dequantize.get(recipe, 1.0) / flops
        return max(read / bandwidth, computed) + overhead

    def per_token(arguments, batch: int) -> float:
        plain = seconds(arguments, batch, 1)
        if (draft := arguments.get("draft")) is None:
            return plain
        rounds = []
        for count in (2, 4, 8):
            made = sum(accepted[draft] ** i for i in range(count + 1))
            rounds.append((seconds(arguments, batch, count + 1) + count * shares[draft] * plain) / made)
        return min(rounds)

    rows = []
    for arguments in combinations({name: value} for name, values in KINDS.items() for value in values):
        batch = arguments.get("max_seqs", 64)
        kl = sum(kls[arguments[name]] for name in ("quantize", "kv_dtype") if name in arguments)
        rows.append(
            TrialResult(
                arguments,
                rate=(batch / per_token(arguments, batch),) * 3,
                one=(200 * per_token(arguments, 1),) * 3,
                cache_tokens=int(1e9 / token / sizes.get(arguments.get("kv_dtype"), 1) - 1e6 * weights),
                needed_bytes=int(weights * sizes.get(arguments.get("quantize"), 1) * 2**30),
                kl=kl,
            )
        )
    return rows


@pytest.mark.parametrize("goal", GOALS)
def test_the_recorded_figures_are_searched_as_well_as_exhausted(goal):
    """Those of the embedded model, which `python -m benchmarks.advice` measured."""
    about = ModelFacts(
        given={},
        is_quantized=False,
        caches_values=True,
        sizes=SIZES,
        default_size=DEFAULT_SIZE,
        drafts=DRAFTS,
        shared=0.0,
        longest=PROMPT_TOKENS + ANSWER_TOKENS,
    )
    if not FILE.exists():
        pytest.skip("python -m benchmarks.advice has not been run")
    its = Goal(goal)
    recorded = [TrialResult.from_dict(row) for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"]]
    by_name = {row.name: row for row in recorded}
    rows = [by_name[flags(one) or "baseline"] for one in combinations(candidates(its, about)[0])]
    assert all(row.reason is None for row in rows)
    table = Table(rows)
    assert median(its.values(table.search(its))) >= WITHIN * median(its.values(best_of(its, rows)))


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(
    "seeds",
    [(0, 1, 2, 11), pytest.param(range(400), marks=pytest.mark.slow)],  # 11 tells a search that climbs once
    ids=["few", "many"],
)
def test_a_roofline_is_searched_as_well_as_exhausted(goal, seeds):
    num_asked = 0
    for seed in seeds:
        rows = roofline_rows(seed)
        goals = [Goal(goal), Goal(goal, memory=(rows[0].needed_bytes or 0) * 3 // 4)]
        for one in goals:
            table = Table(rows)
            found = median(one.values(table.search(one)))
            assert found >= WITHIN * median(one.values(best_of(one, rows))), (seed, one)
            num_asked += len(table.asked)
    assert num_asked < 0.3 * len(seeds) * 2 * len(rows)
