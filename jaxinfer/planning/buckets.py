"""Sizes that programs are compiled for, chosen from a trace so that little of what they compute is padding."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.engine.options import TOKEN_UNIT
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.planning.trace import StepSizes, TraceRequest, all_at_once, one_at_a_time
from jaxinfer.tables import table_text

MAX_PADDING = 0.10
MAX_PROGRAMS = 16  # unless the engine has more by default
MAX_SIMULATED = 2000  # requests of a trace whose steps are counted, evenly spaced
LOADS: dict[str, Callable[[EngineSpec, Sequence[TraceRequest]], StepSizes]] = {
    "all at once": all_at_once,
    "one at a time": one_at_a_time,
}


@dataclass(frozen=True)
class Buckets:
    """Sizes of programs, and what they cost.

    Attributes:
      token_buckets, decode_slots: as the engine's options. num_programs: of steps, of decoding and of rounds.
      paddings: by load, the share of the computed rows that are padding: of steps with prompts, and of decode steps.
    """

    token_buckets: tuple[int, ...]
    decode_slots: tuple[int, ...]
    num_programs: int
    paddings: dict[str, tuple[float, float]]

    @property
    def padding(self) -> float:
        """The largest share."""
        return max(share for shares in self.paddings.values() for share in shares)

    @property
    def flags(self) -> str:
        """The sizes as flags of a command line."""
        tokens, slots = (",".join(map(str, sizes)) for sizes in (self.token_buckets, self.decode_slots))
        return f"--token-buckets {tokens} --decode-slots {slots}"


@dataclass(frozen=True)
class BucketChoice:
    """Sizes chosen for a trace, beside the engine's own.

    Attributes:
      lengths: the least and the largest of the prompts and of the answers. max_programs: the limit of the choice.
    """

    num_requests: int
    lengths: tuple[tuple[int, int], tuple[int, int]]
    max_programs: int
    chosen: Buckets
    default: Buckets

    @property
    def holds(self) -> bool:
        """True if at most `MAX_PADDING` of every kind of step is padding."""
        return self.chosen.padding <= MAX_PADDING

    def to_dict(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return {
            "requests": self.num_requests,
            "max_programs": self.max_programs,
            "holds": self.holds,
            **{name: vars(buckets) | {"flags": buckets.flags} for name, buckets in self._rows},
        }

    def __str__(self) -> str:
        prompts, answers = (f"{low:,} to {high:,}" for low, high in self.lengths)
        loads = [f"{kind}, {load}" for kind in ("prompts", "decoding") for load in self.chosen.paddings]
        rows = [
            (
                name,
                buckets.num_programs,
                *(f"{100 * shares[kind]:.1f} %" for kind in (0, 1) for shares in buckets.paddings.values()),
            )
            for name, buckets in self._rows
        ]
        title = (
            f"sizes for {self.num_requests:,} requests, prompts of {prompts} tokens, answers of {answers}: padding\n"
        )
        text = title + table_text(("", "programs", *loads), rows, indent="  ")
        if not self.holds:
            text += f"  more than {MAX_PADDING:.0%} padding: the least that {self.max_programs} programs allow\n"
        return f"{text}  {self.chosen.flags}\n"

    @property
    def _rows(self) -> tuple[tuple[str, Buckets], ...]:
        return ("chosen", self.chosen), ("default", self.default)


def choose_buckets(spec: EngineSpec, trace: Sequence[TraceRequest], max_programs: int | None = None) -> BucketChoice:
    """The sizes of the fewest programs of which at most `MAX_PADDING` of every kind of step is padding; where
    `max_programs` are too few for that, those of the least padding.

    For each number of sizes the mean over the loads is the least that there is.

    Raises ValueError for a deterministic engine, which has one shape, and for a limit that is too small for any.
    """
    if spec.options.deterministic is True:
        raise ValueError("sizes cannot be chosen for deterministic=True, which has one shape")
    options = replace(spec.options, token_buckets=None, decode_slots=None, deterministic=False)
    spec = replace(spec, options=options, determinism=None)
    requests = [trace[place] for place in np.linspace(0, len(trace) - 1, min(len(trace), MAX_SIMULATED)).astype(int)]
    loads = {name: run(spec, requests) for name, run in LOADS.items()}
    default = _measured(spec, spec.token_buckets, spec.decode_slots, loads)
    least, most = num_programs(spec, 1, 1), max_programs or max(MAX_PROGRAMS, default.num_programs)
    if most < least:
        raise ValueError(f"{most} programs are too few: this engine needs {least} of one size each")
    tokens = _best([load.steps for load in loads.values()], most, spec.token_buckets[-1], TOKEN_UNIT)
    slots = _best([load.decodes for load in loads.values()], most, spec.max_seqs, 1)
    pairs = itertools.product(tokens, slots)
    candidates = [_measured(spec, *pair, loads) for pair in pairs if num_programs(spec, *map(len, pair)) <= most]
    chosen = min(
        candidates, key=lambda buckets: (max(buckets.padding, MAX_PADDING), buckets.num_programs, buckets.padding)
    )
    lengths = [[request.num_prompt for request in trace], [request.num_answer for request in trace]]
    prompts, answers = ((min(counts), max(counts)) for counts in lengths)
    return BucketChoice(len(trace), (prompts, answers), most, chosen, default)


def num_programs(spec: EngineSpec, num_tokens: int, num_slots: int) -> int:
    """Programs of steps, of decoding and of speculative rounds of so many sizes. Steps of the fewest tokens have one
    for each number of slots (`EngineSpec.step_slots_of`)."""
    rounds = num_slots * len(spec.trees) + (num_slots - 1) * spec.packs_rounds
    return num_tokens + len(spec.step_slots) - 1 + num_slots + rounds


def padding(sizes: Sequence[int], counts: Mapping[int, int]) -> float:
    """The share of padding in the rows that programs of these sizes compute for steps of so many rows."""
    computed = sum(count * next(size for size in sizes if size >= rows) for rows, count in counts.items())
    return 1 - sum(rows * count for rows, count in counts.items()) / computed if computed else 0.0


def best_buckets(weights: Mapping[int, float], most: int, last: int, unit: int = 1) -> list[tuple[int, ...]]:
    """For each number of sizes from 1 to `most`, those that compute the fewest rows. They are multiples of `unit`, and
    the last one is `last`.

    Args:
      weights: of steps, by their number of rows, at most `last`.

    Exact, by dynamic programming over the sorted sizes; fewer lists where there are fewer sizes.
    """
    rounded = {last: 0.0}
    for rows, weight in weights.items():
        size = -(-rows // unit) * unit
        rounded[size] = rounded.get(size, 0.0) + weight
    sizes = np.array(sorted(rounded))
    sums = np.cumsum([0.0, *(rounded[size] for size in sizes.tolist())])
    # cost[i, j]: of steps of the sizes i to j - 1 that are padded to the last of these.
    cost = np.full((len(sizes) + 1, len(sizes) + 1), np.inf)
    cost[:, 1:] = sizes * (sums[1:] - sums[:, None])
    cost[np.tril_indices(len(sizes) + 1)] = np.inf
    best, before = cost[0], [[0] * (len(sizes) + 1)]
    size_lists: list[tuple[int, ...]] = [(last,)]
    for _ in range(min(most, len(sizes)) - 1):
        ends = best[:, None] + cost
        before.append(np.argmin(ends, axis=0).tolist())
        best = np.min(ends, axis=0)
        size_lists.append(_path(before, sizes))
    return size_lists


def _path(before: list[list[int]], sizes: np.ndarray) -> tuple[int, ...]:
    """The sizes that end the parts of the best cut, followed back from the last."""
    end, path = len(sizes), []
    for row in reversed(before):
        path.append(int(sizes[end - 1]))
        end = row[end]
    return tuple(reversed(path))


def _best(loads: Sequence[Counter[int]], most: int, last: int, unit: int) -> list[tuple[int, ...]]:
    """As `best_buckets`, for the mean over the loads of what is computed for a row."""
    weights: dict[int, float] = {}
    for load in loads:
        total = sum(rows * count for rows, count in load.items())
        for rows, count in load.items():
            weights[rows] = weights.get(rows, 0.0) + count / total
    return best_buckets(weights, most, last, unit)


def _measured(
    spec: EngineSpec, tokens: tuple[int, ...], slots: tuple[int, ...], loads: Mapping[str, StepSizes]
) -> Buckets:
    paddings = {name: (padding(tokens, load.steps), padding(slots, load.decodes)) for name, load in loads.items()}
    return Buckets(tokens, slots, num_programs(spec, len(tokens), len(slots)), paddings)
