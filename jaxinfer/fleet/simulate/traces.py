"""Arrivals: traces in public formats, and made ones. Lengths and times only.

Formats: BurstGPT (github.com/HPMLL/BurstGPT), the Azure LLM inference traces of 2023 and 2024
(github.com/Azure/AzurePublicDataset), Mooncake (github.com/kvcache-ai/Mooncake), whose ids of blocks say which prompts
begin alike.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checks import did_you_mean
from jaxinfer.files import json_lines
from jaxinfer.fleet.simulate.times import MILLISECOND, SECOND
from jaxinfer.measure.bench.workload import Lengths

MOONCAKE_BLOCK = 512  # tokens
MADE_BLOCK = 16  # tokens, of made conversations
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class ArrivalTrace:
    """Requests in the order of their arrival.

    Attributes:
      name: for people. times: picoseconds from the first arrival. prompts, answers: tokens, at least 1.
      blocks: of each request, ids of blocks of `block_size` tokens, each of which says all that is before it, too; None
        where no two prompts begin alike. answers_are_keyed: whether they go on over the answer.
      notes: what was left out.
    """

    name: str
    times: Sequence[int]
    prompts: Sequence[int]
    answers: Sequence[int]
    blocks: Sequence[Sequence[int]] | None = None
    block_size: int = MOONCAKE_BLOCK
    answers_are_keyed: bool = False
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.times)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.times[-1] / SECOND if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return (len(self) - 1) / self.seconds if self.seconds else math.inf

    def first(self, count: int) -> "ArrivalTrace":
        """The first requests."""
        blocks = None if self.blocks is None else self.blocks[:count]
        parts = {name: getattr(self, name)[:count] for name in ("times", "prompts", "answers")}
        return replace(self, blocks=blocks, **parts)

    def at_rate(self, rate: float) -> "ArrivalTrace":
        """These requests, so many per second on average. Raises ValueError for those that all arrive at once."""
        if not self.seconds:
            raise ValueError(f"{self.name}: all requests arrive at once, which no rate changes")
        factor = self.rate / rate
        return replace(self, times=[round(factor * time) for time in self.times])


def open_trace(text: str, seed: int = 0) -> ArrivalTrace:
    """A trace from a file, or a made one.

    Args:
      text: a .csv file (BurstGPT, Azure) or a .jsonl file (Mooncake), or a kind with its values, such as
        "poisson:rate=4,prompt=512,answer=128,requests=1000": `poisson`; `gamma`, with `cv`, the coefficient of
        variation of the times between arrivals; `conversations`, whose later prompts begin with all that was said.
      seed: of made ones.

    Raises ValueError, with file and line, for what is no such trace; FileNotFoundError.
    """
    kind, colon, values = text.partition(":")
    if colon and kind in _MADE:
        return _make(text, kind, values, seed)
    file = Path(text)
    if not file.exists() and (colon or not file.suffix):
        hint = did_you_mean(kind, _MADE, otherwise=f": made ones are {', '.join(_MADE)}")
        raise ValueError(f"--trace {text}: neither a file nor a kind of made traces{hint}")
    if file.suffix == ".csv":
        return _read_csv(file)
    if file.suffix in (".jsonl", ".json"):
        return _read_mooncake(file)
    raise ValueError(f"{file.name} ends in neither .csv (BurstGPT, Azure) nor .jsonl (Mooncake)")


# Files.


def _read_csv(file: Path) -> ArrivalTrace:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        titles = [title.strip() for title in next(rows, [])]
        names = next((names for names in (_BURSTGPT, _AZURE) if set(names) <= set(titles)), None)
        if names is None:
            raise ValueError(
                f"{file.name}, line 1: columns {', '.join(titles) or '(none)'} are neither those of BurstGPT "
                f"({', '.join(_BURSTGPT)}) nor of Azure ({', '.join(_AZURE)})"
            )
        columns = [titles.index(name) for name in names]
        is_azure, failed = names is _AZURE, 0
        read: list[tuple[int, int, int]] = []
        for row in rows:
            where = f"{file.name}, line {rows.line_num}"
            if not row:
                continue
            if len(row) <= max(columns):
                raise ValueError(f"{where}: {len(row)} columns, and the first line has {len(titles)}")
            time, prompt, answer = (row[column].strip() for column in columns)
            counts = _count(prompt, names[1], where), _count(answer, names[2], where)
            if min(counts) < 1:  # BurstGPT writes failed requests so
                failed += 1
                continue
            read.append((_azure_time(time, where) if is_azure else _seconds(time, names[0], where), *counts))
    notes = (f"{failed:,} requests without a prompt or an answer (failed ones) are left out",) if failed else ()
    return _sorted(file, read, None, notes)


def _read_mooncake(file: Path) -> ArrivalTrace:
    read, blocks = [], []
    for where, row in json_lines(file):
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object")
        numbers = []
        for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise ValueError(f"{where}: {name} must be a number of at least {least}, got {value!r}")
            numbers.append(value)
        ids = row.get("hash_ids")
        needed = -(-int(numbers[1]) // MOONCAKE_BLOCK)
        if not isinstance(ids, list) or not all(type(block) is int for block in ids):
            raise ValueError(f"{where}: hash_ids must be a list of integers, got {ids!r:.60}")
        if not needed - 1 <= len(ids) <= needed:
            raise ValueError(
                f"{where}: {len(ids)} hash_ids, and {int(numbers[1])} tokens are {needed} blocks of {MOONCAKE_BLOCK}"
            )
        read.append((round(numbers[0] * MILLISECOND), int(numbers[1]), int(numbers[2])))
        blocks.append(tuple(ids))
    return _sorted(file, read, blocks, ())


def _sorted(file: Path, read: list[tuple[int, int, int]], blocks: Any, notes: tuple[str, ...]) -> ArrivalTrace:
    if not read:
        raise ValueError(f"{file.name} has no requests")
    order = sorted(range(len(read)), key=lambda number: read[number][0])
    first = read[order[0]][0]
    times, prompts, answers = zip(*(read[number] for number in order), strict=True)
    return ArrivalTrace(
        file.name,
        [time - first for time in times],
        prompts,
        answers,
        None if blocks is None else [blocks[number] for number in order],
        notes=notes,
    )


def _count(text: str, name: str, where: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise ValueError(f"{where}: {name} must be an integer of at least 0, got {text!r:.40}")
    return value


def _seconds(text: str, name: str, where: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{where}: {name} must be seconds of at least 0, got {text!r:.40}")
    return round(value * SECOND)


def _azure_time(text: str, where: str) -> int:
    """Picoseconds since 1970, from "2023-11-16 18:17:03.9799600" or with an offset such as +00:00."""
    day, point, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(day + rest[len(digits) :])
    except ValueError:
        raise ValueError(f"{where}: TIMESTAMP must be as 2023-11-16 18:17:03.9799600, got {text!r:.40}") from None
    if point and not digits:
        raise ValueError(f"{where}: TIMESTAMP must be as 2023-11-16 18:17:03.9799600, got {text!r:.40}")
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(moment.timestamp()) * SECOND + int((digits or "0").ljust(12, "0")[:12])


# Made ones.

_NUMBERS = {"rate": None, "requests": 10_000.0}
_COUNTS = ("requests", "turns", "shared")
_MADE: dict[str, dict[str, Any]] = {
    "poisson": {**_NUMBERS, "prompt": "1024", "answer": "256"},
    "gamma": {**_NUMBERS, "cv": None, "prompt": "1024", "answer": "256"},
    "conversations": {
        **_NUMBERS,
        "turns": 4.0,
        "shared": 512.0,
        "think": 30.0,
        "prompt": "128",
        "answer": "256",
    },
}


def _make(text: str, kind: str, values: str, seed: int) -> ArrivalTrace:
    known = _MADE[kind]
    chosen: dict[str, Any] = dict(known)
    for part in filter(None, values.split(",")):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            hint = did_you_mean(name, known, otherwise=f": it has {', '.join(known)}")
            raise ValueError(f"--trace {text}: {kind} has no value {name!r}{hint}")
        chosen[name] = value if name in ("prompt", "answer") else _number(text, name, value)
    for name, value in chosen.items():
        if value is None:
            raise ValueError(f"--trace {text}: {kind} needs {name}=X")
    numbers = np.random.default_rng(seed)
    lengths = {name: Lengths.parse(chosen[name], f"--trace {text}: {name}") for name in ("prompt", "answer")}
    if kind == "conversations":
        return _conversations(text, chosen, lengths, numbers)
    count, shape = int(chosen["requests"]), chosen.get("cv", 1.0) ** -2
    gaps = numbers.gamma(shape, 1 / (shape * chosen["rate"]), count)
    gaps[0] = 0.0
    times = (np.cumsum(gaps) * 1e6).tolist()
    return ArrivalTrace(
        text,
        [round(time * 1e6) for time in times],
        lengths["prompt"].draw(numbers, count),
        lengths["answer"].draw(numbers, count),
    )


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    is_whole = name not in _COUNTS or number.is_integer()
    if not (0 < number < math.inf or (name in ("shared", "think") and number == 0)) or not is_whole:
        kind = "a whole number" if name in _COUNTS else "a number"
        raise ValueError(f"--trace {text}: {name} must be {kind} above 0, got {value!r}")
    return number


def _conversations(
    text: str, chosen: dict[str, Any], lengths: dict[str, Lengths], numbers: np.random.Generator
) -> ArrivalTrace:
    """Conversations of `turns` turns, of which `rate` requests per second come in all: a turn comes `think` seconds
    (exponential) after the one before, whenever that was answered. All begin with `shared` tokens."""
    count, turns = int(chosen["requests"]), int(chosen["turns"])
    shared = int(chosen["shared"]) // MADE_BLOCK * MADE_BLOCK
    # More than are needed, so that the last requests come as often as others; what comes after them is cut off.
    num_conversations = math.ceil(count / turns + chosen["rate"] * chosen["think"])
    starts = np.cumsum(numbers.exponential(turns / chosen["rate"], num_conversations))
    read: list[tuple[int, int, int, Sequence[int]]] = []
    common, next_id = tuple(range(shared // MADE_BLOCK)), shared // MADE_BLOCK
    for start in starts.tolist():
        messages, answers = (lengths[name].draw(numbers, turns) for name in ("prompt", "answer"))
        pauses = numbers.exponential(chosen["think"], turns).tolist()
        num_tokens = shared + sum(messages) + sum(answers)
        num_own = -(-(num_tokens - shared) // MADE_BLOCK)
        blocks = (*common, *range(next_id, next_id + num_own))
        next_id += num_own
        known, time = shared, start
        for message, answer, pause in zip(messages, answers, pauses, strict=True):
            prompt = known + message
            read.append((round(time * SECOND), prompt, answer, blocks[: -(-(prompt + answer) // MADE_BLOCK)]))
            known, time = prompt + answer, time + pause
    read.sort(key=lambda row: row[0])
    read = read[:count]
    times, prompts, answers, blocks = zip(*read, strict=True)
    first = times[0]
    note = "later turns come at their times in the trace, whether or not the one before has been answered"
    return ArrivalTrace(
        text, [time - first for time in times], prompts, answers, blocks, MADE_BLOCK, True, notes=(note,)
    )
