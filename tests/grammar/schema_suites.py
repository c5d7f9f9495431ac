"""Suites of JSON schemas of other projects, run against what serves schemas here; they are read, never kept here.

JSON-Schema-Test-Suite (github.com/json-schema-org), draft 2020-12: JSON_SCHEMA_TEST_SUITE names its folder.
JSONSchemaBench's maskbench (github.com/guidance-ai/jsonschemabench): MASKBENCH names its folder `maskbench/data`.

`python -m tests.grammar.schema_suites` prints what the suites say; `--write` keeps the verdicts on the first one in
schema_verdicts.json: the names of its cases and of its tests, each `pass`, `refused` (the schema, with an error),
`narrower` (a value that matches is refused) or `wrong` (one that does not match is let through).
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
from jsonschema.validators import validator_for

from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.compiler import read
from jaxinfer.grammar.nodes import TooLargeError
from jaxinfer.grammar.structured import StructuredOutputs

VERDICTS = Path(__file__).with_name("schema_verdicts.json")
MAX_SPELLINGS = 200
Accepts = Callable[[str], bool]


@functools.cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """One token for each byte."""

    class Wrapped:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
        special_token_ids = (256,)

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))


def by_llguidance(grammar: str) -> Accepts:
    """Raises ValueError if llguidance refuses the grammar."""
    matcher = llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error().split("<backtrace>")[0][:300])

    def accepts(text: str) -> bool:
        tokens = list(text.encode())
        matcher.reset()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts


def served(schema: Any) -> tuple[Accepts, Accepts | None]:
    """What masks from the host accept, and what the automaton of a table accepts, if there is one.

    Raises ValueError if the schema is refused.
    """
    if isinstance(schema, bool):
        raise ValueError("a schema must be an object")
    language, grammar = read(StructuredOutputs(json=json.dumps(schema)))
    accepts = by_llguidance(grammar)
    if language is None:
        return accepts, None
    try:
        automaton = build_automaton(language)
    except TooLargeError:
        return accepts, None
    return accepts, lambda text: automaton.accepts(text.encode())


def spellings(value: Any, ranks: Mapping[str, int] | None = None) -> Iterator[str]:
    """Compact JSON texts of a value: its numbers without exponents, integers as digits, its objects in every order.

    With ranks of names: only in the given order, and in the order of the ranks.
    """
    return itertools.islice(_spellings(value, ranks), MAX_SPELLINGS)


def _spellings(value: Any, ranks: Mapping[str, int] | None) -> Iterator[str]:
    if isinstance(value, dict):
        if ranks is not None:
            orders = dict.fromkeys((tuple(value), tuple(sorted(value, key=lambda name: ranks.get(name, len(ranks))))))
        else:
            orders = itertools.permutations(value) if len(value) <= 5 else [tuple(value)]
        inner = {name: list(spellings(child, ranks)) for name, child in value.items()}
        for order in orders:
            for texts in itertools.product(*(inner[name] for name in order)):
                names = (json.dumps(name, ensure_ascii=False) for name in order)
                yield "{" + ",".join(f"{name}:{text}" for name, text in zip(names, texts, strict=True)) + "}"
    elif isinstance(value, list):
        for texts in itertools.product(*(list(spellings(child, ranks)) for child in value)):
            yield "[" + ",".join(texts) + "]"
    else:
        if isinstance(value, float):
            yield str(int(value)) if value == int(value) else f"{Decimal(repr(value)):f}"
        yield json.dumps(value, ensure_ascii=False)


def ranks_of(schema: Any) -> dict[str, int]:
    """The names of all properties of a schema, in order."""
    names: dict[str, None] = {}
    stack = [schema]
    while stack:
        top = stack.pop()
        if isinstance(top, dict):
            properties = top.get("properties")
            names |= dict.fromkeys(properties if isinstance(properties, dict) else ())
        if isinstance(top, dict | list):
            stack += reversed(list(top.values() if isinstance(top, dict) else top))
    return {name: rank for rank, name in enumerate(names)}


def verdict(
    ways: tuple[Accepts, Accepts | None], value: Any, *, is_valid: bool, ranks: Mapping[str, int] | None = None
) -> str:
    """The worst of masks from the host and table."""
    found = "pass"
    for accepts in ways:
        if accepts is not None and any(accepts(text) for text in spellings(value, ranks)) != is_valid:
            found = "narrower" if is_valid else "wrong"
    return found


def suite_verdicts(folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Verdicts by file, case and test. Formats are checked where the suite's own folder for that says so."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    root = folder / "tests/draft2020-12"
    for path in sorted(root.rglob("*.json")):
        verdicts = found[path.relative_to(root).as_posix()] = {}
        for case in json.loads(path.read_text(encoding="utf-8")):
            try:
                ways = served(case["schema"])
            except ValueError:
                verdicts[case["description"]] = {test["description"]: "refused" for test in case["tests"]}
                continue
            verdicts[case["description"]] = {
                test["description"]: verdict(ways, test["data"], is_valid=test["valid"]) for test in case["tests"]
            }
    return found


def maskbench_report(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """What is served of `count` schemas, chosen by a seed, and whether it is served rightly.

    A test of maskbench counts if the `jsonschema` package agrees with it.
    """
    names = sorted(path.name for path in folder.glob("*.json"))
    report: dict[str, Any] = collections.Counter()
    wrong: list[str] = []
    for name in random.Random(seed).sample(names, min(count, len(names))):
        bench = json.loads((folder / name).read_text(encoding="utf-8"))
        schema = bench["schema"]
        report["schemas"] += 1
        try:
            by_llguidance(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
            report["accepted by llguidance alone"] += 1
        except ValueError:
            pass
        start = time.process_time()
        try:
            ways = served(schema)
        except ValueError:
            continue
        report["slowest, CPU ms"] = max(report["slowest, CPU ms"], round((time.process_time() - start) * 1e3))
        report["accepted"] += 1
        report["served by a table"] += ways[1] is not None
        judge = validator_for(schema, jsonschema.Draft202012Validator)(schema)
        for index, test in enumerate(bench["tests"]):
            try:
                if judge.is_valid(test["data"]) != test["valid"]:
                    report["tests that the judge disputes"] += 1
                    continue
            except Exception:
                report["tests that the judge cannot read"] += 1
                continue
            found = verdict(ways, test["data"], is_valid=test["valid"], ranks=ranks_of(schema))
            if found == "pass":
                report["valid accepted" if test["valid"] else "invalid refused"] += 1
            else:
                wrong.append(f"{name} test {index}: {found}, {'table' if ways[1] else 'no table'}")
    return {**report, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    if folder := os.environ.get("JSON_SCHEMA_TEST_SUITE"):
        verdicts = suite_verdicts(Path(folder))
        for place, kinds in each_test(verdicts):
            if kinds in ("wrong", "narrower"):
                print(kinds, *place, sep=" | ")
        print(dict(collections.Counter(kind for _, kind in each_test(verdicts))), flush=True)
        if options.write:
            VERDICTS.write_text(json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if folder := os.environ.get("MASKBENCH"):
        report = maskbench_report(Path(folder), options.count, options.seed)
        print("\n".join(report.pop("wrong")))
        print(json.dumps(report, indent=1))


def each_test(verdicts: dict[str, dict[str, dict[str, str]]]) -> Iterator[tuple[tuple[str, str, str], str]]:
    for file, cases in verdicts.items():
        for case, tests in cases.items():
            for test, verdict in tests.items():
                yield (file, case, test), verdict


if __name__ == "__main__":
    main()
