"""`jaxinfer score`: how probable a model finds given continuations."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import LogitOptions, ServingOptions, as_json, open_llm, sampling_values
from jaxinfer.cli.output import brief, console, open_output, write_json
from jaxinfer.cli.prompts import read_records
from jaxinfer.options import option
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.engine.request import Score
    from jaxinfer.llm import LLM

Pair = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    prompt: list[str] | None = option(None, "The text before the continuation; may be repeated.", "TEXT", "--prompt -p")
    continuation: list[str] | None = option(
        None, "The text to score; one for each prompt, or several for one prompt.", "TEXT", "--continuation -c"
    )
    file: Path | None = option(
        None, 'JSON lines {"prompt": "...", "continuation": "..."}; -: standard input.', "PATH", "--file -f"
    )
    tokens: bool = option(False, "Show each token of the continuations.")
    output: Path | None = option(None, "Write to this file when all scores are computed.", "PATH", "--output -o")
    as_json: bool = as_json("JSON lines: one object for each pair.")


def score(model_options: ServingOptions, logit_options: LogitOptions, options: ScoreOptions) -> None:
    """Show how probable texts are under a model.

    Prints log-probabilities of continuations after their prompts, in nats. Raw ones are the model's own. Processed ones
    are computed under the sampling options given here; without any, both are the same. The checkpoint's
    generation_config is not used. Prompt and continuation are tokenized separately.
    """
    values = sampling_values(logit_options)
    pairs = _pairs(options.prompt or [], options.continuation or [], options.file)
    with open_output(options.output) as target, open_llm(model_options) as llm:
        scores = llm.score(
            [before for before, _ in pairs], [after for _, after in pairs], SamplingParams.from_dict(values)
        )
        data = [_data(llm, index, pair, one) for index, (pair, one) in enumerate(zip(pairs, scores, strict=True))]
        if options.as_json:
            for one in data:
                write_json(one, target)
        else:
            _print_totals(data, target)
            if options.tokens:
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
    titles = ("", "prompt", "continuation", "tokens", "raw", "per token", "processed", "greedy")
    rows = [
        (
            one["index"] + 1,
            brief(one["prompt"], from_end=True),
            brief(one["continuation"]),
            one["num_tokens"],
            f"{one['raw_total']:.4f}",
            f"{one['raw_total'] / one['num_tokens']:.4f}",
            f"{one['processed_total']:.4f}",
            "yes" if one["is_greedy"] else "no",
        )
        for one in data
    ]
    console(file).print(make_table(titles, rows, num_left=3))


def _print_tokens(data: list[dict[str, Any]], file: Any) -> None:
    target = console(file)
    for one in data:
        target.print(f"\n{one['index'] + 1}: {brief(one['continuation'])}", markup=False)
        rows = [
            (
                repr(token["token"]) if token["token"] is not None else "",
                token["token_id"],
                f"{token['raw']:.4f}",
                f"{token['processed']:.4f}",
            )
            for token in one["tokens"]
        ]
        target.print(make_table(("token", "id", "raw", "processed"), rows))
