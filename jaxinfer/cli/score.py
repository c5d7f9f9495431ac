"""`jaxinfer score`: how probable a model finds given continuations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import LogitOptions, ServingOptions, open_llm, sampling_values
from jaxinfer.cli.output import brief, console, open_output, plain_cell, write_json
from jaxinfer.cli.prompts import read_records

if TYPE_CHECKING:
    from jaxinfer.engine.request import Score
    from jaxinfer.llm import LLM

Pair = tuple[Any, Any]


def score(
    model_options: ServingOptions,
    logit_options: LogitOptions,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What comes before; may be repeated.")
    ] = None,
    continuation: Annotated[
        list[str] | None,
        typer.Option(
            "--continuation", "-c", metavar="TEXT", help="What is scored; one for each prompt, or all for one prompt."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="PATH",
            help='JSON lines {"prompt": "...", "continuation": "..."}; -: standard input.',
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", metavar="", help="Show each token of the continuations.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write there, once all is computed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="JSON lines: one object for each pair.")] = False,
) -> None:
    """Show how probable a model finds given texts.

    Log-probabilities of continuations after their prompts, in nats. Raw ones are the model's own. Processed ones
    are under the sampling options given here; without any, the two agree. Nothing is taken from the checkpoint's
    generation_config. Prompt and continuation are tokenized apart.
    """
    from jaxinfer.sampling.params import SamplingParams

    values = sampling_values(logit_options)
    pairs = _pairs(prompt or [], continuation or [], file)
    with open_output(output) as target, open_llm(model_options) as llm:
        scores = llm.score(
            [before for before, _ in pairs],
            [after for _, after in pairs],
            SamplingParams.from_dict(values),
        )
        data = [_data(llm, index, pair, one) for index, (pair, one) in enumerate(zip(pairs, scores, strict=True))]
        if as_json:
            for one in data:
                write_json(one, target)
        else:
            _print_totals(data, target)
            if tokens:
                _print_tokens(data, target)


def _pairs(prompts: list[str], continuations: list[str], file: Path | None) -> list[Pair]:
    if file is not None:
        if prompts or continuations:
            raise UsageError("pairs come from --prompt and --continuation or from --file, not from both")
        return [
            (record["prompt"], record["continuation"]) for _, record in read_records(file, ("prompt", "continuation"))
        ]
    if not prompts or not continuations:
        raise UsageError("score needs --prompt and --continuation, or --file")
    if len(prompts) == 1:
        prompts = prompts * len(continuations)
    if len(prompts) != len(continuations):
        raise UsageError(f"{len(prompts)} prompts and {len(continuations)} continuations do not pair up")
    return list(zip(prompts, continuations, strict=True))


def _data(llm: "LLM", index: int, pair: Pair, score: "Score") -> dict[str, Any]:
    tokenizer = llm.tokenizer
    texts = [None if tokenizer is None else tokenizer.decode([token], False) for token in score.token_ids]
    each = zip(score.token_ids, texts, score.raw, score.processed, strict=True)
    return {
        "index": index,
        "prompt": pair[0],
        "continuation": pair[1],
        "num_tokens": len(score.token_ids),
        "raw_total": score.raw_total,
        "processed_total": score.processed_total,
        "is_greedy": score.is_greedy,
        "tokens": [
            {"token_id": token, "token": text, "raw": raw, "processed": processed}
            for token, text, raw, processed in each
        ],
    }


def _print_totals(data: list[dict[str, Any]], file: Any) -> None:
    from rich import box
    from rich.table import Table

    table = Table("", "prompt", "continuation", box=box.SIMPLE_HEAD)
    for name in ("tokens", "raw", "per token", "processed"):
        table.add_column(name, justify="right")
    table.add_column("greedy")
    for one in data:
        cells = [
            str(one["index"] + 1),
            brief(one["prompt"], from_end=True),
            brief(one["continuation"]),
            str(one["num_tokens"]),
            f"{one['raw_total']:.4f}",
            f"{one['raw_total'] / one['num_tokens']:.4f}",
            f"{one['processed_total']:.4f}",
            "yes" if one["is_greedy"] else "no",
        ]
        table.add_row(*map(plain_cell, cells))
    console(file).print(table)


def _print_tokens(data: list[dict[str, Any]], file: Any) -> None:
    from rich import box
    from rich.table import Table

    for one in data:
        title = f"{one['index'] + 1}: {brief(one['continuation'])}"
        table = Table("token", "id", title=plain_cell(title), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("raw", justify="right")
        table.add_column("processed", justify="right")
        for token in one["tokens"]:
            text = repr(token["token"]) if token["token"] is not None else ""
            cells = [text, str(token["token_id"]), f"{token['raw']:.4f}", f"{token['processed']:.4f}"]
            table.add_row(*map(plain_cell, cells))
        console(file).print(table)
