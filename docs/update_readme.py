"""Writes the printed examples and the tables of the README and docs/ again: `make readme`.

Each block stands between `<!-- NAME -->` and `<!-- /NAME -->`. Figures come from benchmarks/results.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for benchmarks, which are not installed
BENCH = ROOT / "benchmarks" / "results" / "peers.json"
REAL = ROOT / "benchmarks" / "results" / "real.json"
BATCHING = ROOT / "benchmarks" / "results" / "continuous_batching.json"
RATIOS = ROOT / "benchmarks" / "results" / "ratios.json"
SPECULATIVE = ROOT / "benchmarks" / "results" / "speculative.json"
KERNELS = ROOT / "benchmarks" / "results" / "kernels_compiled.json"
PROMPTS = (
    "def read_lines(path):",
    "def __repr__(self):",
    "async def connect(host, port):",
    "def close(self):",
    "def __enter__(self):",
)


def jaxinfer(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "jaxinfer.cli", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=variables).stdout


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
    """The first completion and the summary of `jaxinfer demo`, and how long a first and a second start take."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (jaxinfer("demo", JAXINFER_CACHE_DIR=folder).rstrip() for _ in range(2))
    text, times = first, [one.partition("\n")[0] for one in (first, second)]
    start = re.match(r".*? · ended by [a-z_]+\n", text, re.DOTALL)
    if start is None:
        raise SystemExit("jaxinfer demo printed no completion")
    summary = text.rpartition("\n\n")[2]
    starts = (
        f"The first start, with an empty compilation cache: `{times[0]}`. The second, which reads the compiled "
        f"programs: `{times[1]}`."
    )
    return f"```\n{start[0]}\n...\n\n{summary}\n```\n\n{starts}"


def bench() -> str:
    from benchmarks.peers.report import to_markdown

    return to_markdown(json.loads(BENCH.read_text(encoding="utf-8")))


def real() -> str:
    """What `make bench-real` measured."""
    from benchmarks.real.report import to_markdown

    return to_markdown(json.loads(REAL.read_text(encoding="utf-8")))


def real_ratios() -> str:
    from benchmarks.real.report import ratios

    return ratios(json.loads(REAL.read_text(encoding="utf-8")))


def ratios() -> str:
    report = json.loads(RATIOS.read_text(encoding="utf-8"))
    rows = ["| | before | after | ratio |", "| --- | ---: | ---: | ---: |"]
    for row in report["ratios"].values():
        before, after = (
            f"{row[side]:,.{2 if row['unit'] == 's' else 0}f} {row['unit']}" for side in ("before", "after")
        )
        rows.append(f"| {row['title']} | {before} | {after} | {row['ratio']:.2f}x |")
    return "\n".join([*rows, "", f"{report['num_cores']} cores, {report['rounds']} rounds, JAX {report['jax']}."])


def batching() -> str:
    report = json.loads(BATCHING.read_text(encoding="utf-8"))
    found, prefix = report["batching"], report["prefix"]
    rows = [
        "| | tokens/s | first token, p50 and p99 | per token, p50 and p99 |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in (("continuous", found["continuous"]), ("static", found["static"])):
        first = f"{row['first_token_p50']:.2f} s, {row['first_token_p99']:.2f} s"
        gap = f"{row['per_token_p50'] * 1e3:.0f} ms, {row['per_token_p99'] * 1e3:.0f} ms"
        rows.append(f"| {name} | {row['tokens_per_second']:.0f} | {first} | {gap} |")
    return "\n".join(
        [
            *rows,
            "",
            f"That is {found['ratio']:.1f} times the throughput; {found['page_waste']:.1%} of the pages is empty. "
            f"64 requests that share their first 1,000 tokens: {prefix['ratio']:.0f} times the prompt throughput of "
            "no reuse.",
        ]
    )


def speculation() -> str:
    report = json.loads(SPECULATIVE.read_text(encoding="utf-8"))
    rows = ["| draft | accepted | tokens a round | speedup, median | from, to |", "| --- | --- | --- | --- | --- |"]

    def add(name: str, row: dict) -> None:
        accepted, length = f"{row['acceptance_rate']:.0%}", f"{row['mean_accepted_length']:.1f}"
        spread = f"{row['slowest']:.2f}x, {row['fastest']:.2f}x"
        rows.append(f"| {name} | {accepted} | {length} | {row['speedup']:.2f}x | {spread} |")

    for length, row in report["pair"]["lengths"].items():
        add(f"`demo-draft`, {'adaptive' if length == 'auto' else length + ' tokens'}", row)
    add("n-grams on code edits", report["ngram"])
    add("n-grams on code edits, a model that copies", report["ngram_copying"])
    loads = ", ".join(f"{row['speedup']:.2f}x at {load}" for load, row in report["loads"].items())
    return "\n".join(
        [
            *rows,
            "",
            f"{report['num_files']} held-out Python files, greedy, {report['num_cores']} cores, JAX {report['jax']}. "
            f"With adaptive lengths and several answers at once: {loads}.",
        ]
    )


def kernels() -> str:
    """What `make report` compiled: a row for each chip, kernel, model and cache."""
    report = json.loads(KERNELS.read_text(encoding="utf-8"))
    rows = [
        "| chip | kernel | model | cache | by | compiled in s | on chip KiB | temporaries MiB "
        "| GFLOP | MB moved | ideal MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]

    def number(value: float | None, unit: float = 1, digits: int = 0) -> str:
        return "" if value is None else f"{value / unit:,.{digits}f}"

    for line in report["lines"]:
        cells = [line["chip"], line["kernel"], line["model"], line["cache"], line["implementation"]]
        cells += [number(line["seconds"], digits=1), number(line["on_chip_bytes"], 1024)]
        cells += [number(line["temporary_bytes"], 2**20, 1), number(line["gflops"])]
        cells += [number(line["bytes_moved"], 1e6), number(line["ideal_bytes"], 1e6)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, "", f"JAX {report['jax']}."])


def models() -> str:
    """What `jaxinfer models` lists."""
    rows = ["| family | architecture | examples | what sets it apart |", "| --- | --- | --- | --- |"]
    for family in json.loads(jaxinfer("models", "--json"))["families"]:
        architectures = "<br>".join(f"`{name}`" for name in family["architectures"])
        rows.append(
            f"| {family['title']} | {architectures} | {family['examples']} | {', '.join(family['differences'])} |"
        )
    return "\n".join(rows)


def short_names() -> str:
    """Names that stand for repositories of the hub."""
    from jaxinfer.store.library import short_names

    rows = ["| name | tags | the name alone is |", "| --- | --- | --- |"]
    for name, tags in sorted(short_names().items()):
        rows.append(f"| `{name}` | {', '.join(f'`{tag}`' for tag in tags)} | {next(iter(tags.values()))} |")
    return "\n".join(rows)


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """`jaxinfer serve` with these arguments, at port 8000, while the context is open; what it printed until it was
    ready."""
    command = [sys.executable, "-m", "jaxinfer.cli", "serve", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            if not re.match(r"compiling:|[\d-]+ [\d:,]+ INFO ", line):  # of an empty compilation cache, and of the log
                lines.append(line.rstrip())
            if line.startswith(("ready:", "error:")):
                break
        try:
            if not lines[-1].startswith("ready:"):
                raise SystemExit(lines[-1])
            yield "\n".join([" ".join(["$ jaxinfer serve", *arguments]), *lines])
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()


@contextlib.contextmanager
def hub_and_home() -> Iterator[str]:
    """A fake hub with the repository user/model, and an empty home folder, for processes that are started meanwhile."""
    sys.path.insert(0, str(ROOT))
    from tests.store.fake_hub import serving

    before = dict(os.environ)
    with serving() as hub, tempfile.TemporaryDirectory() as home:
        folder = ROOT / "jaxinfer" / "data" / "demo"
        hub.push("user/model", {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
        hub.repositories["user/model"].license = "apache-2.0"
        os.environ.update(HF_ENDPOINT=hub.url, HOME=home, HF_HUB_DISABLE_TELEMETRY="1")
        try:
            yield home
        finally:
            os.environ.clear()
            os.environ.update(before)


def store() -> str:
    """A model is pulled from a fake hub, named, used and removed."""
    answers = []
    with hub_and_home() as home:
        for command in (
            "jaxinfer pull user/model",
            "jaxinfer create coder --from user/model --quantize int8 --temperature 0",
            "jaxinfer list",
            "jaxinfer run coder 'def read_lines(path):' --max-tokens 24 --offline",
            "jaxinfer show coder",
            "jaxinfer rm user/model 2>&1",
            "jaxinfer rm coder user/model",
        ):
            answers.append(typed(command).replace(home, "~"))
    return "```\n" + "\n\n".join(answers) + "\n```"


def run() -> str:
    """An answer of the embedded model by its name."""
    command = "jaxinfer run demo 'Connect to a server' --max-tokens 40 --seed 1"
    return f"```\n{typed(command)}\n```"


CHAT = r"printf 'What is the capital of France?\nAnd of Italy?\n' | jaxinfer run smollm2"


def chat() -> str:
    """A chat with a published model, which `make models` fetched."""
    return f"```\n{typed(CHAT)}\n```"


def several_models() -> str:
    """A server of all stored models: two are used, shown and one is stopped."""
    ask = r"""curl -s http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
    -d '{"model": "%s", "prompt": "def read_lines(path):", "max_tokens": 20, "temperature": 0}' \
    | grep -oE '"text":"([^"\\]|\\.)*"'"""
    with hub_and_home() as home:
        lines = [typed("jaxinfer pull user/model"), typed("jaxinfer cp user/model coder")]
        with server() as start:
            lines += [start, typed(ask % "coder"), typed(ask % "demo")]
            lines += [typed("jaxinfer ps"), typed("jaxinfer stop demo"), typed("jaxinfer ps")]
        return "```\n" + "\n\n".join(lines).replace(home, "~") + "\n```"


def typed(command: str) -> str:
    """A command line as it was typed, and what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=variables, cwd=ROOT)
    lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]  # of tables
    return "\n".join([f"$ {command}", *lines])


COMPLETIONS = """curl -sN http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"prompt": "def read_lines(path):", "max_tokens": 12, "seed": 1, "stream": true}'"""
TEXTS = r""" \
    | grep -oE '^id: .*|"text":"([^"\\]|\\.)*"|\[DONE\]'"""


def serving_start() -> str:
    """The first lines of a server, and one answer."""
    ask = """curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Connect to a server"}], "max_tokens": 24, "seed": 1}' \\
    | python -m json.tool"""
    with server("demo") as start:
        return f"```\n{start}\n```\n\n```\n{typed(ask)}\n```"


def serve() -> str:
    """The same, in a few lines."""
    ask = r"""curl -s http://127.0.0.1:8000/v1/completions \
    -d '{"prompt": "def read_lines(path):", "max_tokens": 20, "temperature": 0}' \
    | grep -oE '"text":"([^"\\]|\\.)*"'"""
    with server("demo") as start:
        return f"```\n{start}\n```\n\n```\n{typed(ask)}\n```"


def serving_resume() -> str:
    """A stream that is cut after five events, and its rest."""
    with server("demo"):
        first = typed(COMPLETIONS + TEXTS + " | head -n 10")
        last = re.findall(r"^id: (.*)$", first, re.MULTILINE)[-1]
        rest = typed(COMPLETIONS + f" \\\n    -H 'last-event-id: {last}'" + TEXTS)
    return f"```\n{first}\n\n{rest}\n```"


def serving_load() -> str:
    command = "jaxinfer bench load --url http://127.0.0.1:8000 --rate 2,inf --requests 32 --prompt-tokens 16:128"
    with server("demo"):
        return f"```\n{typed(command + ' --answer-tokens 16:64 --goodput ttft:500,tpot:50 --no-progress')}\n```"


def fill(path: Path, blocks: dict[str, Callable[[], str]]) -> None:
    """Makes the named blocks of a document again."""
    text = path.read_text(encoding="utf-8")
    for name, make in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n?<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{path.name} has no block <!-- {name} -->")
        block = make()
        text = pattern.sub(lambda match, block=block: match[1] + block + "\n" + match[2].lstrip(), text)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """All blocks, or those named on the command line."""
    from benchmarks import gpu_resources, predicted_steps
    from benchmarks.quality import report as quality

    documents = {
        ROOT / "README.md": {"chat": chat, "serve": serve, "real_ratios": real_ratios},
        ROOT / "docs" / "models.md": {
            "store": store,
            "short_names": short_names,
            "models": models,
            "demo": demo,
            "run": run,
            "completions": completions,
        },
        ROOT / "docs" / "speed.md": {
            "real": real,
            "bench": bench,
            "ratios": ratios,
            "batching": batching,
            "speculation": speculation,
        },
        ROOT / "docs" / "quality.md": {
            "quality_weights": quality.weights,
            "quality_kv_dtypes": quality.kv_dtypes,
        },
        ROOT / "docs" / "planning.md": {"predicted_steps": predicted_steps.table},
        ROOT / "docs" / "kernels.md": {"kernels": kernels, "gpu_resources": gpu_resources.table},
        ROOT / "docs" / "serving.md": {
            "serving_start": serving_start,
            "several_models": several_models,
            "serving_resume": serving_resume,
            "serving_load": serving_load,
        },
    }
    for path, blocks in documents.items():
        fill(path, {name: make for name, make in blocks.items() if not sys.argv[1:] or name in sys.argv[1:]})


if __name__ == "__main__":
    main()
