"""Model cards: of an embedded model (data, steps, loss curve, held-out perplexity), and of a distilled draft."""

import importlib.util
import math
import platform
from pathlib import Path

import jax
import numpy as np

from jaxinfer.extras import install_hint
from jaxinfer.models import abstract_params
from jaxinfer.training.acceptance import NUM_DRAFT_TOKENS
from jaxinfer.training.corpus import HELD_OUT_IN
from jaxinfer.training.demo import CONTEXT, DemoData, DemoModel
from jaxinfer.training.distill import DistillOptions, DistillResult


def write_card(folder: Path, model: DemoModel, data: DemoData) -> None:
    """Writes MODEL_CARD.md and loss.png into `folder`."""
    plot_loss(folder / "loss.png", model)
    (folder / "MODEL_CARD.md").write_text(card_text(model, data), encoding="utf-8")


def card_text(model: DemoModel, data: DemoData) -> str:
    """Markdown; every figure comes from the run."""
    config = model.config
    num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))
    num_seen = sum(phase.num_tokens for phase in model.phases)
    bytes_per_token = data.held_out_bytes / len(data.held_out)
    bits_per_byte = model.held_out_loss / math.log(2) / bytes_per_token
    phases = "\n".join(
        f"| {number} | {phase.num_steps:,} | {phase.batch_size} x {phase.length} | {phase.num_tokens:,} |"
        for number, phase in enumerate(model.phases, 1)
    )
    return f"""# {model.name}

A small Llama that completes Python code. It exists so that jaxinfer runs, tests and shows itself without a download;
what it writes looks like Python and is not to be trusted as such.

| | |
| --- | --- |
| parameters | {num_params:,} (bfloat16) |
| layers, width, inner width | {config.num_layers}, {config.hidden_size}, {config.intermediate_size} |
| heads, key heads, head width | {config.num_heads}, {config.num_kv_heads}, {config.head_dim} |
| vocabulary | {config.vocab_size:,} byte-level BPE tokens, {bytes_per_token:.2f} bytes a token on held-out text |
| trained on sequences of | up to {CONTEXT} tokens |
| held-out loss | {model.held_out_loss:.3f} nats a token |
| held-out perplexity | {math.exp(model.held_out_loss):.1f} a token, {bits_per_byte:.2f} bits a byte |

## Data

The standard library of Python {platform.python_version()}, as installed: its .py files without tests, tables and
generated data, {model.num_train_tokens:,} tokens. One file in {HELD_OUT_IN}, chosen by the hash of its name, is held
out: {len(data.held_out):,} tokens, never trained on. The standard library is under the PSF License Agreement.

## Training

`jaxinfer train-demo` makes this model. Muon for the matrices of the layers and AdamW for the rest, highest learning
rate {model.options.learning_rate}, {model.options.warmup_steps} warm-up steps, linear decay to zero over the last
{model.options.decay_fraction:.0%} of the steps, weight decay {model.options.weight_decay}, float32; {num_seen:,} tokens
in all, on a CPU.

| phase | steps | batch x tokens | tokens |
| --- | --- | --- | --- |
{phases}

![training loss by step](loss.png)

## Limits

Python only, English comments only, no instruction following. Names and arguments are often invented. Beyond about
{CONTEXT} tokens of context quality falls.
"""


def write_draft_card(
    folder: Path, file_name: str, target: str, result: DistillResult, options: DistillOptions, origin: str = ""
) -> None:
    """Writes the card of a distilled draft and, where matplotlib is installed, its plot distillation.png.

    `origin` is a paragraph on data and start.
    """
    has_plot = importlib.util.find_spec("matplotlib") is not None
    if has_plot:
        plot_distillation(folder / "distillation.png", result)
    (folder / file_name).write_text(draft_card_text(folder.name, target, result, options, origin, has_plot=has_plot))


def draft_card_text(
    name: str, target: str, result: DistillResult, options: DistillOptions, origin: str = "", *, has_plot: bool = True
) -> str:
    """Markdown; every figure comes from the run."""
    config = result.config
    num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))
    rows = "\n".join(
        f"| {when} | {found.agreement:.1%} | {found.rate:.1%} | {found.tokens_per_round:.2f} |"
        for when, found in (("before distillation", result.before), ("after", result.after))
    )
    losses = {"fkl": "forward KL", "rkl": "reverse KL", "tv": "total variation"}
    plot = "\n![loss and acceptance by step](distillation.png)\n" if has_plot else ""
    return f"""# {name}

A draft of `{target}`, for speculative decoding: it proposes tokens, the target accepts those it would have chosen
itself. On its own it is not worth reading.

| | |
| --- | --- |
| parameters | {num_params:,} |
| layers, width, inner width | {config.num_layers}, {config.hidden_size}, {config.intermediate_size} |
| heads, head width | {config.num_heads}, {config.head_dim} |

Acceptance on greedy text of the target after held-out prompts, {result.after.num_tokens:,} tokens, in rounds of
{NUM_DRAFT_TOKENS} draft tokens:

| | same choice | accepted of proposed | tokens a round |
| --- | --- | --- | --- |
{rows}

## Training

{origin}Distilled from `{target}` by `jaxinfer`: {losses[options.loss]} to the target's distribution at temperature
{options.temperature:g}, {options.num_steps:,} steps of {options.batch_size} sequences of {options.length} tokens, of
which {options.num_on_policy} the target wrote: {options.num_texts:,} texts, {options.sampled:.0%} of them sampled at
temperature {options.sampling_temperature:g}, the others greedy; the rest is data. Muon for the matrices of the layers
and AdamW for the others, highest learning rate {options.learning_rate:g}.
{plot}"""


def plot_distillation(path: Path, result: DistillResult) -> None:
    """Training loss, and held-out agreement and acceptance, by step."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot([step for step, _ in result.history], [values["loss"] for _, values in result.history], color="C0")
    left.set(xlabel="optimizer step", ylabel="loss (nats)", title="distance from the target")
    measured = [(step, values) for step, values in result.history if "acceptance" in values]
    steps = [0, *(step for step, _ in measured)]
    for name, first, label in (
        ("held_out_agreement", result.before.agreement, "same choice"),
        ("acceptance", result.before.rate, "accepted of proposed"),
    ):
        right.plot(steps, [first, *(values[name] for _, values in measured)], marker="o", label=label)
    right.set(xlabel="optimizer step", ylabel="share of draft tokens", ylim=(0, 1), title="on held-out prompts")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_loss(path: Path, model: DemoModel) -> None:
    """The training loss by step, with its running median and the held-out loss at the end. Needs matplotlib."""
    pyplot = _pyplot()
    steps = np.array([step for step, _ in model.result.history])
    losses = np.array([metrics["loss"] for _, metrics in model.result.history])
    smooth = [float(np.median(losses[max(i - 3, 0) : i + 4])) for i in range(len(losses))]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, color="0.75", linewidth=1, label="one batch")
    axes.plot(steps, smooth, color="C0", label="median of 7 points")
    axes.axhline(
        model.held_out_loss, color="C3", linestyle="--", label=f"held out, at the end: {model.held_out_loss:.2f}"
    )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=f"{model.name}: training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ImportError(f"plotting needs matplotlib: {install_hint('plot')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
