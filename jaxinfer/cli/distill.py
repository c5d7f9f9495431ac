"""`jaxinfer distill`: trains a small draft model for speculative decoding."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxinfer.cli.command import UsageError, resumes
from jaxinfer.cli.options import as_json, overwrite
from jaxinfer.cli.output import note, write_json, write_text
from jaxinfer.options import MISSING, option
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.models import ModelConfig, Params
    from jaxinfer.training.acceptance import Acceptance
    from jaxinfer.training.distill import DistillOptions, DistillResult
    from jaxinfer.training.texts import Documents, TargetTextRequest

_draft = partial(option, group="The draft")
_training = partial(option, group="Training")


@dataclass(frozen=True, kw_only=True)
class DistillCommandOptions:
    target: str = option(MISSING, "The model to speed up: a checkpoint's folder, a hub id, or demo.", "MODEL")
    data: list[Path] = option(
        MISSING, "A text file, or a folder of them; may be repeated. One document per file.", "PATH"
    )
    out: Path = option(MISSING, "Folder for the draft; it appears when it is complete.", "PATH")
    layers: int = _draft(2, "Number of layers.", "N", min=1)
    width: int = _draft(128, "Hidden size, a multiple of the head size.", "N", min=1)
    inner: int | None = _draft(None, "Hidden size of the MLP; default: 3 times the width.", "N", min=1)
    copying: bool = _draft(
        True,
        "Start with heads that copy earlier text; the draft is 80 wider and has two more heads in each layer.",
        flag="--copying/--no-copying",
    )
    init_layers: str | None = _draft(
        None, "Start with copies of these layers of the target, from 0; the width is the target's.", "N,N"
    )
    steps: int = _training(1000, "Optimizer steps.", "N", min=1)
    loss: Literal["fkl", "rkl", "tv"] = _training(
        "fkl", "Distance between draft and target: forward KL, reverse KL or total variation."
    )
    temperature: float = _training(
        0.6, "Temperature of the target in the loss; below 1 its first choice gets more weight.", "X"
    )
    on_policy: float = _training(0.9, "Share of the training text that the target generates, 0..1.", "X")
    texts: int = _training(3584, "Number of texts that the target generates.", "N", min=1)
    length: int = _training(256, "Tokens of a training sequence.", "N", min=4)
    batch_size: int = _training(12, "Sequences of a step.", "N", min=1)
    learning_rate: float = _training(1.5e-3, "Peak learning rate.", "X")
    seed: int = _training(0, "The same seed gives the same draft.", "N")
    work_dir: Path | None = option(
        None, "Folder for the generated texts and training checkpoints. Default: OUT.training.", "PATH"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("bfloat16", "Type of the written weights.")
    overwrite: bool = overwrite("Replace an existing draft.")
    as_json: bool = as_json("One JSON object.")


def distill(options: DistillCommandOptions) -> None:
    """Train a small draft model for speculative decoding.

    The target generates texts from beginnings taken from the data, and the draft learns to choose the tokens that the
    target would choose. Acceptance is measured on held-out data: greedy drafts of 4 tokens, accepted up to the first
    token that the target would not choose. An interrupted run continues when the command is repeated.

    Example: jaxinfer distill --target ./model --data ./texts --out ./draft
    """
    out = options.out
    if out.exists() and not options.overwrite:
        raise FileExistsError(f"{out} exists: --overwrite replaces it")
    if options.init_layers is not None:
        _read_layers(options.init_layers)
    with Stage("reading the data"):
        documents = read_documents(options.data)
    training = _training_options(options)
    work_dir = options.work_dir or out.with_name(out.name + ".training")
    with Stage(f"loading {options.target}"):
        from jaxinfer.api.llm import LLM
        from jaxinfer.training.distill import distill as train

        llm = LLM(options.target, max_model_len=options.length)
    with llm, resumes("from the last training checkpoint"), Stage("distilling"):
        divided = _encoded(llm, documents)
        draft, initial = _initial(llm, divided, options)
        result = train(
            llm.config, llm.params, draft, initial, divided, writer(llm), training, work_dir=work_dir
        )  # fmt: skip
        export(llm, result, training, out, dtype=options.dtype, overwrite=options.overwrite)
    if options.as_json:
        before, after = figures(result.before), figures(result.after)
        write_json({"path": out, "num_steps": options.steps, "before": before, "after": after})
        return
    for when, acceptance in (("before", result.before), ("after", result.after)):
        write_text(
            f"{when:7} agreement {acceptance.agreement:.1%}, acceptance {acceptance.rate:.1%}, "
            f"{acceptance.tokens_per_round:.2f} tokens per round\n"
        )
    write_text(f"{out}\n")


def _training_options(options: DistillCommandOptions) -> "DistillOptions":
    from jaxinfer.training.distill import DistillOptions

    same = ("learning_rate", "loss", "temperature", "on_policy", "batch_size", "length", "seed")
    return DistillOptions(
        num_steps=options.steps,
        num_texts=options.texts,
        min_prompt=max(options.length // 8, 1),
        max_prompt=options.length // 2,
        **{name: getattr(options, name) for name in same},
    )


def read_documents(paths: list[Path], flag: str = "--data") -> list[str]:
    """The texts of files, and of the files in folders in the order of their names, except hidden and binary ones.
    `flag` is for error messages.

    Raises UsageError for a path that does not exist, a file that is not text, or no text at all.
    """
    documents = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{flag} {path}: there is no such file or folder")
        if path.is_file():
            try:
                documents.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                raise UsageError(f"{flag} {path} is not text in UTF-8") from None
            continue
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            if any(part.startswith(".") for part in file.relative_to(path).parts):
                continue
            try:
                documents.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                note(f"{file} is not text and is skipped")
    if not any(documents):
        raise UsageError(f"{flag} {', '.join(map(str, paths))}: no text in it")
    return documents


def read_texts(paths: list[Path] | None, model: str, count: int) -> list[str]:
    """The texts of --texts, as of `read_documents`; for an embedded model, otherwise, `count` Python files that it was
    not trained on. [] for another model."""
    if paths:
        return read_documents(paths, "--texts")
    if model not in ("demo", "demo-draft"):
        return []
    from jaxinfer.training.corpus import held_out_files

    return [text for _, text in held_out_files(count)]


def writer(llm: "LLM") -> "Callable[[list[TargetTextRequest]], list[list[int]]]":
    """Generates texts with the target."""
    from jaxinfer.sampling import SamplingParams

    def generate(requests: "list[TargetTextRequest]") -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=text.temperature, max_tokens=text.num_tokens, seed=text.seed, ignore_eos=text.ignore_eos
            )
            for text in requests
        ]
        outputs = llm.generate([list(text.prompt) for text in requests], params, use_tqdm=False)
        for output in outputs:
            if output.outputs[0].error:
                raise RuntimeError(f"the target failed to generate a text: {output.outputs[0].error}")
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def export(
    llm: "LLM", result: "DistillResult", options: "DistillOptions", out: Path, *, dtype: str, overwrite: bool
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
        write_draft_card(card, "README.md", llm.name, result, options)
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

    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise UsageError(f"{llm.name} has no tokenizer, so the data cannot be tokenized")
    encoded = [tokenizer.encode_content(text) for text in documents if text]
    return Documents.divide(encoded, llm.eos_token_ids[0] if llm.eos_token_ids else None)


def _initial(llm: "LLM", documents: "Documents", options: DistillCommandOptions) -> "tuple[ModelConfig, Params]":
    """The draft's configuration and initial parameters."""
    import jax

    from jaxinfer.training.copying import with_copying
    from jaxinfer.training.distill import draft_config, projected_draft, pruned_draft

    if options.init_layers is not None:
        return pruned_draft(llm.config, llm.params, _read_layers(options.init_layers))
    config = draft_config(
        llm.config, num_layers=options.layers, hidden_size=options.width, intermediate_size=options.inner
    )
    params = projected_draft(llm.config, llm.params, config, jax.random.key(options.seed))
    if not options.copying:
        return config, params
    try:
        return with_copying(config, params, documents.stream()[None, : options.length], seed=options.seed)
    except ValueError as error:
        raise UsageError(f"{error}; --no-copying omits these heads") from None


def _read_layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--init-layers: {text!r} is not a list of layers, such as 0,5") from None
