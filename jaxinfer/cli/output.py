"""Output to a terminal, a pipe or a file: streamed text, tables, JSON lines."""

import contextlib
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxinfer import progress
from jaxinfer.files import replacing
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from rich.console import Console

    from jaxinfer.api.llm import LLM
    from jaxinfer.engine.request import CompletionOutput, RequestOutput, TokenLogprob
    from jaxinfer.sampling import SamplingParams
    from jaxinfer.text.reasoning import AnswerSplitter

# Control characters except tab and newline are made visible, so that generated text cannot control the terminal.
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
_SLOW_FIRST_TOKEN = 1.0  # seconds, in which programs that are kept are traced or read
_VISIBLE |= {0x7F: "\u2421"} | dict.fromkeys(range(128, 160), "�")


def console(file: TextIO | None = None, *, stderr: bool = False) -> "Console":
    """A rich console for tables and colour. In a pipe, or with NO_COLOR, there is no colour; lines have 160 columns."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    target = file or (sys.stderr if stderr else sys.stdout)
    return Quiet(file=target, highlight=False, width=None if target.isatty() else 160)


def note(message: str) -> None:
    """Prints a dim line on standard error, if that is a terminal."""
    if sys.stderr.isatty():
        with progress.hidden():
            console(stderr=True).print(message, style="dim", markup=False, soft_wrap=True)


def write_text(text: str, file: TextIO | None = None) -> None:
    """Writes generated text; control characters are made visible on a terminal and kept in a pipe or file."""
    target = sys.stdout if file is None else file
    target.write(text.translate(_VISIBLE) if target.isatty() else text)
    target.flush()


def stream_answer(
    llm: "LLM",
    prompt: str | list[int],
    params: "SamplingParams",
    write: Callable[[str], None],
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    shows_waiting: bool = True,
    splitter: "AnswerSplitter | None" = None,
    adapter: str | None = None,
) -> "tuple[str, RequestOutput | None]":
    """Writes an answer as it is generated; returns its text, and the complete output unless it was stopped. With a
    `splitter`, reasoning is written before the text, which is returned without.

    Until the first token progress may use the current line, which must be empty. On a terminal, if programs were
    compiled for it or it took long, it is written with the second one: those that decode may be still to be compiled.
    """
    deltas = llm.stream(prompt, params, adapter=adapter)
    texts: list[str] = []
    output = None
    try:
        with progress.Stage("waiting for the first token", show=None if shows_waiting else False) as stage:
            num_compiled = progress.num_compiled()
            first = list(itertools.islice(deltas, 1))
            is_cold = progress.num_compiled() > num_compiled or stage.seconds > _SLOW_FIRST_TOKEN
            if progress.is_shown() and is_cold:
                first += itertools.islice(deltas, 1)
        has_reasoning = False
        for delta in itertools.chain(first, deltas):
            reasoning, text = "", delta.text
            if splitter is not None:
                reasoning, text = splitter.feed(delta.text, delta.finish_reason is not None)
                has_reasoning |= bool(reasoning)
            write(reasoning + ("\n\n" if text and has_reasoning and not any(texts) else "") + text)
            texts.append(text)
            output = delta.output or output
            if is_stopped():
                break
    finally:
        deltas.close()  # type: ignore[attr-defined]
    return "".join(texts), output


def end_line(text: str, file: TextIO | None = None) -> None:
    """Writes a newline after an answer that does not end with one."""
    if not text.endswith("\n"):
        write_text("\n", file)


def decode_rate(output: "RequestOutput") -> float | None:
    """Tokens per second of all answers after their first tokens; None if there are no such tokens."""
    timings = output.timings
    num_tokens = sum(max(len(answer.token_ids) - 1, 0) for answer in output.outputs)
    if timings is None or num_tokens == 0:
        return None
    seconds = timings.total_time - timings.time_to_first_token
    return num_tokens / seconds if seconds > 0 else None


def describe(llm: "LLM", output: "RequestOutput") -> str:
    """A request in one line: tokens, times, acceptance, why it ended."""
    answers = output.outputs
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    parts = [f"{num_tokens} tokens"]
    if output.timings is not None:
        parts[0] += f" in {output.timings.total_time:.2f} s"
        parts.append(f"first after {output.timings.time_to_first_token:.2f} s")
    if (rate := decode_rate(output)) is not None:
        parts.append(f"then {rate:.0f} tokens/s")
    if (drafts := _describe_drafts(answers)) is not None:
        parts.append(drafts)
    return " · ".join([*parts, *dict.fromkeys(_describe_end(llm, answer) for answer in answers)])


def _describe_drafts(answers: "list[CompletionOutput]") -> str | None:
    stats = [answer.speculation for answer in answers if answer.speculation is not None]
    if not stats:
        return None
    proposed, accepted = sum(stat.proposed for stat in stats), sum(stat.accepted for stat in stats)
    return f"{accepted} of {proposed} draft tokens accepted" if proposed else "no draft tokens"


def _describe_end(llm: "LLM", answer: "CompletionOutput") -> str:
    if answer.finish_reason == "length":
        return "ended by max_tokens"
    if answer.finish_reason == "stop":
        if answer.stop_reason in llm.eos_token_ids:
            return "ended by the model"
        kind = "token" if isinstance(answer.stop_reason, int) else "text"
        return f"ended by stop {kind} {answer.stop_reason!r}"
    return f"{answer.finish_reason}: {answer.error}" if answer.error else str(answer.finish_reason)


def write_logprobs(output: "RequestOutput", params: "SamplingParams", file: TextIO | None = None) -> None:
    """Prints the log-probabilities that a request has, a table for the prompt and one for each answer."""
    if output.prompt_logprobs is not None:
        _print_logprobs("prompt", output.prompt_logprobs, params.prompt_logprobs or 0, file)
    for answer in output.outputs:
        if answer.logprobs is not None:
            _print_logprobs(f"answer {answer.index + 1}", list(answer.logprobs), params.logprobs or 0, file)


def _print_logprobs(title: str, entries: "list[TokenLogprob | None]", num_top: int, file: TextIO | None) -> None:
    rows = []
    for data in (logprob_data(entry, num_top) for entry in entries if entry is not None):
        best = [", ".join(f"{_shown(token)} {token['logprob']:.3f}" for token in data["top"])] if num_top else []
        rows.append([_shown(data), data["token_id"], f"{data['logprob']:.4f}", data["rank"], *best])
    target = console(file)
    target.print(f"\n{title}", style="bold", markup=False)
    target.print(make_table(("token", "id", "logprob", "rank", *(["most probable"] if num_top else [])), rows))


def _shown(data: Mapping[str, Any]) -> str:
    return repr(data["token"]) if data["token"] is not None else str(data["token_id"])


def brief(text: Any, *, from_end: bool = False, limit: int = 40) -> str:
    """The start or the end of a text or of token ids, on one line."""
    shown = repr(text)
    if len(shown) <= limit:
        return shown
    return "…" + shown[-limit:] if from_end else shown[:limit] + "…"


def plain_cell(text: str) -> Any:
    """Text for rich in which [brackets] are not markup."""
    from rich.text import Text

    return Text(text)


def write_json(value: Any, file: TextIO | None = None) -> None:
    """One JSON object on one line, flushed. ASCII, so that no terminal or file encoding can break it."""
    target = sys.stdout if file is None else file
    target.write(json.dumps(json_ready(value), allow_nan=False) + "\n")
    target.flush()


def write_report(report: Any, text: Callable[[Any], str], *, as_json: bool) -> None:
    """Prints what a command found: as one JSON object, or as the text that is made of it."""
    if as_json:
        write_json(report)
    else:
        write_text(text(report))


def json_ready(value: Any) -> Any:
    """A value for JSON: non-finite numbers become "Infinity", "-Infinity" and "NaN", as in the JSON of protobuf."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def request_data(index: int, output: "RequestOutput", params: "SamplingParams") -> dict[str, Any]:
    """A request as JSON values."""
    answers = []
    for answer in output.outputs:
        data = {name: value for name, value in vars(answer).items() if name != "logprobs"}
        data["weights"] = [vars(span) for span in answer.weights]
        data["speculation"] = None if answer.speculation is None else vars(answer.speculation)
        if answer.logprobs is not None:
            data["logprobs"] = [logprob_data(entry, params.logprobs or 0) for entry in answer.logprobs]
        answers.append(data)
    data = {
        "index": index,
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": answers,
        "timings": asdict(output.timings) if output.timings is not None else None,
    }
    if output.prompt_logprobs is not None:
        data["prompt_logprobs"] = [
            None if entry is None else logprob_data(entry, params.prompt_logprobs or 0)
            for entry in output.prompt_logprobs
        ]
    return data


def adapter_data(llm: "LLM", name: str | None) -> dict[str, Any]:
    """The adapter that answered, as a row of a batch's answers has it; nothing for the model without one."""
    return {} if name is None else {"adapter": {"name": name, "fingerprint": llm.adapters[name].fingerprint}}


def logprob_data(entry: "TokenLogprob", num_top: int) -> dict[str, Any]:
    """A token's log-probability, and in "top" the `num_top` most probable tokens in order, which may include it."""
    every = [
        {"token_id": token, "token": candidate.decoded_token, "logprob": candidate.logprob, "rank": candidate.rank}
        for token, candidate in entry.items()
    ]
    if not num_top:
        return every[0]
    best = sorted((token for token in every if token["rank"] <= num_top), key=lambda token: token["rank"])
    return {**every[0], "top": best}


@contextlib.contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears when the block ends without an exception."""
    if path is None:
        yield sys.stdout
        return
    if path.exists() and not path.is_file():  # a device or a named pipe: nothing to rename over
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    path = path.resolve()  # a link stays a link
    umask = os.umask(0)
    os.umask(umask)
    with replacing(path) as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(raw.fileno())
        os.fchmod(raw.fileno(), path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
