"""Speculative decoding next to plain decoding: the embedded pair, n-grams, and loads.

All greedy, end of sequence ignored, so that every system makes the same tokens (checked), on the first 128 tokens of
Python files that the embedded pair never saw. Systems take turns in one process, everything compiled before; a speedup
is the plain seconds over the speculative ones of the same prompts, prompt included, median over the prompts.

    python -m benchmarks.speculative --json benchmarks/results/speculative.json
"""

import argparse
import json
import keyword
import os
import platform
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.loading import load_model
from jaxinfer.speculative import SpeculationStats, expected_speedup
from jaxinfer.training.copying import with_copying
from jaxinfer.training.corpus import held_out_files

NUM_FILES, PROMPT_TOKENS, ANSWER_TOKENS = 50, 128, 128
PAIR_DRAFT_TOKENS: tuple[int | str, ...] = (4, 9, "auto")
NGRAM_DRAFT_TOKENS = 8
EDIT_TOKENS, START_TOKENS = 200, 32  # of the piece of a file that is edited, and of the copy that comes after it
COPYING_GAIN = 15.0  # of a copied token's logit: more than the embedded model gives any other
LOADS = (1, 4, 8, 16)
GOALS = {"acceptance": 0.6, "pair": 1.8, "ngram": 2.5, "load": 0.98}

Prompt = list[int]


@dataclass(frozen=True)
class Edit:
    """A piece of a file, the same with a name changed, and the beginning of that once more.

    Attributes:
      prompt: token ids. rest: what an editor who changes nothing else would write next.
    """

    prompt: Prompt
    rest: list[int]


def params(max_tokens: int = ANSWER_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def timed(llm: LLM, prompts: Sequence[Prompt]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    return time.perf_counter() - start, [one.outputs[0].token_ids for one in outputs]


def take_turns(
    plain: LLM, drafted: LLM, batches: Sequence[Sequence[Prompt]], rounds: int
) -> tuple[list[float], list[float], list[list[int]]]:
    """Seconds of each batch with either, the median of `rounds`, and the answers. The first one is run before, so
    that everything is compiled, and who begins changes with every batch."""
    for llm in (plain, drafted):
        for _ in range(3):  # plainly, speculating, and what an adaptive length tries first
            timed(llm, batches[0])
    found: list[tuple[float, float]] = []
    answers: list[list[int]] = []
    for number, batch in enumerate(batches):
        seconds: dict[LLM, list[float]] = {plain: [], drafted: []}
        tokens: dict[LLM, list[list[int]]] = {}
        for turn in range(rounds):
            order = (plain, drafted) if (number + turn) % 2 == 0 else (drafted, plain)
            for llm in order:
                spent, tokens[llm] = timed(llm, batch)
                seconds[llm].append(spent)
        if tokens[plain] != tokens[drafted]:
            raise SystemExit("speculation changed an answer")
        answers += tokens[plain]
        found.append((statistics.median(seconds[plain]), statistics.median(seconds[drafted])))
    return [one for one, _ in found], [other for _, other in found], answers


def summary(plain: Sequence[float], drafted: Sequence[float], stats: SpeculationStats | None) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(plain, drafted, strict=True)]
    data: dict[str, Any] = {
        "speedup": statistics.median(ratios),
        "speedup_in_all": sum(plain) / sum(drafted),
        "slowest": min(ratios),
        "fastest": max(ratios),
        "plain_seconds": sum(plain),
        "seconds": sum(drafted),
    }
    if stats is not None:
        data |= {
            "acceptance_rate": stats.acceptance_rate,
            "conditional_rate": stats.conditional_rate,
            "acceptance_by_position": stats.acceptance_by_position,
            "mean_accepted_length": stats.mean_accepted_length,
            "stats": asdict(stats),
        }
    return data


def measured(
    plain: LLM, model: Any, batches: Sequence[Sequence[Prompt]], rounds: int, **drafting: Any
) -> dict[str, Any]:
    """Speculation with one way to draft, and the answers' tokens under "answers"."""
    with LLM(model, max_seqs=plain.engine.spec.max_seqs, **drafting) as drafted:
        seconds, other, answers = take_turns(plain, drafted, batches, rounds)
        return {**summary(seconds, other, drafted.speculation_stats()), "answers": answers}


def measure_pair(prompts: list[Prompt], rounds: int) -> dict[str, Any]:
    """The embedded pair, one answer at a time, with each number of drafted tokens; and what the formula expects of its
    draft's cost, run alone."""
    with LLM("demo", max_seqs=1) as plain:
        lengths = {}
        for k in PAIR_DRAFT_TOKENS:
            batches = [[one] for one in prompts]
            row = measured(plain, "demo", batches, rounds, draft="demo-draft", num_draft_tokens=k)
            del row["answers"]
            lengths[str(k)] = row
        with LLM("demo-draft", max_seqs=1) as draft:
            ratios = []
            for _ in range(2):  # the first round compiles
                ratios = [_decode_seconds(draft, one) / _decode_seconds(plain, one) for one in prompts[:8]]
    cost = statistics.median(ratios)
    for k, row in lengths.items():
        if k != "auto":
            row["expected"] = expected_speedup(row["conditional_rate"], int(k), cost)
    return {"cost_ratio": cost, "lengths": lengths}


def _decode_seconds(llm: LLM, prompt: Prompt) -> float:
    """Per token after the first."""
    timings = llm.generate(prompt, params(64), use_tqdm=False)[0].timings
    if timings is None:
        raise SystemExit("an answer without timings")
    return timings.time_per_output_token


def measure_ngram(model: Any, edits: list[Edit], rounds: int) -> dict[str, Any]:
    """N-grams on code edits, one answer at a time; how far the answer is the file's text, and how much of it stood
    there before, in the prompt or in itself."""
    with LLM(model, max_seqs=1) as plain:
        batches = [[one.prompt] for one in edits]
        found = measured(plain, model, batches, rounds, draft="ngram", num_draft_tokens=NGRAM_DRAFT_TOKENS)
    answers = found.pop("answers")
    pairs = list(zip(edits, answers, strict=True))
    found["copied"] = statistics.mean(_num_equal(answer, edit.rest) / len(answer) for edit, answer in pairs)
    found["repeated"] = statistics.mean(repeated(edit.prompt, answer) for edit, answer in pairs)
    return found


def copying_model(texts: Sequence[str]) -> Any:
    """The embedded model with heads that copy (see jaxinfer.training.copying), live: it goes on as its text went on
    where the last two tokens stood before. The embedded model alone is too small to copy."""
    loaded = load_model("demo")
    config, params = loaded.config, loaded.params
    if loaded.tokenizer is None:
        raise SystemExit("the model has no tokenizer")
    shape = (config.hidden_size, config.num_kv_heads, config.head_dim)
    for layer in params["layers"].values():  # as many key heads as query heads, which changes nothing
        for name in ("k_proj", "v_proj"):
            weight = layer["attention"][name]["weight"].reshape(shape)
            wide = jnp.repeat(weight, config.num_heads // config.num_kv_heads, axis=1)
            layer["attention"][name] = {"weight": wide.reshape(config.hidden_size, -1)}
    config = replace(config, num_kv_heads=config.num_heads)
    tokens = np.array([loaded.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts[:8]])
    return (*with_copying(config, params, tokens, gain=COPYING_GAIN), loaded.tokenizer)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def repeated(prompt: list[int], answer: list[int], length: int = 4) -> float:
    """The share of the answer's tokens that end a run of `length` tokens which stands before."""
    tokens, seen, count = [*prompt, *answer], set(), 0
    for end in range(length, len(tokens) + 1):
        run = tuple(tokens[end - length : end])
        count += end > len(prompt) and run in seen
        seen.add(run)
    return count / len(answer)


def make_edits(llm: LLM, texts: Sequence[str], count: int) -> list[Edit]:
    """Of the texts that have a name to change."""
    edits: list[Edit] = []
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise SystemExit("the model has no tokenizer")
    for text in texts:
        piece = tokenizer.decode(tokenizer.encode(text)[:EDIT_TOKENS])
        piece = piece[: piece.rfind("\n") + 1]
        names = Counter(name for name in re.findall(r"\b[a-z_]\w{3,}\b", piece) if not keyword.iskeyword(name))
        if not names or names.most_common(1)[0][1] < 2:
            continue
        name = names.most_common(1)[0][0]
        edited = re.sub(rf"\b{name}\b", f"new_{name}", piece)
        tokens = tokenizer.encode(edited)
        start = tokenizer.encode(piece) + tokens + tokens[:START_TOKENS]
        edits.append(Edit(start, tokens[START_TOKENS:]))
    return edits[:count]


def measure_loads(prompts: list[Prompt], rounds: int, num_batches: int) -> dict[str, Any]:
    """The adaptive length against plain decoding, so many answers at once."""
    found = {}
    for load in LOADS:
        batches = [[prompts[(load * i + j) % len(prompts)] for j in range(load)] for i in range(num_batches)]
        with LLM("demo", max_seqs=load) as plain:
            row = measured(plain, "demo", batches, rounds, draft="demo-draft", num_draft_tokens="auto")
        del row["answers"]
        found[str(load)] = row
    return found


def report_pair(found: dict[str, Any]) -> None:
    print(
        f"embedded pair, one answer at a time (goals: {GOALS['acceptance']:.0%} of 4 drafted tokens accepted, "
        f"{GOALS['pair']}x); drafting a token costs {found['cost_ratio']:.2f} of a plain step:"
    )
    print(f"  {'drafted':<9}{'accepted':>10}{'tokens a round':>16}{'speedup':>10}{'from':>8}{'to':>8}{'formula':>10}")
    for k, row in found["lengths"].items():
        expected = f"{row['expected']:.2f}x" if "expected" in row else ""
        print(
            f"  {k:<9}{row['acceptance_rate']:>10.1%}{row['mean_accepted_length']:>16.2f}{row['speedup']:>9.2f}x"
            f"{row['slowest']:>7.2f}x{row['fastest']:>7.2f}x{expected:>10}"
        )


def report_ngram(name: str, found: dict[str, Any]) -> None:
    print(f"n-grams on code edits, {name}, {NGRAM_DRAFT_TOKENS} drafted tokens, one answer at a time:")
    print(
        f"  {found['speedup']:.2f}x plain decoding (goal {GOALS['ngram']}x), from {found['slowest']:.2f}x to "
        f"{found['fastest']:.2f}x; {found['mean_accepted_length']:.2f} tokens a round"
    )
    print(
        f"  of the answers, {found['copied']:.1%} are the file's text from the start on; {found['repeated']:.1%} of "
        f"the tokens end 4 that stood before in prompt or answer"
    )


def report_loads(found: dict[str, Any]) -> None:
    print(f"adaptive length next to plain decoding (goal {GOALS['load']}x at every load):")
    print(f"  {'answers at once':<18}{'speedup':>10}{'from':>8}{'to':>8}{'tokens in rounds':>20}")
    for load, row in found.items():
        stats = row["stats"]
        share = stats["num_tokens"] / max(stats["num_tokens"] + stats["num_plain_tokens"], 1)
        print(f"  {load:<18}{row['speedup']:>9.2f}x{row['slowest']:>7.2f}x{row['fastest']:>7.2f}x{share:>20.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--files", type=int, default=NUM_FILES, help=f"held-out files (default {NUM_FILES})")
    parser.add_argument("--rounds", type=int, default=3, help="times each prompt runs; medians (default 3)")
    parser.add_argument("--only", choices=("pair", "ngram", "ngram_copying", "loads"), help="one part")
    options = parser.parse_args()
    texts = [text for _, text in held_out_files(options.files)]
    with ExitStack() as stack:
        llm = stack.enter_context(LLM("demo", max_seqs=1))
        if llm.tokenizer is None:
            raise SystemExit("the model has no tokenizer")
        prompts = [llm.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
        edits = make_edits(llm, texts, options.files)
    machine = {
        "num_cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    report: dict[str, Any] = {"num_files": len(prompts), "num_edits": len(edits), "rounds": options.rounds, **machine}
    parts: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        "pair": (lambda: measure_pair(prompts, options.rounds), report_pair),
        "ngram": (lambda: measure_ngram("demo", edits, options.rounds), partial(report_ngram, "the embedded model")),
        "ngram_copying": (
            lambda: measure_ngram(copying_model(texts), edits, options.rounds),
            partial(report_ngram, "the embedded model with copying heads"),
        ),
        "loads": (lambda: measure_loads(prompts, options.rounds, num_batches=6), report_loads),
    }
    for name, (measure, show) in parts.items():
        if options.only in (None, name):
            report[name] = measure()
            show(report[name])
    if options.json:
        options.json.write_text(json.dumps({**report, "goals": GOALS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
