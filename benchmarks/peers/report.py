"""The figures as Markdown: what `make bench` prints, and the README and docs/speed.md show."""

from typing import Any

from benchmarks.peers.workload import TITLES

NAMES = {
    "jaxinfer": "jaxinfer",
    "jaxinfer_draft": "jaxinfer, draft model",
    "jaxinfer_ngram": "jaxinfer, n-grams",
    "transformers_eager": "Transformers, eager",
    "transformers_static": "Transformers, static cache",
    "transformers_compiled": "Transformers, compiled",
    "transformers_continuous": "Transformers, continuous batching",
    "transformers_assisted": "Transformers, assisted",
    "transformers_lookup": "Transformers, prompt lookup",
    "llama_cpp": "llama.cpp",
    "easydel": "EasyDeL",
    "vllm": "vLLM",
}
MAIN = ("decode", "mixed8", "mixed32", "prefill", "first")
FAMILIES = {"transformers": "Transformers' best", "llama": "llama.cpp", "easydel": "EasyDeL", "vllm": "vLLM"}


def to_markdown(report: dict[str, Any]) -> str:
    """Tables of the random model and of the embedded pair, the ratios, and how many tokens agree."""
    parts = [_table(report["systems"]), _ratios(report["ratios"])]
    if pair := _pair(report["systems"]):
        parts.append(pair)
    if agreement := _agreement(report["equal_tokens"].get("jaxinfer", {})):
        parts.append(agreement)
    absent = {**report["skipped"], **{name: f"failed: {why}" for name, why in report["failed"].items()}}
    if absent:
        parts.append("Not in this run: " + "; ".join(f"{NAMES[name]} ({why})" for name, why in absent.items()) + ".")
    return "\n\n".join(parts)


def _table(systems: dict[str, Any]) -> str:
    shown = [name for name in MAIN if any(name in row for row in systems.values())]
    rows = [
        "| system | "
        + " | ".join(TITLES[name] for name in shown)
        + " | start, s | second start, s | peak memory, GiB |"
    ]
    rows.append("| --- |" + " ---: |" * (len(shown) + 3))
    for name, row in systems.items():
        if not any(measure in row for measure in MAIN):
            continue
        cells = [f"{row[one]['median']:.{2 if one == 'first' else 1}f}" if one in row else "" for one in shown]
        again = row.get("second_start_seconds", row["start_seconds"])
        cells += [f"{row['start_seconds']:.1f}", f"{again:.1f}", f"{row['peak_rss_bytes'] / 2**30:.2f}"]
        rows.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _ratios(found: list[dict[str, Any]]) -> str:
    if not found:
        return "Nothing to compare with."
    shown = []
    for row in found:
        family = FAMILIES[row["over"].split("_")[0]]
        goal = f" (goal {row['goal']}x)" if "goal" in row else ""
        shown.append(f"{row['measure']} {row['ratio']:.2f}x {family}{goal}")
    return "jaxinfer: " + "; ".join(shown) + "."


def _pair(systems: dict[str, Any]) -> str:
    rows = [(name, row["pair"]) for name, row in systems.items() if "pair" in row]
    if not rows:
        return ""
    plain = {name.split("_")[0]: row["pair"]["median"] for name, row in systems.items() if _is_plain(name, row)}
    lines = [f"| {TITLES['pair']} | median | over the same system's plain decoding |", "| --- | ---: | ---: |"]
    for name, row in rows:
        base = plain.get(name.split("_")[0])
        ratio = f"{row['median'] / base:.2f}x" if base and not _is_plain(name, systems[name]) else ""
        lines.append(f"| {NAMES[name]} | {row['median']:.1f} | {ratio} |")
    return "\n".join(lines)


def _is_plain(name: str, row: dict[str, Any]) -> bool:
    return "pair" in row and name in ("jaxinfer", "transformers_eager", "llama_cpp")


def _agreement(found: dict[str, dict[str, int]]) -> str:
    if not found:
        return ""
    shown = ", ".join(f"{name} {row['equal']:,} of {row['tokens']:,}" for name, row in found.items())
    return f"Greedy tokens of jaxinfer up to the first that is not Transformers' (near-ties may differ): {shown}."
