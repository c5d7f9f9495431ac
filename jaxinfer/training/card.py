"""The model card of a distilled draft, and what cards of drafts share."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax

from jaxinfer.checks import need_plotting
from jaxinfer.models import abstract_params
from jaxinfer.training.acceptance import NUM_DRAFT_TOKENS, Acceptance
from jaxinfer.training.distill import DistillOptions, DistillResult


def write_draft_card(
    folder: Path,
    file_name: str,
    target: str,
    result: DistillResult,
    options: DistillOptions,
    origin: str = "",
    *,
    speeds: Mapping[int, float] = MappingProxyType({}),
) -> None:
    """Writes the card of a distilled draft and, where matplotlib is installed, its plot distillation.png.

    `origin` is a paragraph on data and start, `speeds` are as of `speed_table`.
    """
    has_plot = importlib.util.find_spec("matplotlib") is not None
    if has_plot:
        plot_distillation(folder / "distillation.png", result)
    (folder / file_name).write_text(
        draft_card_text(folder.name, target, result, options, origin, has_plot=has_plot, speeds=speeds)
    )


def draft_card_text(
    name: str,
    target: str,
    result: DistillResult,
    options: DistillOptions,
    origin: str = "",
    *,
    has_plot: bool = True,
    speeds: Mapping[int, float] = MappingProxyType({}),
) -> str:
    """Markdown; every figure comes from the run."""
    config = result.config
    num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))
    table = acceptance_table((("before distillation", result.before), ("after", result.after)))
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

{table}{speed_table(speeds)}
## Training

{origin}Distilled from `{target}` by `jaxinfer`: {losses[options.loss]} to the target's distribution at temperature
{options.temperature:g}, {options.num_steps:,} steps of {options.batch_size} sequences of {options.length} tokens, of
which {options.num_on_policy} the target wrote: {options.num_texts:,} texts, {options.sampled:.0%} of them sampled at
temperature {options.sampling_temperature:g}, the others greedy; the rest is data. Muon for the matrices of the layers
and AdamW for the others, highest learning rate {options.learning_rate:g}.
{plot}"""


def speed_table(speeds: Mapping[int, float]) -> str:
    """A table of speeds beside plain decoding by the number of answers at a time; "" for none."""
    if not speeds:
        return ""
    rows = "".join(f"| {load} | {ratio:.2f}x |\n" for load, ratio in speeds.items())
    return f"\n| answers at a time | speed, beside plain decoding |\n| --- | --- |\n{rows}"


def acceptance_table(measured: Sequence[tuple[str, Acceptance]]) -> str:
    """A table of measurements by when or where they were made."""
    rows = "".join(
        f"| {when} | {acceptance.agreement:.1%} | {acceptance.rate:.1%} | {acceptance.tokens_per_round:.2f} |\n"
        for when, acceptance in measured
    )
    return f"| | same choice | accepted of proposed | tokens a round |\n| --- | --- | --- | --- |\n{rows}"


def plot_distillation(path: Path, result: DistillResult) -> None:
    """Training loss, and held-out agreement and acceptance, by step."""
    curves = (
        ("held_out_agreement", result.before.agreement, "same choice"),
        ("acceptance", result.before.rate, "accepted of proposed"),
    )
    plot_training(path, result.history, "loss (nats)", curves)


def plot_training(
    path: Path, history: Sequence[tuple[int, dict[str, float]]], loss: str, curves: Sequence[tuple[str, float, str]]
) -> None:
    """The training loss by step, and beside it metrics in 0..1 as (name, value before training, label)."""
    need_plotting("plotting")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([step for step, _ in history], [values["loss"] for _, values in history], color="C0")
    left.set(xlabel="optimizer step", ylabel=loss, title="distance from the target")
    measured = [(step, values) for step, values in history if "acceptance" in values]
    steps = [0, *(step for step, _ in measured)]
    for name, first, label in curves:
        right.plot(steps, [first, *(values[name] for _, values in measured)], marker="o", label=label)
    right.set(xlabel="optimizer step", ylabel="share of draft tokens", ylim=(0, 1), title="on held-out prompts")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
