"""The cost of drafting with a trained head beside what it gains, at each rate of acceptance: SmolLM2, random weights.

A head of real size with random weights computes all that a trained one does; what it drafted is then replaced by what
the model will say, or by something else, so that a planted share of drafts is accepted. Greedy answers of one prompt,
checked to be those of plain decoding; plain and speculative engines take turns in one process.

    python -m benchmarks.planted_drafts [--quantized] [--json FILE]
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.real.models import fetched_path
from jaxinfer import LLM, SamplingParams
from jaxinfer.loading import load_model
from jaxinfer.measure.bench.model import machine
from jaxinfer.models import DraftHeadConfig, init_params
from jaxinfer.speculative import BoundProposer, DraftState, HeadDraft, Proposer, head_for, register_draft
from jaxinfer.speculative.heads import HeadProposer

LENGTH, ANSWER, PROMPT, VOCABULARY = 4, 128, 64, 8192
RATES = (0.0, 0.25, 0.5, 0.75, 1.0)
BLOCK = "dflash"


@dataclass(frozen=True, eq=False)
class PlantedDraft(HeadDraft):
    """A head whose drafts become those of `truth` int32 [L], the prompt and its greedy answer, where `is_right`."""

    truth: Any = None
    is_right: Any = None

    def proposer(self, *models: Any) -> Proposer:
        return PlantedProposer(models[0], self.taps, tuple(self.truth.tolist()), tuple(self.is_right.tolist()))


@dataclass(frozen=True)
class PlantedProposer(HeadProposer):
    truth: tuple[int, ...] = ()  # compared, as programs are compiled for them
    is_right: tuple[bool, ...] = ()

    def bind(self, weights: Any, vocab_size: int, is_maximal: bool) -> BoundProposer:
        return _Planted(
            super().bind(weights, vocab_size, is_maximal), jnp.asarray(self.truth), jnp.asarray(self.is_right)
        )


@dataclass(frozen=True, eq=False)
class _Planted(BoundProposer):
    head: BoundProposer
    truth: jax.Array
    is_right: jax.Array

    def observe(self, own: Any, rows: Any) -> Any:
        return self.head.observe(own, rows)

    def propose(self, state: DraftState, rows: Any, tree: Any) -> Any:
        state, proposal = self.head.propose(state, rows, tree)
        at = jnp.minimum(rows.positions[:, None] + jnp.arange(tree.num_nodes), self.truth.shape[0] - 1)
        # The head's own drafts are used, if for nothing: otherwise the compiler would leave them out.
        unlikely = jnp.where(proposal.tokens < 0, 1, 0)
        tokens = jnp.where(self.is_right[at], self.truth[at], self.truth[at] + 1) + unlikely
        tokens = tokens.at[:, 0].set(proposal.tokens[:, 0])
        return state, proposal._replace(tokens=tokens)


def head_of(target: Any, kind: str) -> tuple[Any, Any]:
    """Configuration and random parameters of a head for a target."""
    head = DraftHeadConfig("eagle3", tap_size=target.hidden_size, vocab_size=VOCABULARY, has_lm_head=True)
    layers = 1
    if kind == BLOCK:
        layers, settings = 5, {"block_size": LENGTH + 1, "mask_token": 0}
        head = DraftHeadConfig(BLOCK, tap_size=target.hidden_size, **settings)
    names = (
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rope",
        "vocab_size",
        "norm_eps",
    )
    plain = {name: getattr(target, name) for name in names}
    config = replace(target, **plain, num_layers=layers, tie_word_embeddings=False, draft_head=head, dtype="float32")
    params = init_params(config, jax.random.key(0))
    if kind != BLOCK:
        index = np.full(target.vocab_size, VOCABULARY, np.int32)
        index[:VOCABULARY] = np.arange(VOCABULARY)
        config = replace(config, draft_head=replace(head, has_draft_index=True))
        params = {**params, "draft_index": jnp.asarray(index)}
    return config, params


@dataclass(frozen=True)
class Times:
    """Seconds of an answer, the median of several, and of one that ends with its first token."""

    whole: float
    first: float

    @property
    def rest(self) -> float:
        return self.whole - self.first


def seconds(llm: LLM, prompt: list[int], length: int = ANSWER) -> tuple[float, list[int]]:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - start, outputs[0].outputs[0].token_ids


def take_turns(engines: list[LLM], prompt: list[int], rounds: int) -> list[Times]:
    """Times of each engine."""
    of = [[(seconds(llm, prompt)[0], seconds(llm, prompt, 1)[0]) for llm in engines] for _ in range(rounds)]
    return [Times(*map(statistics.median, zip(*own, strict=True))) for own in zip(*of, strict=True)]


def measure_verifying(rounds: int, *, quantized: bool) -> dict[str, Any]:
    """The cost of a round of n-grams, whose drafts cost nothing: a pass over LENGTH + 1 rows beside one over one."""
    model = load_model(str(fetched_path("smollm2")), requantize=None if quantized else "dense")
    live = model.config, model.params, model.tokenizer
    prompt = [int(token) for token in np.random.default_rng(0).integers(100, 40_000, PROMPT)]
    options: dict[str, Any] = {"max_seqs": 1, "max_model_len": 512, "prefix_cache": False}
    with LLM(live, **options) as plain, LLM(live, draft="ngram", num_draft_tokens=LENGTH, **options) as drafted:
        for _ in range(2):
            assert seconds(plain, prompt)[1] == seconds(drafted, prompt)[1]
        of_plain, of_draft = take_turns([plain, drafted], prompt, rounds)
        tokens = drafted.speculation_stats().mean_accepted_length
    return {"rows": LENGTH + 1, "round_over_step": of_draft.rest / of_plain.rest * tokens}


def measure(kind: str, rounds: int, length: int | str, *, quantized: bool) -> list[dict[str, Any]]:
    """A row for each planted rate; `length` is `num_draft_tokens`."""
    model = load_model(str(fetched_path("smollm2")), requantize=None if quantized else "dense")
    live = model.config, model.params, model.tokenizer
    prompt = [int(token) for token in np.random.default_rng(0).integers(100, 40_000, PROMPT)]
    options: dict[str, Any] = {"max_seqs": 1, "max_model_len": 512, "prefix_cache": False}
    rows = []
    with LLM(live, **options) as plain:
        _, answer = seconds(plain, prompt)
        truth = np.array([*prompt, *answer, *[0] * LENGTH], np.int32)
        config, taps = head_for(head_of(model.config, kind)[0], model.config)
        params = head_of(model.config, kind)[1]
        for rate in RATES:
            is_right = np.random.default_rng(1).random(len(truth)) < rate
            name = f"planted{kind}{length}{int(100 * rate)}:"
            register_draft(
                name,
                lambda *_, right=is_right: PlantedDraft("planted", config, params, taps, truth=truth, is_right=right),
            )
            with LLM(live, draft=name, num_draft_tokens=length, **options) as drafted:
                for _ in range(3):  # what is adapted has been measured then
                    assert seconds(drafted, prompt)[1] == answer
                of_plain, of_draft = take_turns([plain, drafted], prompt, rounds)
                stats = drafted.speculation_stats()
            row = {
                "head": kind,
                "num_draft_tokens": length,
                "rate": rate,
                "speedup": of_plain.whole / of_draft.whole,
                "after_first_token": of_plain.rest / of_draft.rest,
                "tokens_per_round": stats.mean_accepted_length,
                "round_over_step": of_draft.rest / of_plain.rest * stats.mean_accepted_length,
                "plain_ms_per_token": 1e3 * of_plain.rest / (ANSWER - 1),
            }
            rows.append(row)
            print(*(f"{k} {v:.3g}," if isinstance(v, float) else f"{k} {v}," for k, v in row.items()), flush=True)
    if length != "auto":
        cost = statistics.median(row["round_over_step"] for row in rows)
        for row in rows:
            row["of_expected"] = row["after_first_token"] / (row["tokens_per_round"] / cost)
        shares = ", ".join(f"{row['of_expected']:.2f}" for row in rows)
        print(f"a round takes {cost:.2f} steps; speed over tokens a round / this: {shares}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantized", action="store_true", help="the model's own 4-bit blocks, not float32")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine; default: %(default)s")
    parser.add_argument("--heads", default=f"eagle3,{BLOCK}", help="none with an empty text; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    verifying = measure_verifying(arguments.rounds, quantized=arguments.quantized)
    print(f"verifying {verifying['rows']} rows takes {verifying['round_over_step']:.2f} steps", flush=True)
    rows = [
        row
        for kind in filter(None, arguments.heads.split(","))
        for length in (LENGTH, "auto")
        for row in measure(kind, arguments.rounds, length, quantized=arguments.quantized)
    ]
    if arguments.json is not None:
        figures = {"machine": machine(), "quantized": arguments.quantized, "verifying": verifying, "rows": rows}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
