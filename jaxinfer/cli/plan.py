"""`jaxinfer plan`: whether a model fits chips that are not here, what it needs there, and how fast it could be."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.command import UsageError, say
from jaxinfer.cli.options import read_num_draft_tokens
from jaxinfer.cli.output import shows_progress, write_json, write_text

if TYPE_CHECKING:
    from jaxinfer.planning import PlanRequest

DEFAULT_MAX_SEQS = 64


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A checkpoint's folder (a config.json alone will do), a GGUF file, or a hub id."
        ),
    ],
    on: Annotated[
        str, typer.Option("--on", metavar="PLACE", help="Chips, such as v6e:2x2, v5e:4x4, h200x1 or h100x8.")
    ],
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Such as model=4 or data=2,model=4; default: all devices cut the model."),
    ] = None,
    max_seqs: Annotated[int, typer.Option(min=1, metavar="N", help="Answers at once.")] = DEFAULT_MAX_SEQS,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of a prompt with its answer; default: the model's, at most 4,096."
        ),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Round weights to int8, int4-g128, w8a8, fp8 or others.")
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="What keys and values are stored as, such as int8 or fp8_e4m3.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto is the checkpoint's.")] = "auto",
    draft: Annotated[
        str | None, typer.Option(metavar="DRAFT", help="A draft model's folder or hub id, ngram, or layers:N.")
    ] = None,
    num_draft_tokens: Annotated[
        str, typer.Option(metavar="N", help="Drafted before each check; auto plans for the most it may be.")
    ] = "auto",
    batch: Annotated[str | None, typer.Option(metavar="N,N,...", help="Sequences at once, for the roofline.")] = None,
    page_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a cache page.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(min=1, metavar="N", help="Prompt tokens of a step.")] = None,
    memory_fraction: Annotated[float, typer.Option(metavar="X", help="Of the usable memory, for all parts.")] = 0.9,
    requantize: Annotated[
        str | None, typer.Option(metavar="NAME", help="For a GGUF file's quantized weights: dense, or a recipe.")
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="TEXT", help="Branch, tag or commit of a hub id.")] = None,
    whole: Annotated[
        bool | None,
        typer.Option(
            "--whole/--few-layers", metavar="", help="Compile all layers, or a few of each kind; default: as is faster."
        ),
    ] = None,
    compile_: Annotated[
        bool,
        typer.Option("--compile/--no-compile", metavar="", help="--no-compile counts only, in a second; less exact."),
    ] = True,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory and tokens/s, as .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object.")] = False,
) -> None:
    """Plan a model for chips before renting them.

    From the configuration and the headers of a checkpoint the real programs are compiled for the chips: whether all
    fits, the bytes of each part, the tokens of cache that remain, and the least time that a token takes. Where it does
    not fit, the cheapest change that does.
    """
    from jaxinfer.planning import changes, make_plan, to_dict, to_text

    if picture is not None:
        _check_picture(picture)
    request = plan_request(
        model,
        on,
        mesh=mesh,
        max_seqs=max_seqs,
        context=context,
        quantize=quantize,
        kv_dtype=kv_dtype,
        dtype=dtype,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        batches=_batches(batch),
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        memory_fraction=memory_fraction,
        requantize=requantize,
        revision=revision,
    )

    def told(step: str) -> None:
        if shows_progress():
            say(f"compiling {step}")

    found = make_plan(request, whole=whole, compiles=compile_, told=told)
    helping = [] if found.fits else changes(found, compiles=compile_, told=told)
    if picture is not None:
        from jaxinfer.planning.picture import draw

        draw(found, picture)
    if as_json:
        write_json(to_dict(found, helping))
    else:
        write_text(to_text(found, helping) + "\n")


def plan_request(
    model: str,
    on: str,
    *,
    mesh: str | None = None,
    max_seqs: int = DEFAULT_MAX_SEQS,
    context: int | None = None,
    quantize: str | None = None,
    kv_dtype: str = "auto",
    dtype: str = "auto",
    draft: str | None = None,
    num_draft_tokens: str = "auto",
    batches: tuple[int, ...] = (),
    page_size: int | None = None,
    prefill_chunk: int | None = None,
    memory_fraction: float = 0.9,
    requantize: str | None = None,
    revision: str | None = None,
) -> "PlanRequest":
    """The request that the options make. Raises ValueError for what is out of range, and as `loading.load_shapes`."""
    from jaxinfer.engine.options import EngineOptions, SpeculationOptions
    from jaxinfer.loading import for_length, load_draft_shapes, load_shapes
    from jaxinfer.planning import PlanRequest, parse_place

    place = parse_place(on)
    config, params = load_shapes(model, dtype=dtype, revision=revision, quantize=quantize, requantize=requantize)
    config, length = for_length(config, context)
    count = read_num_draft_tokens(num_draft_tokens)
    if draft is None and count != "auto":
        raise UsageError(f"--num-draft-tokens {num_draft_tokens} needs --draft")
    speculation = None if draft is None else SpeculationOptions(None if count == "auto" else int(count))
    options = EngineOptions(
        max_model_len=length,
        max_seqs=max_seqs,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        memory_fraction=memory_fraction,
        kv_dtype=kv_dtype,
        speculation=speculation,
    )
    drafted = None if draft is None else load_draft_shapes(draft, config, params, length, dtype)
    return PlanRequest(model, config, params, place, options, mesh, drafted, batches)


def _batches(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        batches = tuple(int(part) for part in text.split(","))
    except ValueError:
        batches = (0,)
    if min(batches) < 1:
        raise UsageError(f"--batch: {text!r} is not a list of positive numbers, such as 1,8,64")
    return batches


def _check_picture(file: Path) -> None:
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--picture: {file} ends in neither .png, .svg nor .pdf")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"--picture: no folder {file.resolve().parent}")
