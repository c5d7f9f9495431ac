"""`jaxinfer score`: how probable a model finds texts, or continuations of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import (
    ADAPTER,
    AnswerAdapterOptions,
    LogitOptions,
    ServingOptions,
    adapters_of_lines,
    as_json,
    open_llm,
    sampling_values,
)
from jaxinfer.cli.output import adapter_data, brief, console, open_output, write_json, write_text
from jaxinfer.cli.prompts import read_prompts, read_records
from jaxinfer.options import option
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.engine.request import Score

Named = dict[str, Any]  # {"text": ...} or {"prompt": ..., "continuation": ...}, and "adapter" in lines of files


@dataclass(frozen=True, kw_only=True)
class ScoreModelOptions(AnswerAdapterOptions, ServingOptions):
    """The model, the engine, and adapters."""


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    text: list[str] | None = option(
        None, "A text to score; its first token has no score. May be repeated.", "TEXT", "--text -t"
    )
    texts: Path | None = option(
        None,
        'A file of texts, one a line, or JSON lines {"text": "..."} in *.jsonl, with "adapter" where one has its own; '
        "-: standard input.",
        "PATH",
    )
    prompt: list[str] | None = option(None, "The text before the continuation; may be repeated.", "TEXT", "--prompt -p")
    continuation: list[str] | None = option(
        None, "The text to score; one for each prompt, or several for one prompt.", "TEXT", "--continuation -c"
    )
    file: Path | None = option(
        None,
        'JSON lines {"prompt": "...", "continuation": "..."}, with "adapter" where one has its own; -: standard input.',
        "PATH",
        "--file -f",
    )
    tokens: bool = option(False, "Show each token that is scored.")
    output: Path | None = option(None, "Write to this file when all scores are computed.", "PATH", "--output -o")
    as_json: bool = as_json("JSON lines: one object for each text or pair.")


def score(model_options: ScoreModelOptions, logit_options: LogitOptions, options: ScoreOptions) -> None:
    """Show how probable texts are under a model.

    Prints log-probabilities, in nats, of whole texts (--text, --texts) or of continuations after their prompts. The
    first token of a text is not scored: it is BOS where the tokenizer adds one. Each is given twice: raw, of the
    model's own distribution, and processed, after the sampling options given here. Without options both are equal. The
    checkpoint's generation_config is not used. Prompt and continuation are tokenized separately.
    """
    params = SamplingParams.from_dict(sampling_values(logit_options))
    placed = _items(options)
    items, adapters = [item for _, item in placed], adapters_of_lines(model_options, placed)
    columns = [[item[name] for item in items] for name in items[0]]
    with open_output(options.output) as target, open_llm(model_options) as llm:
        scores = llm.score(*columns, params=params, adapter=adapters)
        rows = enumerate(zip(items, scores, adapters, strict=True))
        data = [_data(llm, index, item, score, name) for index, (item, score, name) in rows]
        if options.as_json:
            for row in data:
                write_json(row, target)
        else:
            _print_totals(data, target, adapters if len(set(adapters)) > 1 else None)
            if "text" in items[0] and len(scores) > 1:
                write_text(_summary(scores), target)
            if options.tokens:
                _print_tokens(data, target)


def _items(options: ScoreOptions) -> list[tuple[str, Named]]:
    """Texts or pairs to score, with their places. Raises UsageError for nothing, and for texts and pairs together."""
    texts, pairs = (options.text, options.texts), (options.prompt, options.continuation, options.file)
    if any(texts) and any(pairs):
        raise UsageError("score takes texts (--text, --texts) or pairs (--prompt and --continuation, --file), not both")
    return _texts(*texts) if any(texts) else _pairs(options.prompt or [], options.continuation or [], options.file)


def _texts(texts: list[str] | None, file: Path | None) -> list[tuple[str, Named]]:
    if texts and file is not None:
        raise UsageError("texts come from --text or from --texts, not from both")
    if file is None:
        return [(f"text {number}", {"text": text}) for number, text in enumerate(texts or ())]
    if file.suffix in (".jsonl", ".ndjson", ".json"):
        return read_records(file, ("text",), (ADAPTER,))
    return [(line.where, {"text": line.prompt}) for line in read_prompts((), file)]


def _pairs(prompts: list[str], continuations: list[str], file: Path | None) -> list[tuple[str, Named]]:
    if file is not None:
        if prompts or continuations:
            raise UsageError("pairs come from --prompt and --continuation or from --file, not from both")
        names = ("prompt", "continuation", ADAPTER)
        records = read_records(file, names[:2], names[2:])
        return [(where, {name: record[name] for name in names if name in record}) for where, record in records]
    if not prompts or not continuations:
        raise UsageError("score needs --prompt and --continuation, or --file, or texts (--text, --texts)")
    if len(prompts) == 1:
        prompts = prompts * len(continuations)
    if len(prompts) != len(continuations):
        raise UsageError(f"{len(prompts)} prompts and {len(continuations)} continuations do not pair up")
    pairs = enumerate(zip(prompts, continuations, strict=True))
    return [(f"pair {number}", {"prompt": prompt, "continuation": text}) for number, (prompt, text) in pairs]


def _data(llm: "LLM", index: int, item: Named, score: "Score", adapter: str | None) -> dict[str, Any]:
    tokenizer = llm.client.prompts_of(adapter).tokenizer
    texts = [None if tokenizer is None else tokenizer.decode([token], False) for token in score.token_ids]
    each = zip(score.token_ids, texts, score.raw, score.processed, strict=True)
    return {
        "index": index,
        **item,
        **adapter_data(llm, adapter),
        "num_tokens": len(score.token_ids),
        "raw_total": score.raw_total,
        "processed_total": score.processed_total,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "is_greedy": score.is_greedy,
        "tokens": [
            {"token_id": token, "token": text, "raw": raw, "processed": processed}
            for token, text, raw, processed in each
        ],
    }


def _print_totals(data: list[dict[str, Any]], file: Any, adapters: list[str | None] | None) -> None:
    """The table of the scores; with a column of `adapters` if there are several."""
    names = [name for name in ("text", "prompt", "continuation") if name in data[0]]
    named = () if adapters is None else (ADAPTER,)
    titles = ("", *names, *named, "tokens", "raw", "per token", "perplexity", "processed", "greedy")
    rows = [
        (
            row["index"] + 1,
            *(brief(row[name], from_end=name == "prompt") for name in names),
            *(() if adapters is None else (adapters[row["index"]] or "",)),
            row["num_tokens"],
            f"{row['raw_total']:.4f}",
            f"{row['raw_total'] / row['num_tokens']:.4f}",
            f"{row['perplexity']:.4g}",
            f"{row['processed_total']:.4f}",
            "yes" if row["is_greedy"] else "no",
        )
        for row in data
    ]
    console(file).print(make_table(titles, rows, num_left=1 + len(names) + len(named)))


def _summary(scores: "Sequence[Score]") -> str:
    """One line for all texts together: loss and perplexity are means over tokens, not over texts."""
    raw = [value for score in scores for value in score.raw]
    whole = replace(scores[0], raw=raw)
    return f"{len(scores)} texts, {len(raw)} tokens: loss {whole.loss:.4f}, perplexity {whole.perplexity:.4g}\n"


def _print_tokens(data: list[dict[str, Any]], file: Any) -> None:
    target = console(file)
    for row in data:
        target.print(f"\n{row['index'] + 1}: {brief(row.get('text', row.get('continuation')))}", markup=False)
        rows = [
            (
                repr(token["token"]) if token["token"] is not None else "",
                token["token_id"],
                f"{token['raw']:.4f}",
                f"{token['processed']:.4f}",
            )
            for token in row["tokens"]
        ]
        target.print(make_table(("token", "id", "raw", "processed"), rows))
