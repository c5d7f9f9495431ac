"""`jaxinfer distill`: trains a small draft model for speculative decoding."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.cli.bench import read_integers
from jaxinfer.cli.command import UsageError, resumes
from jaxinfer.cli.draft_measures import measure_rounds, measure_speeds, speed_line
from jaxinfer.cli.options import as_json, model_argument, overwrite
from jaxinfer.cli.output import write_json, write_text
from jaxinfer.cli.prompts import read_chats
from jaxinfer.cli.training_data import answered_prompts, read_documents, writer
from jaxinfer.options import MISSING, option
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.models import ModelConfig, Params
    from jaxinfer.training.acceptance import Acceptance
    from jaxinfer.training.distill import DistillOptions, DistillResult
    from jaxinfer.training.head_data import HeadTexts
    from jaxinfer.training.texts import Documents

_data = partial(option, group="The data")
_draft = partial(option, group="The draft")
_training = partial(option, group="Training")
ON_POLICY, NUM_TEXTS, NUM_LAYERS = 0.9, 3584, 2  # by default; the first two of documents


@dataclass(frozen=True, kw_only=True)
class DistillCommandOptions:
    target: str = model_argument()
    out: Path = option(MISSING, "Folder for the draft; it appears when it is complete.", "PATH")
    data: list[Path] | None = _data(
        None,
        "A text file, or a folder of them, whose beginnings the model continues; may be repeated. One document per "
        "file.",
        "PATH",
    )
    prompts: list[Path] | None = _data(
        None, "In place of --data: prompts that the model answers, as of train-head. May be repeated.", "PATH"
    )
    own_prompts: int | None = _data(
        None,
        "In place of --data: so many samples of what the model itself says where a user's message begins, and after "
        "beginnings of requests for code, lists, explanations and summaries, in turn, which it answers. Of a model "
        "with a chat template.",
        "N",
        min=4,
    )
    texts: int | None = _data(
        None,
        f"Number of texts that the model writes. Default: {NUM_TEXTS:,}; of prompts, one answer to each.",
        "N",
        min=1,
    )
    on_policy: float | None = _data(
        None, f"Share of the training text that the model wrote, 0..1. Default: {ON_POLICY}; of prompts 1.", "X"
    )
    length: int = _data(256, "Tokens of a training sequence.", "N", min=4)
    layers: int | None = _draft(
        None,
        f"Number of layers: copies of the model's own, from its first to its last, unless a width is given. Default: "
        f"{NUM_LAYERS}.",
        "N",
        min=1,
    )
    init_layers: str | None = _draft(None, "Copies of these layers of the model, from 0, in place of --layers.", "N,N")
    width: int | None = _draft(
        None,
        "Hidden size of a narrower draft, a multiple of the head size. Its layers begin at random, its embedding as "
        "the model's in its leading directions. Default: the model's.",
        "N",
        min=1,
    )
    inner: int | None = _draft(None, "Hidden size of a narrower draft's MLP; default: 3 times the width.", "N", min=1)
    copying: bool | None = _draft(
        None,
        "Start a narrower draft with heads that copy earlier text; it is 80 wider and has two more heads a layer. "
        "Default: it does.",
        flag="--copying/--no-copying",
    )
    steps: int = _training(1000, "Optimizer steps.", "N", min=1)
    loss: Literal["fkl", "rkl", "tv"] = _training(
        "fkl", "Distance between draft and target: forward KL, reverse KL or total variation."
    )
    temperature: float = _training(
        0.6, "Temperature of the target in the loss; below 1 its first choice gets more weight.", "X"
    )
    batch_size: int = _training(12, "Sequences of a step.", "N", min=1)
    learning_rate: float = _training(1.5e-3, "Peak learning rate.", "X")
    seed: int = _training(0, "The same seed gives the same draft.", "N")
    concurrency: str = option(
        "1,4", "Numbers of answers at a time for which the draft's speed beside plain decoding is measured.", "N,N"
    )
    work_dir: Path | None = option(
        None, "Folder for the generated texts and training checkpoints. Default: OUT.training.", "PATH"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("bfloat16", "Type of the written weights.")
    overwrite: bool = overwrite("Replace an existing draft.")
    as_json: bool = as_json("One JSON object.")


def distill(options: DistillCommandOptions) -> None:
    """Train a smaller model that drafts for a model.

    The model answers prompts, or continues beginnings of texts, and the draft learns to choose the tokens that it would
    choose. Acceptance is measured on held-out data: greedy drafts of 4 tokens, accepted up to the first token that the
    model would not choose; then speed, in the engine. An interrupted run continues when the command is repeated.

    Example: jaxinfer distill ./model --layers 4 --own-prompts 2000 --out ./draft; then --draft ./draft
    """
    loads = _check(options)
    with Stage("reading the data"):
        chats = read_chats(options.prompts) if options.prompts else []
        documents = read_documents(options.data) if options.data else []
    out, training = options.out, _training_options(options)
    work_dir = options.work_dir or out.with_name(out.name + ".training")
    with Stage(f"loading {options.target}"):
        from jaxinfer.api.llm import LLM
        from jaxinfer.training.acceptance import NUM_DRAFT_TOKENS
        from jaxinfer.training.distill import distill as train

        llm = LLM(options.target, max_model_len=options.length)
    with llm, resumes("from the last training checkpoint"), Stage("distilling"):
        if llm.tokenizer is None:
            raise UsageError(f"{llm.name} has no tokenizer, so the data cannot be tokenized")
        if documents:
            data = _encoded(llm, documents)
        else:
            data, training = _answers(llm, chats, options, training, work_dir)
        draft, initial = _initial(llm, data, options)
        result = train(llm.config, llm.params, draft, initial, data, writer(llm), training, work_dir=work_dir)
        made = result.config, result.params
        rounds = measure_rounds(llm, made, result.held_out, NUM_DRAFT_TOKENS)
        speeds = measure_speeds(llm, made, result.held_out, loads)
        export(llm, result, training, out, dtype=options.dtype, overwrite=options.overwrite, speeds=speeds)
    measured = {"before": result.before, "after": result.after, "rounds": rounds}
    if options.as_json:
        values = {name: figures(acceptance) for name, acceptance in measured.items()}
        write_json({"path": out, "num_steps": options.steps, **values, "speedup": speeds})
        return
    for when, acceptance in measured.items():
        write_text(
            f"{when:7} agreement {acceptance.agreement:.1%}, acceptance {acceptance.rate:.1%}, "
            f"{acceptance.tokens_per_round:.2f} tokens per round\n"
        )
    write_text(f"{speed_line(speeds)}\n{out}\n")


def _check(options: DistillCommandOptions) -> list[int]:
    """Numbers of answers at a time. Raises before anything is loaded."""
    if options.out.exists() and not options.overwrite:
        raise FileExistsError(f"{options.out} exists: --overwrite replaces it")
    given = [f"--{name.replace('_', '-')}" for name in ("data", "prompts", "own_prompts") if getattr(options, name)]
    if len(given) != 1:
        several = f"the data are given by one option, not by {' and '.join(given)}"
        raise UsageError(several if given else "no data: --data takes texts, --prompts or --own-prompts prompts")
    if not options.data and options.on_policy not in (None, 1.0):
        raise UsageError(f"--on-policy {options.on_policy:g}: of prompts the model writes all the text")
    for name in ("inner", "copying"):
        if options.width is None and getattr(options, name) is not None:
            raise UsageError(f"--{name} is of a narrower draft: give its --width")
    if options.init_layers is not None:
        _read_layers(options.init_layers)
        if options.layers is not None:
            raise UsageError("--init-layers says which layers are copied: omit --layers")
        if options.width is not None:
            raise UsageError("--init-layers copies layers of the model, which have its width: omit --width")
    return read_integers(options.concurrency, "--concurrency")


def _training_options(options: DistillCommandOptions) -> "DistillOptions":
    from jaxinfer.training.distill import DistillOptions

    same = ("learning_rate", "loss", "temperature", "batch_size", "length", "seed")
    on_policy = ON_POLICY if options.on_policy is None else options.on_policy
    return DistillOptions(
        num_steps=options.steps,
        num_texts=options.texts or NUM_TEXTS,
        min_prompt=max(options.length // 8, 1),
        max_prompt=options.length // 2,
        on_policy=on_policy if options.data else 1.0,
        **{name: getattr(options, name) for name in same},
    )


def _answers(
    llm: "LLM",
    chats: list[list[dict[str, Any]]],
    options: DistillCommandOptions,
    training: "DistillOptions",
    work_dir: Path,
) -> "tuple[HeadTexts, DistillOptions]":
    """Answers of the model, and the options with how many there are and how they were sampled."""
    from jaxinfer.training.head_data import HeadTextOptions

    wanted = HeadTextOptions(length=options.length, num_answers=options.texts, seed=options.seed)
    texts = answered_prompts(llm, chats, options.own_prompts, wanted, work_dir)
    sampling = {"sampled": wanted.sampled, "sampling_temperature": wanted.sampling_temperature}
    return texts, replace(training, num_texts=len(texts.train), **sampling)


def export(
    llm: "LLM",
    result: "DistillResult",
    options: "DistillOptions",
    out: Path,
    *,
    dtype: str,
    overwrite: bool,
    speeds: Mapping[int, float],
) -> None:
    """Writes the draft with the target's tokenizer and a card."""
    import checkpoints_convert
    from jaxinfer.training.card import write_draft_card

    eos = llm.eos_token_ids
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if llm.tokenizer is not None:
            llm.tokenizer.save(folder)
        card = Path(folder) / out.name  # the title is the folder's name
        card.mkdir()
        write_draft_card(card, "README.md", llm.name, result, options, speeds=speeds)
        checkpoints_convert.save_huggingface(
            result.config,
            result.params,
            out,
            dtype=dtype,
            extra_files=sorted(file for file in Path(folder).rglob("*") if file.is_file()),
            extra_config={"eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None},
            overwrite=overwrite,
        )


def figures(acceptance: "Acceptance") -> dict[str, float]:
    """Acceptance as JSON values."""
    return {
        "agreement": acceptance.agreement,
        "acceptance": acceptance.rate,
        "tokens_per_round": acceptance.tokens_per_round,
    }


def _encoded(llm: "LLM", documents: list[str]) -> "Documents":
    from jaxinfer.training.texts import Documents

    encoded = [llm.get_tokenizer().encode_content(text) for text in documents if text]
    return Documents.divide(encoded, llm.eos_token_ids[0] if llm.eos_token_ids else None)


def _initial(llm: "LLM", data: "Documents | HeadTexts", options: DistillCommandOptions) -> "tuple[ModelConfig, Params]":
    """The draft's configuration and initial parameters."""
    import jax
    import numpy as np

    from jaxinfer.training.copying import with_copying
    from jaxinfer.training.distill import draft_config, projected_draft, pruned_draft, spread_layers
    from jaxinfer.training.texts import Documents

    num_layers = options.layers or NUM_LAYERS
    if options.width is None:
        layers = _read_layers(options.init_layers) if options.init_layers is not None else None
        return pruned_draft(llm.config, llm.params, layers or spread_layers(llm.config.num_layers, num_layers))
    config = draft_config(llm.config, num_layers=num_layers, hidden_size=options.width, intermediate_size=options.inner)
    params = projected_draft(llm.config, llm.params, config, jax.random.key(options.seed))
    if options.copying is False:
        return config, params
    stream = data.stream() if isinstance(data, Documents) else np.concatenate([text.tokens for text in data.train])
    try:
        return with_copying(config, params, stream[None, : options.length], seed=options.seed)
    except ValueError as error:
        raise UsageError(f"{error}; --no-copying omits these heads") from None


def _read_layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--init-layers: {text!r} is not a list of layers, such as 0,5") from None
