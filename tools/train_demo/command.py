"""`python -m tools.train_demo`: trains the two embedded models again, on Python's standard library."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.checks import need_plotting
from jaxinfer.cli.command import command, resumes
from jaxinfer.cli.distill import figures
from jaxinfer.cli.main import app
from jaxinfer.cli.names import NamedCommand
from jaxinfer.cli.options import as_json, overwrite
from jaxinfer.cli.output import write_json, write_text
from jaxinfer.cli.training_data import writer
from jaxinfer.options import option
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.models import ModelConfig, Params
    from jaxinfer.training.distill import DistillOptions, DistillResult
    from tools.train_demo.training import DemoData, DemoModel, TrainingPhase

NAMES = ("demo", "demo-draft")
START = "demo-draft-start"
DRAFT_ORIGIN = """\
First trained as a model of 2 layers, 128 wide, on the Python standard library like `demo` (PSF License Agreement); then
extended by heads that copy earlier text (`jaxinfer/training/copying.py`) and distilled.
`python -m tools.train_demo` makes it.

"""
# The model knows no roles, only Python: a user message becomes a comment, and the answer is the code below it.
CHAT_TEMPLATE = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{{ message.content }}
{% else %}
# {{ message.content | replace('\\n', '\\n# ') }}
{% endif %}
{% endfor %}
"""


@dataclass(frozen=True, kw_only=True)
class TrainDemoOptions:
    work_dir: Path = option(
        Path("demo-training"),
        "Folder for the tokenizer and training checkpoints, from which a later run continues.",
        "PATH",
    )
    out: Path | None = option(None, "Folder for the two models. Default: inside this package.", "PATH")
    steps: int | None = option(None, "Training steps of the model. Default: its own number.", "N", min=1)
    draft_steps: int | None = option(None, "Distillation steps of the draft. Default: its own number.", "N", min=1)
    overwrite: bool = overwrite("Replace existing models.")
    as_json: bool = as_json("One JSON object.")


def register() -> None:
    """Makes `train-demo` a command of `jaxinfer` in this process."""
    app.command("train-demo", cls=NamedCommand)(command(train_demo))


def train_demo(options: TrainDemoOptions) -> None:
    """Train the embedded models again.

    They are trained on the source of the Python standard library, which every machine has. It takes hours on a CPU; an
    interrupted run continues when it is repeated.
    """
    import jaxinfer.data

    out_dir = options.out or Path(jaxinfer.data.__file__).parent
    with resumes("from the last training checkpoint"), Stage("training the demo"):
        target, draft = export_pair(
            options.work_dir, out_dir, options.steps, options.draft_steps, overwrite=options.overwrite
        )
    models = [
        {
            "name": NAMES[0],
            "path": out_dir / NAMES[0],
            "num_steps": target.options.num_steps,
            "num_train_tokens": target.num_train_tokens,
            "held_out_loss": target.held_out_loss,
        },
        {
            "name": NAMES[1],
            "path": out_dir / NAMES[1],
            "num_steps": draft_options(options.draft_steps).num_steps,
            **figures(draft.after),
        },
    ]
    if options.as_json:
        write_json({"models": models})
        return
    first, second = models
    loss = f"held-out loss {first['held_out_loss']:.3f} nats per token"
    write_text(f"{first['path']}: {first['num_steps']} steps, {loss}\n")
    accepted = f"{second['acceptance']:.1%} of its proposals accepted"
    write_text(f"{second['path']}: {second['num_steps']} steps, {accepted}\n")


def export_pair(
    work_dir: Path, out_dir: Path, target_steps: int | None, draft_steps: int | None, *, overwrite: bool = False
) -> "tuple[DemoModel, DistillResult]":
    """Trains the model and distils its draft, or continues an interrupted run; writes both below `out_dir`.

    Raises, before anything is trained, FileExistsError if a model exists, ImportError without matplotlib.
    """
    from jaxinfer.api.llm import LLM
    from tools.train_demo import training

    need_plotting("a model card")  # after hours of training
    # Of a run that was killed while it wrote the two models: the first one may be there.
    claim = out_dir / ".publishing"
    overwrite |= claim.exists()
    _check_free(out_dir, overwrite=overwrite)
    data = training.load_data(work_dir)
    target = training.train_model(
        NAMES[0], training.TARGET, scaled(training.TARGET_PHASES, target_steps), data, work_dir
    )
    start = training.train_model(START, training.DRAFT_START, training.DRAFT_PHASES, data, work_dir)
    export_model(target, data, work_dir, work_dir / "export" / NAMES[0], overwrite=True)
    options = draft_options(draft_steps)
    with LLM(work_dir / "export" / NAMES[0], max_model_len=options.length) as llm:
        generate = writer(llm)
        draft = training.distill_draft(
            llm.config, llm.params, start, data.documents, generate, options, work_dir / NAMES[1]
        )  # fmt: skip
    _check_free(out_dir, overwrite=overwrite)
    out_dir.mkdir(parents=True, exist_ok=True)
    claim.touch()
    export_model(target, data, work_dir, out_dir / NAMES[0], overwrite=True)
    export_draft(draft, options, data, work_dir, out_dir / NAMES[1], overwrite=True)
    claim.unlink()
    return target, draft


def _check_free(out_dir: Path, *, overwrite: bool) -> None:
    for name in NAMES:
        if (out_dir / name).exists() and not overwrite:
            raise FileExistsError(f"{out_dir / name} exists: --overwrite replaces it")


def draft_options(num_steps: int | None) -> "DistillOptions":
    """The embedded draft's distillation, with another number of steps unless that is None."""
    from tools.train_demo.training import DISTILLATION

    return DISTILLATION if num_steps is None else replace(DISTILLATION, num_steps=num_steps)


def export_draft(
    draft: "DistillResult",
    options: "DistillOptions",
    data: "DemoData",
    work_dir: Path,
    destination: Path,
    *,
    overwrite: bool,
) -> None:
    """Writes the draft, as `export_model` writes the model."""
    from jaxinfer.training.card import write_draft_card

    card = _empty_folder(work_dir / "card" / destination.name)
    write_draft_card(card, "MODEL_CARD.md", NAMES[0], draft, options, DRAFT_ORIGIN)
    _save(draft.config, draft.params, data, work_dir, card, destination, overwrite=overwrite)


def export_model(model: "DemoModel", data: "DemoData", work_dir: Path, destination: Path, *, overwrite: bool) -> None:
    """Writes the model in bfloat16 with its tokenizer, in Hugging Face's format."""
    from tools.train_demo.card import write_card

    card = _empty_folder(work_dir / "card" / destination.name)
    write_card(card, model, data)
    _save(model.config, model.result.params, data, work_dir, card, destination, overwrite=overwrite)


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _save(
    config: "ModelConfig",
    params: "Params",
    data: "DemoData",
    work_dir: Path,
    card: Path,
    destination: Path,
    *,
    overwrite: bool,
) -> None:
    """Writes the model, with its card from the folder `card`, so that it appears complete."""
    import checkpoints_convert
    from tools.train_demo.training import END_OF_TEXT, PAD

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
        config,
        params,
        destination,
        dtype="bfloat16",
        extra_files=[
            *(work_dir / name for name in ("tokenizer.json", "chat_template.jinja", *files)),
            *sorted(card.iterdir()),
        ],
        extra_config={"eos_token_id": end, "pad_token_id": pad},
        overwrite=overwrite,
    )


def scaled(phases: "tuple[TrainingPhase, ...]", num_steps: int | None) -> "tuple[TrainingPhase, ...]":
    """The phases with `num_steps` steps in total, in the same proportions; None leaves them unchanged."""
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
