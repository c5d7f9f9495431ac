"""`jaxinfer distill`: trains a small draft that chooses as its target does, for speculative decoding."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxinfer.cli.command import UsageError
from jaxinfer.cli.output import note, waiting, write_json, write_text

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.models import ModelConfig, Params
    from jaxinfer.training.acceptance import Acceptance
    from jaxinfer.training.distill import DistillOptions, DistillResult, Documents, TextRequest

_DRAFT = "The draft"
_TRAINING = "Training"


def distill(
    target: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The model to speed up: a checkpoint's folder, a hub id, or demo."),
    ],
    data: Annotated[
        list[Path],
        typer.Option(metavar="PATH", help="A text file, or a folder of them; may be repeated. One document a file."),
    ],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Folder for the draft; it appears when it is whole.")],
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Its layers.", rich_help_panel=_DRAFT)] = 2,
    width: Annotated[
        int, typer.Option(metavar="N", min=1, help="Its width, a multiple of the head width.", rich_help_panel=_DRAFT)
    ] = 128,
    inner: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Its MLP's width; default: 3 times the width.", rich_help_panel=_DRAFT),
    ] = None,
    copying: Annotated[
        bool,
        typer.Option(
            "--copying/--no-copying",
            metavar="",
            help="Begin with heads that copy what was said before; 80 wider, two heads more in each layer.",
            rich_help_panel=_DRAFT,
        ),
    ] = True,
    init_layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Begin with these layers of the target, 0 the first, as they are; the width is the target's.",
            rich_help_panel=_DRAFT,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Optimizer steps.", rich_help_panel=_TRAINING)] = 1000,
    loss: Annotated[
        Literal["fkl", "rkl", "tv"],
        typer.Option(
            help="Distance of the draft from the target: forward or reverse KL, total variation.",
            rich_help_panel=_TRAINING,
        ),
    ] = "fkl",
    temperature: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Of the target in the loss; below 1 its first choice counts more.",
            rich_help_panel=_TRAINING,
        ),
    ] = 0.6,
    on_policy: Annotated[
        float,
        typer.Option(
            metavar="X", help="Share of training text that the target writes, 0..1.", rich_help_panel=_TRAINING
        ),
    ] = 0.9,
    texts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Texts that the target writes.", rich_help_panel=_TRAINING)
    ] = 3584,
    length: Annotated[
        int, typer.Option(metavar="N", min=4, help="Tokens of a training sequence.", rich_help_panel=_TRAINING)
    ] = 256,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sequences of a step.", rich_help_panel=_TRAINING)
    ] = 12,
    learning_rate: Annotated[
        float, typer.Option(metavar="X", help="Its highest value.", rich_help_panel=_TRAINING)
    ] = 1.5e-3,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same draft.", rich_help_panel=_TRAINING)] = 0,
    work_dir: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Keeps the target's texts and checkpoints. Default: OUT.training."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights that are written.")
    ] = "bfloat16",
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace a draft that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object.")] = False,
) -> None:
    """Train a small draft for a model, for speculative decoding.

    The target writes texts after beginnings taken from the data, and the draft learns to choose each token as the
    target would. Acceptance is measured on data that is held out: greedy drafts of 4 tokens, accepted while they are
    the target's choice. A run that was interrupted goes on when the command is repeated.

    Example: jaxinfer distill --target ./model --data ./texts --out ./draft
    """
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists: --overwrite replaces it")
    kept_layers = None if init_layers is None else _read_layers(init_layers)
    documents = read_documents(data)
    from jaxinfer.training.distill import DistillOptions

    options = DistillOptions(
        num_steps=steps,
        learning_rate=learning_rate,
        loss=loss,
        temperature=temperature,
        on_policy=on_policy,
        batch_size=batch_size,
        length=length,
        num_texts=texts,
        min_prompt=max(length // 8, 1),
        max_prompt=length // 2,
        seed=seed,
    )
    work_dir = work_dir or out.with_name(out.name + ".training")
    with waiting(f"loading {target}"):
        from jaxinfer.llm import LLM

        llm = LLM(target, max_model_len=length)
    with llm:
        divided = _encoded(llm, documents)
        draft, initial = _initial(llm, divided, kept_layers, layers, width, inner, options, copying=copying)
        result = run(llm, draft, initial, divided, options, work_dir)
        export(llm, result, options, out, dtype=dtype, overwrite=overwrite)
    report = {"path": out, "num_steps": steps, "before": figures(result.before), "after": figures(result.after)}
    if as_json:
        write_json(report)
        return
    for when, found in (("before", result.before), ("after", result.after)):
        write_text(
            f"{when:7} agrees on {found.agreement:.1%}, accepted {found.rate:.1%} of the proposed, "
            f"{found.tokens_per_round:.2f} tokens a round\n"
        )
    write_text(f"{out}\n")


def read_documents(paths: list[Path], option: str = "--data") -> list[str]:
    """The texts of files and, by name, of the files below folders; there, hidden and binary ones are left out.
    `option` is what the command calls them.

    Raises UsageError for a path that is not there, a file that is not text, or no text at all.
    """
    documents = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{option} {path}: there is no such file or folder")
        if path.is_file():
            try:
                documents.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                raise UsageError(f"{option} {path} is not text in UTF-8") from None
            continue
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            if any(part.startswith(".") for part in file.relative_to(path).parts):
                continue
            try:
                documents.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                note(f"{file} is not text and is left out")
    if not any(documents):
        raise UsageError(f"{option} {', '.join(map(str, paths))}: no text in it")
    return documents


def writer(llm: "LLM") -> "Callable[[list[TextRequest]], list[list[int]]]":
    """The target as the one who writes the texts."""
    from jaxinfer.sampling import SamplingParams

    def generate(requests: "list[TextRequest]") -> list[list[int]]:
        params = [
            SamplingParams(temperature=one.temperature, max_tokens=one.num_tokens, seed=one.seed, ignore_eos=True)
            for one in requests
        ]
        outputs = llm.generate([list(one.prompt) for one in requests], params)
        for output in outputs:
            if output.outputs[0].error:
                raise RuntimeError(f"the target could not write a text: {output.outputs[0].error}")
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def run(
    llm: "LLM",
    draft: "ModelConfig",
    initial: "Params",
    documents: "Documents",
    options: "DistillOptions",
    work_dir: Path,
) -> "DistillResult":
    """Distils a draft from the model that `llm` serves."""
    from jaxinfer.training import distill as training

    return training.distill(
        llm.config, llm.params, draft, initial, documents, writer(llm), options, work_dir=work_dir
    )  # fmt: skip


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
        checkpoints_convert.save_huggingface(
            result.config,
            result.params,
            out,
            dtype=dtype,
            extra_files=sorted(file for file in Path(folder).rglob("*") if file.is_file()),
            extra_config={"eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None},
            overwrite=overwrite,
        )
    write_draft_card(out, "README.md", llm.name, result, options)


def figures(acceptance: "Acceptance") -> dict[str, float]:
    """What a report says of acceptance."""
    return {
        "agreement": acceptance.agreement,
        "acceptance": acceptance.rate,
        "tokens_per_round": acceptance.tokens_per_round,
    }


def _encoded(llm: "LLM", documents: list[str]) -> "Documents":
    from jaxinfer.training.distill import Documents

    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise UsageError(f"{llm.name} has no tokenizer, so the data cannot be read for it")
    encoded = [tokenizer.encode_content(text) for text in documents if text]
    return Documents.divide(encoded, llm.eos_token_ids[0] if llm.eos_token_ids else None)


def _initial(
    llm: "LLM",
    documents: "Documents",
    kept_layers: list[int] | None,
    layers: int,
    width: int,
    inner: int | None,
    options: "DistillOptions",
    *,
    copying: bool,
) -> "tuple[ModelConfig, Params]":
    import jax

    from jaxinfer.training.copying import with_copying
    from jaxinfer.training.distill import draft_config, projected_draft, pruned_draft

    if kept_layers is not None:
        return pruned_draft(llm.config, llm.params, kept_layers)
    config = draft_config(llm.config, num_layers=layers, hidden_size=width, intermediate_size=inner)
    params = projected_draft(llm.config, llm.params, config, jax.random.key(options.seed))
    if not copying:
        return config, params
    try:
        return with_copying(config, params, documents.stream()[None, : options.length], seed=options.seed)
    except ValueError as error:
        raise UsageError(f"{error}; --no-copying does without") from None


def _read_layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--init-layers: {text!r} is not layers with commas between, such as 0,5") from None
