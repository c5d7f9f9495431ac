"""`jaxinfer train-demo`: makes the embedded pair again, from this Python's standard library."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.output import write_json, write_text

if TYPE_CHECKING:
    from jaxinfer.training.demo import Data, DemoModel, Phase

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
# The model knows no roles, only Python: what a user says becomes a comment, what it answers is the code below.
CHAT_TEMPLATE = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{{ message.content }}
{% else %}
# {{ message.content | replace('\\n', '\\n# ') }}
{% endif %}
{% endfor %}
"""


def train_demo(
    work_dir: Annotated[
        Path,
        typer.Option(metavar="PATH", help="Keeps the tokenizer and training checkpoints; the next run goes on there."),
    ] = Path("demo-training"),
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder for the two models. Default: inside this package.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Training steps of the model. Default: its own number.")
    ] = None,
    draft_steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Training steps of its draft. Default: its own number.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace models that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object.")] = False,
) -> None:
    """Train the embedded models again.

    On the source of the Python standard library, which every machine has. It takes hours on a CPU; a run that was
    interrupted goes on when it is repeated.
    """
    import jaxinfer.data

    out_dir = out or Path(jaxinfer.data.__file__).parent
    pair = export_pair(work_dir, out_dir, steps, draft_steps, overwrite=overwrite)
    models = [
        {
            "name": model.name,
            "path": out_dir / model.name,
            "num_steps": model.options.num_steps,
            "num_train_tokens": model.num_train_tokens,
            "held_out_loss": model.held_out_loss,
        }
        for model in pair
    ]
    if as_json:
        write_json({"models": models})
        return
    for one in models:
        loss = f"held-out loss {one['held_out_loss']:.3f} nats per token"
        write_text(f"{one['path']}: {one['num_steps']} steps, {loss}\n")


def export_pair(
    work_dir: Path, out_dir: Path, target_steps: int | None, draft_steps: int | None, *, overwrite: bool = False
) -> "tuple[DemoModel, DemoModel]":
    """Trains both models, or finishes their training, and writes each as a checkpoint to `out_dir`/name.

    Raises, before anything is trained, FileExistsError if a model is there already, ImportError without matplotlib.
    """
    from jaxinfer.training import demo

    names = ("demo", "demo-draft")
    if importlib.util.find_spec("matplotlib") is None:  # hours before it is needed
        raise ImportError("the model cards need matplotlib: pip install 'jaxinfer[train]'")
    for name in names:
        if (out_dir / name).exists() and not overwrite:
            raise FileExistsError(f"{out_dir / name} exists: --overwrite replaces it")
    data = demo.load_data(work_dir)
    target = demo.train_model(names[0], demo.TARGET, scaled(demo.TARGET_PHASES, target_steps), data, work_dir)
    draft = demo.train_model(names[1], demo.DRAFT, scaled(demo.DRAFT_PHASES, draft_steps), data, work_dir)
    for model in (target, draft):
        export_model(model, data, work_dir, out_dir / model.name, overwrite=overwrite)
    return target, draft


def export_model(model: "DemoModel", data: "Data", work_dir: Path, destination: Path, *, overwrite: bool) -> None:
    """Writes one model in bfloat16 with its tokenizer, in the form of Hugging Face."""
    import checkpoints_convert
    from jaxinfer.training.card import write_card

    end, pad = data.tokenizer.token_to_id(END_OF_TEXT), data.tokenizer.token_to_id(PAD)
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.4,
            "top_p": 0.95,
            "repetition_penalty": 1.1,
            "max_new_tokens": 96,
            "eos_token_id": end,
            "pad_token_id": pad,
        },
    }
    for name, content in files.items():
        (work_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (work_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    destination.parent.mkdir(parents=True, exist_ok=True)
    checkpoints_convert.save_huggingface(
        model.config,
        model.result.params,
        destination,
        dtype="bfloat16",
        extra_files=[work_dir / name for name in ("tokenizer.json", "chat_template.jinja", *files)],
        extra_config={"eos_token_id": end, "pad_token_id": pad},
        overwrite=overwrite,
    )
    write_card(destination, model, data)


def scaled(phases: "tuple[Phase, ...]", num_steps: int | None) -> "tuple[Phase, ...]":
    """The phases with `num_steps` steps in all, shared out as they were; None leaves them."""
    total = sum(phase.num_steps for phase in phases)
    if num_steps is None:
        return phases
    ends = [round(num_steps * sum(phase.num_steps for phase in phases[: i + 1]) / total) for i in range(len(phases))]
    starts = [0, *ends[:-1]]
    return tuple(
        replace(phase, num_steps=end - start)
        for phase, start, end in zip(phases, starts, ends, strict=True)
        if end > start
    )
