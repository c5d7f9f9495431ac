"""What structured output costs: answers under tables and under masks from the host against free ones, in turn.

    python -m benchmarks.structured [--rounds 5] [--large | --model smollm2] [--against-host] [--json FILE]

Prints tokens per second of 16 answers, free and constrained, greedy and sampled; of compact objects whose forced text
is drafted, against one step at a time; and of a free answer beside constrained ones. Tokens of all ways are compared.
`--large` takes a random model of 131,072 tokens in place of the embedded one. `--against-host` compares tables with
masks from the host alone: at 1 and 16 rows, without drafts and with n-grams, a regular expression and a schema, and
how long each grammar takes before its first token. Exits with 1 if a bound does not hold.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import ModelConfig, RopeConfig, init_params

Line = tuple[str, dict[str, float], float | None]

MIN_TABLES, MIN_HOST, MIN_FORCED = 0.95, 0.6, 1.5
NUM_ROWS, NUM_TOKENS = 16, 128
WORDS = {"regex": r"([a-z_]+[ \n=(),.:])+"}
OBJECT = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "customer_age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_subscribed": {"type": "boolean"},
        "preferred_color": {"enum": ["red", "green", "blue"]},
        "account_balance": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "additionalProperties": False,
}
OBJECT["required"] = list(OBJECT["properties"])
LARGE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=131072,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rope=RopeConfig(rotary_dim=64),
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def large_tokenizer(folder: Path) -> Path:
    """Writes a byte-level BPE tokenizer of 131,072 tokens: bytes, and words of up to four letters."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = [*map(chr, visible), *(chr(256 + place) for place in range(len(hidden)))]
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts, merges = [*alphabet], []
    last = list(letters)
    while len(texts) < 131071:
        pairs = [(begun, letter) for begun in last for letter in letters][: 131071 - len(texts)]
        merges += [f"{begun} {letter}" for begun, letter in pairs]
        last = [begun + letter for begun, letter in pairs]
        texts += last
    model = {"type": "BPE", "vocab": {text: place + 1 for place, text in enumerate(texts)}, "merges": merges}
    model["vocab"]["<end>"] = 0
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": 0, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec = {"version": "1.0", "model": model, "pre_tokenizer": byte_level, "decoder": byte_level}
    spec["added_tokens"] = [{**end, **flags}]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def requests(structured, **params) -> list[SamplingParams]:
    return [SamplingParams(seed=number, structured=structured, **params) for number in range(NUM_ROWS)]


def generate(llm: LLM, params: list[SamplingParams]) -> tuple[list[list[int]], float]:
    """Tokens, and tokens per second."""
    start = time.perf_counter()
    outputs = llm.generate([f"def f{number}(x):\n" for number in range(len(params))], params)
    seconds = time.perf_counter() - start
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, sum(map(len, tokens)) / seconds


def compare(ways: dict[str, Callable[[], tuple[list[list[int]], float]]], rounds: int, same: list[str]) -> dict:
    """Medians of each way's figure, measured in turn; the tokens of those in `same` must agree."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        found = {name: way() for name, way in ways.items()}
        for name, (tokens, figure) in found.items():
            figures[name].append(figure)
            if name in same and tokens != found[same[0]][0]:
                raise RuntimeError(f"{name} and {same[0]} gave other tokens")
    return {name: statistics.median(values) for name, values in figures.items()}


def time_per_token(llm: LLM, others) -> tuple[list[list[int]], float]:
    """A free answer beside 15 others: its tokens, and its tokens per second after the first."""
    params = [*requests(others, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.8)]
    params[0] = replace(params[0], structured=None)
    first = llm.generate([f"def f{number}(x):\n" for number in range(NUM_ROWS)], params)[0]
    assert first.timings is not None
    return [first.outputs[0].token_ids], 1 / first.timings.time_per_output_token


def measure(open_llm: Callable[..., LLM], rounds: int) -> Iterator[Line]:
    """A name, figures, and the bound of the second to the first."""
    tables, host = open_llm(max_seqs=NUM_ROWS), open_llm(max_seqs=NUM_ROWS, grammar_memory=0)
    with tables, host:
        for llm in (tables, host):
            llm.warm_up()
        for temperature in (0.0, 0.8):
            length = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "temperature": temperature}
            free, words = requests(None, **length), requests(WORDS, **length)
            wait_for_tables(tables, words)
            ways = {
                "free": lambda free=free: generate(tables, free),
                "tables": lambda words=words: generate(tables, words),
                "masks from the host": lambda words=words: generate(host, words),
            }
            found = compare(ways, rounds, ["tables", "masks from the host"])
            name = "greedy" if temperature == 0 else f"temperature {temperature}"
            yield f"{name}: tables", {key: found[key] for key in ("free", "tables")}, MIN_TABLES
            yield f"{name}: host", {key: found[key] for key in ("free", "masks from the host")}, MIN_HOST
        beside = {"beside free": lambda: time_per_token(tables, None)}
        beside["beside constrained"] = lambda: time_per_token(tables, WORDS)
        yield "a free answer", compare(beside, rounds, list(beside)), None
    stepwise = open_llm(max_seqs=1, steps_per_dispatch=1)
    forced = open_llm(max_seqs=1, draft="ngram", num_draft_tokens=7)
    with stepwise, forced:
        params = [replace(requests({"json": OBJECT}, max_tokens=120)[0], temperature=0.8)]
        for llm in (stepwise, forced):
            llm.warm_up()
            wait_for_tables(llm, params)
        ways = {"one step at a time": lambda: generate(stepwise, params), "drafted": lambda: generate(forced, params)}
        yield "forced text", compare(ways, rounds, list(ways)), MIN_FORCED


def compare_with_host(open_llm: Callable[..., LLM], rounds: int) -> Iterator[Line]:
    """As `measure`."""
    for draft in (None, "ngram"):
        options = {"max_seqs": NUM_ROWS, "draft": draft}
        tables, host = open_llm(**options), open_llm(**options, grammar_memory=0)
        with tables, host:
            engines = {"tables": tables, "masks from the host": host}
            for llm in engines.values():
                llm.warm_up()
            for kind, structured in (("words", WORDS), ("an object", {"json": OBJECT})):
                params = requests(structured, max_tokens=NUM_TOKENS, temperature=0.8)
                first = {key: generate(llm, params[:1])[1] for key, llm in engines.items()}
                name = f"{kind}, {draft or 'no'} draft"
                yield f"{name}, first answer", first, None
                wait_for_tables(tables, params)
                for rows in (1, NUM_ROWS):
                    some = params[:rows]
                    ways = {key: lambda llm=llm, some=some: generate(llm, some) for key, llm in engines.items()}
                    yield f"{name}, {rows} rows", compare(ways, rounds, list(ways)), None


def wait_for_tables(llm: LLM, params: list[SamplingParams]) -> None:
    for one in params[:1]:
        grammar = llm.client.prepare("x", one).grammar
        if grammar is None or grammar.wait() is None:
            raise RuntimeError("there is no table")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--large", action="store_true", help="a random model of 131,072 tokens")
    which.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--against-host", action="store_true", help="tables and masks from the host alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, more = options.model, {}
        if options.large:
            model = LARGE, init_params(LARGE, jax.random.key(0))
            more = {"tokenizer": large_tokenizer(Path(folder)), "max_model_len": 512}
        ways, failed, lines = compare_with_host if options.against_host else measure, 0, []
        for name, figures, bound in ways(lambda **own: LLM(model, **{**more, **own}), options.rounds):
            first, second = figures.values()
            is_kept = bound is None or second / first >= bound
            failed += not is_kept
            shown = ", ".join(f"{key} {figure:,.0f}" for key, figure in figures.items())
            wanted = "" if bound is None else f" (bound {bound}{'' if is_kept else ': FAILED'})"
            print(f"{name}: {shown} tokens/s: {second / first:.3f}{wanted}", flush=True)
            lines.append({"name": name, "figures": figures, "bound": bound})
    if options.json is not None:
        options.json.write_text(json.dumps(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
