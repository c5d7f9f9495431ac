"""Prints the README's examples again and puts them where they belong: `make readme`.

Each block stands between `<!-- NAME -->` and `<!-- /NAME -->`. The speed table comes from the newest `make bench`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "benchmarks" / "results" / "decode_vs_transformers.json"
PROMPTS = (
    "def read_lines(path):",
    "def __repr__(self):",
    "async def connect(host, port):",
    "def close(self):",
    "def __enter__(self):",
)


def jaxinfer(*arguments: str) -> str:
    command = [sys.executable, "-m", "jaxinfer.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def completions() -> str:
    blocks = []
    for prompt in PROMPTS:
        answer = json.loads(
            jaxinfer("generate", prompt, "--model", "demo", "--seed", "0", "--max-tokens", "60", "--json")
        )
        text = answer["prompt"] + answer["outputs"][0]["text"]
        blocks.append("```python\n" + text.rstrip() + "\n```")
    return "\n\n".join(blocks)


def demo() -> str:
    return "```\n" + jaxinfer("demo").rstrip() + "\n```"


def bench() -> str:
    report = json.loads(BENCH.read_text(encoding="utf-8"))
    rows = ["| system | tokens/s | slowest, fastest | peak memory |", "| --- | --- | --- | --- |"]
    for name, row in report["systems"].items():
        spread = f"{row['slowest']:.1f}, {row['fastest']:.1f}"
        memory = f"{row['peak_rss_bytes'] / 2**30:.2f} GiB"
        rows.append(f"| {name} | {row['tokens_per_second']:.1f} | {spread} | {memory} |")
    return "\n".join([*rows, "", f"That is {report['ratio']:.2f} times the best Transformers mode."])


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, make in (("demo", demo), ("completions", completions), ("bench", bench)):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no block <!-- {name} -->")
        block = make()
        text = pattern.sub(lambda match, block=block: match[1] + block + match[2], text)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
