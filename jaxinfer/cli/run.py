"""`jaxinfer run`: a conversation with a model, or one answer of it, after pulling what is not here."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.chat import AnsweringOptions, answer_once, length_of_answers, open_session, talk
from jaxinfer.cli.command import OK, UsageError, say
from jaxinfer.cli.options import (
    SamplingOptions,
    as_json,
    chosen_adapter,
    merge_params,
    model_argument,
    open_llm,
    sampling_values,
)
from jaxinfer.cli.output import describe, end_line, note, request_data, stream_answer, write_json, write_text
from jaxinfer.cli.pull import fits_here, sentence_of
from jaxinfer.options import argument, option

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM


@dataclass(frozen=True, kw_only=True)
class RunModelOptions(AnsweringOptions):
    """The model by position, a draft, and adapters."""

    model: str = model_argument("user/model, user/model:Q4_K_M, qwen3:0.6b, an alias, a folder, a GGUF file, or demo.")


@dataclass(frozen=True, kw_only=True)
class RunCommandOptions:
    prompt: str | None = argument(None, "Answer this alone; - reads it from standard input.", "PROMPT")
    system: str | None = option(None, "The system message.", "TEXT")
    yes: bool = option(False, "Download what is missing without asking.", flag="--yes -y")
    offline: bool = option(False, "Use only what is here, and ask no hub.")
    as_json: bool = as_json("JSON lines, one for each answer.")


def run(model_options: RunModelOptions, sampling_options: SamplingOptions, options: RunCommandOptions) -> int:
    """Talk with a model, or have one prompt answered.

    A model of the hub that is not here is pulled first, after a question on a terminal. Without a PROMPT it is
    [bold]jaxinfer chat[/bold]. A model without a chat template continues the prompt as it is.
    """
    values = sampling_values(sampling_options)
    if values.get("n", 1) != 1:
        raise UsageError("run gives one answer: --n is for jaxinfer generate")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty")
    from jaxinfer.store.pulled import offline

    with offline(options.offline):
        return _run(model_options, values, prompt, options)


def _run(model_options: RunModelOptions, values: dict[str, Any], prompt: str | None, options: RunCommandOptions) -> int:
    from jaxinfer.speculative import names_kind
    from jaxinfer.store import alias_options

    settings = alias_options(model_options.model)
    _have(model_options.model, model_options.revision, options.yes, model_options.quantize or settings.get("quantize"))
    draft = model_options.draft or settings.get("draft")
    if draft is not None and not names_kind(draft):
        _have(draft, None, options.yes)
    if prompt is None:
        return talk(model_options, values, options.system, as_json=options.as_json)
    adapter = chosen_adapter(model_options)
    with open_llm(model_options, max_seqs=1) as llm:
        tokenizer = llm.client.prompts_of(adapter).tokenizer
        if tokenizer is not None and tokenizer.chat_template is None:
            if options.system is not None:
                raise UsageError(f"{llm.name} has no chat template, so that it takes no --system")
            _continue(llm, prompt, values, adapter, as_json=options.as_json)
        else:
            session = open_session(llm, values, options.system, adapter)
            answer_once(llm, session, prompt, as_json=options.as_json)
    return OK


def _have(model: str, revision: str | None, is_agreed: bool, quantize: str | None = None) -> None:
    """Pulls the model, which `quantize` is for, if it is not here. Raises UsageError if that is not agreed to."""
    from jaxinfer.store import find_model, prepare
    from jaxinfer.store.pulled import is_offline

    if find_model(model, revision, fetch=False).path is not None:
        return
    if is_offline():
        find_model(model, revision)  # it may be in the hub's cache; raises if it is not
        return
    download = prepare(model, revision)
    fit = fits_here(download, quantize)
    say(sentence_of(download) + (f"\n{fit['text']}" if fit is not None else ""))
    if not is_agreed:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(f"{model} is not here: --yes downloads it, or jaxinfer pull {model}")
        say("download it? [Y/n]")
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise UsageError("nothing was downloaded")
    download.fetch()


def _continue(llm: "LLM", prompt: str, values: dict[str, Any], adapter: str | None, *, as_json: bool) -> None:
    params = merge_params(llm.default_params, {**length_of_answers(llm.default_params), **values})
    write = (lambda text: None) if as_json else write_text
    text, output = stream_answer(llm, prompt, params, write, adapter=adapter)
    assert output is not None
    if as_json:
        write_json(request_data(0, output, params))
    else:
        end_line(text)
        note(describe(llm, output))
