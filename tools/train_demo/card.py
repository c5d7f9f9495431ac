"""The model card of an embedded model: data, steps, loss curve, held-out perplexity."""

import math
import platform
from pathlib import Path

import jax
import numpy as np

from jaxinfer.models import abstract_params
from jaxinfer.training.corpus import HELD_OUT_IN
from tools.train_demo.training import CONTEXT, DemoData, DemoModel


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

`python -m tools.train_demo` makes this model. Muon for the matrices of the layers and AdamW for the rest, highest
learning rate {model.options.learning_rate}, {model.options.warmup_steps} warm-up steps, linear decay to zero over the
last {model.options.decay_fraction:.0%} of the steps, weight decay {model.options.weight_decay}, float32; {num_seen:,}
tokens in all, on a CPU.

| phase | steps | batch x tokens | tokens |
| --- | --- | --- | --- |
{phases}

![training loss by step](loss.png)

## Limits

Python only, English comments only, no instruction following. Names and arguments are often invented. Beyond about
{CONTEXT} tokens of context quality falls.
"""


def plot_loss(path: Path, model: DemoModel) -> None:
    """The training loss by step, with its running median and the held-out loss at the end. Needs matplotlib."""
    from matplotlib.figure import Figure

    steps = np.array([step for step, _ in model.result.history])
    losses = np.array([metrics["loss"] for _, metrics in model.result.history])
    smooth = [float(np.median(losses[max(i - 3, 0) : i + 4])) for i in range(len(losses))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="0.75", linewidth=1, label="one batch")
    axes.plot(steps, smooth, color="C0", label="median of 7 points")
    axes.axhline(
        model.held_out_loss, color="C3", linestyle="--", label=f"held out, at the end: {model.held_out_loss:.2f}"
    )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=f"{model.name}: training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
