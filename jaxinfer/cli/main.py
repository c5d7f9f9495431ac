"""The `jaxinfer` command: its subcommands in groups, its version, its entry point."""

import atexit
import gc
import sys
from typing import Annotated

import typer

from jaxinfer import __version__
from jaxinfer.cli.advise import advise
from jaxinfer.cli.batch import batch
from jaxinfer.cli.bench import app as bench_app
from jaxinfer.cli.chat import chat
from jaxinfer.cli.command import command, ends_on_sigterm
from jaxinfer.cli.convert import convert
from jaxinfer.cli.demo import demo
from jaxinfer.cli.distill import distill
from jaxinfer.cli.doctor import doctor
from jaxinfer.cli.fleet import app as fleet_app
from jaxinfer.cli.front import front
from jaxinfer.cli.generate import generate
from jaxinfer.cli.kv_report import kv_report
from jaxinfer.cli.models import models
from jaxinfer.cli.names import NamedCommand, NamedGroup
from jaxinfer.cli.plan import plan
from jaxinfer.cli.profile import profile
from jaxinfer.cli.pull import pull
from jaxinfer.cli.quantize import quantize
from jaxinfer.cli.replay import replay, verify_answer
from jaxinfer.cli.run import run
from jaxinfer.cli.score import score
from jaxinfer.cli.serve import serve
from jaxinfer.cli.served import ps, stop
from jaxinfer.cli.speculate_report import speculate_report
from jaxinfer.cli.store import copy, create, disk, list_, remove, show
from jaxinfer.cli.train_head import train_head
from jaxinfer.cli.verify import verify
from jaxinfer.cli.warm import warm

# Blank lines between the examples, since rich joins adjacent lines.
EXAMPLES = """\
[bold]Examples[/bold]

jaxinfer demo

jaxinfer run user/model

jaxinfer generate "def read_lines(path):" --model demo --max-tokens 64

jaxinfer generate --model ./checkpoint --file prompts.txt --json > answers.jsonl

jaxinfer batch requests.jsonl answers.jsonl --model ./checkpoint

jaxinfer replay answers.jsonl --model ./checkpoint

jaxinfer chat ./checkpoint --temperature 0.7

jaxinfer serve ./checkpoint --port 8000

jaxinfer convert ./checkpoint ./converted

jaxinfer verify ./converted --against ./checkpoint

jaxinfer quantize ./checkpoint ./int4 --bits 4 --calibration texts.txt

jaxinfer advise ./checkpoint --goal latency

jaxinfer plan ./checkpoint --on v5e:2x2 --quantize int8

jaxinfer fleet simulate --trace trace.csv --model ./checkpoint --on v6e:2x4 --replicas 2..64

jaxinfer train-head ./checkpoint --prompts prompts.txt --out ./head

jaxinfer distill ./checkpoint --data ./texts --out ./draft

[bold]Exit codes[/bold]

0 success · 1 error · 2 wrong usage · 3 some prompts or rows failed · 130 interrupted · 143 terminated

An error is one sentence; JAXINFER_TRACEBACK=1 shows where in the code. --no-progress, of every command, omits bars, and
lines in a log. Flags of vLLM, SGLang, mlx-lm, Ollama and Transformers, such as --tensor-parallel-size and
--max-new-tokens, are applied where they mean the same.
"""

app = typer.Typer(
    name="jaxinfer",
    cls=NamedGroup,
    help="LLM inference in JAX: load a checkpoint, generate, chat, score.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

GROUPS = {
    "Generate": {"demo": demo, "run": run, "generate": generate, "batch": batch, "chat": chat, "score": score}
    | {"replay": replay, "verify-answer": verify_answer, "serve": serve, "front": front, "ps": ps, "stop": stop},
    "Models": {"pull": pull, "list": list_, "show": show, "create": create, "cp": copy, "rm": remove, "disk": disk},
    "Checkpoints": {"models": models, "convert": convert, "verify": verify, "quantize": quantize},
    "Planning": {"advise": advise, "plan": plan, "kv-report": kv_report, "warm": warm},
    "Speculation": {"speculate-report": speculate_report, "train-head": train_head, "distill": distill},
    "This machine": {"profile": profile, "doctor": doctor},
}
for group, commands in GROUPS.items():
    for name, function in commands.items():
        app.command(name, cls=NamedCommand, rich_help_panel=group)(command(function))
app.add_typer(bench_app, name="bench", rich_help_panel="This machine")
app.add_typer(fleet_app, name="fleet", rich_help_panel="Generate")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"jaxinfer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `jaxinfer` script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # other encodings than UTF-8 show escapes instead of failing
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # Importing and tracing create a million objects and little garbage. With Python's default thresholds, collecting
    # takes a tenth of the start time, and the final collection as long again.
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
    with ends_on_sigterm():
        app(prog_name="jaxinfer")
