"""The model card of a head that was trained here."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxinfer.training.acceptance import Acceptance
from jaxinfer.training.card import acceptance_table, plot_training, speed_table
from jaxinfer.training.heads import HeadResult, HeadTraining

_TITLES = {"eagle3": "EAGLE-3", "dflash": "DFlash"}
_LOSSES = {"kl": "forward KL to the target's distribution", "lk": "-log of the chance of acceptance (LK)"}


@dataclass(frozen=True)
class HeadOrigin:
    """Attributes:
    target: its name. fingerprint: of its weights and tokenizer (`LLM.fingerprint`).
    data: a sentence on the texts. rounds: acceptance in rounds of the engine. speeds: as of `speed_table`.
    """

    target: str
    fingerprint: str
    data: str
    rounds: Acceptance
    speeds: Mapping[int, float] = field(default_factory=dict)


def write_head_card(folder: Path, name: str, training: HeadTraining, result: HeadResult, origin: HeadOrigin) -> None:
    """Writes README.md and, where matplotlib is installed, its plot training.png."""
    has_plot = importlib.util.find_spec("matplotlib") is not None
    if has_plot:
        curves = [("acceptance", result.before.rate, "accepted of proposed")]
        curves += [
            (f"accepted_{k + 1}", rate, f"draft token {k + 1} of those in a row")
            for k, rate in enumerate(result.before.by_position[:3])
        ]
        plot_training(folder / "training.png", result.history, f"loss ({training.options.loss})", curves)
    text = head_card_text(name, training, result, origin, has_plot=has_plot)
    (folder / "README.md").write_text(text, encoding="utf-8")


def head_card_text(
    name: str, training: HeadTraining, result: HeadResult, origin: HeadOrigin, *, has_plot: bool = True
) -> str:
    """Markdown; every figure comes from the run."""
    options, config = training.options, result.config
    num_params = sum(leaf.size for leaf in jax.tree.leaves(result.params) if leaf.ndim > 1 or leaf.dtype == "float32")
    taps = ", ".join(map(str, config.draft_head.tap_layers)) if config.draft_head is not None else ""
    size = config.vocab_size if training.tokens is None else len(training.tokens)
    kind = (
        f"blocks of {options.block_size} tokens"
        if options.is_block
        else f"chains of {options.unroll} steps"
        + (f" (of one in the first {options.one_step:.0%})" if options.one_step else "")
    )
    measured = (("before training", result.before), ("after", result.after), ("in rounds of the engine", origin.rounds))
    start = "as copies of the target's last" if options.copies else "at random"
    plot = "\n![loss and acceptance by step](training.png)\n" if has_plot else ""
    return f"""# {name}

{_TITLES[options.kind]} head of `{origin.target}`, for speculative decoding: it reads hidden states of the target and
proposes tokens, the target accepts those it would have chosen itself. It drafts for this target alone
(`LLM({origin.target!r}, draft=...)`).

| | |
| --- | --- |
| parameters | {num_params:,} |
| layers, width, inner width | {config.num_layers}, {config.hidden_size}, {config.intermediate_size} |
| states of the target (0 is the embedding) | {taps} |
| tokens that it drafts | {size:,}, {training.share_covered:.1%} of the training text |
| fingerprint of the target | `{origin.fingerprint}` |

Acceptance on greedy text of the target after held-out prompts, {result.after.num_tokens:,} tokens, in rounds of
{options.num_drafts} draft tokens:

{acceptance_table(measured)}
{positions_table(measured)}{speed_table(origin.speeds)}
## Training

{origin.data}

{result.num_texts:,} texts of {result.num_tokens:,} tokens, and {result.num_steps:,} steps of {options.batch_size} rows
of {options.length} tokens: {_LOSSES[options.loss]} at temperature {options.temperature:g}, {kind}, drafted after
{training.num_anchors} places of a row, in {options.compute_dtype}. The layers began {start}.
Muon for the matrices of the layers and AdamW for the
others, highest learning rate {options.learning_rate:g}.

{loss_table(result.history)}{plot}"""


def positions_table(measured: Sequence[tuple[str, Acceptance]]) -> str:
    """A table of how often each draft token of a round was accepted, of the rounds that had it."""
    most = max(len(acceptance.by_position) for _, acceptance in measured)
    head = "".join(f" {k + 1} |" for k in range(most))
    rows = [f"| {when} |" + "".join(f" {rate:.1%} |" for rate in one.by_position) + "\n" for when, one in measured]
    return f"| accepted at |{head}\n| --- |{' --- |' * most}\n{''.join(rows)}"


def loss_table(history: Sequence[tuple[int, dict[str, float]]]) -> str:
    """The loss at each evaluation, with the tokens a round."""
    rows = "".join(
        f"| {step:,} | {values['loss']:.3f} | {values['tokens_per_round']:.2f} |\n"
        for step, values in history
        if "tokens_per_round" in values
    )
    return f"| step | loss | tokens a round |\n| --- | --- | --- |\n{rows}"
