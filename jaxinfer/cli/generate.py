"""`jaxinfer generate`: answers to prompts from the command line, a file or a pipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jaxinfer.cli.command import ERROR, OK, PARTIAL, say
from jaxinfer.cli.options import (
    AnswerAdapterOptions,
    DraftedServingOptions,
    HostsOptions,
    SamplingOptions,
    adapters_of_lines,
    as_json,
    follow,
    join_hosts,
    merge_params,
    open_llm,
    sampling_values,
)
from jaxinfer.cli.output import (
    adapter_data,
    brief,
    describe,
    end_line,
    note,
    open_output,
    request_data,
    stream_answer,
    write_json,
    write_logprobs,
    write_text,
)
from jaxinfer.cli.prompts import PromptLine, read_prompts
from jaxinfer.options import argument, option

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.engine.request import RequestOutput
    from jaxinfer.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GenerateModelOptions(AnswerAdapterOptions, DraftedServingOptions):
    """The model, the engine, a draft, and adapters."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompts: list[str] | None = argument(None, "Texts to continue; - reads one from standard input.", "PROMPT")
    file: Path | None = option(
        None,
        'Prompts from a file (-: standard input), one per line; in .jsonl, {"prompt": "...", "seed": 1, ...} with '
        'sampling parameters of its own, and "adapter": the name of the one that answers it, or null.',
        "PATH",
        "--file -f",
    )
    output: Path | None = option(None, "Write to this file when all answers are complete.", "PATH", "--output -o")
    as_json: bool = as_json("JSON lines, one for each prompt.")


def generate(
    model_options: GenerateModelOptions,
    hosts_options: HostsOptions,
    sampling_options: SamplingOptions,
    options: GenerateOptions,
) -> int:
    """Continue prompts.

    A single prompt is streamed; several are generated together and printed in order. Prompts reach the model
    unchanged: for conversations with an assistant use [bold]chat[/bold]. Sampling options that are not given come from
    the checkpoint's generation_config.
    """
    values = sampling_values(sampling_options)
    if not join_hosts(hosts_options):
        return follow(model_options)
    lines = read_prompts(options.prompts or (), options.file)
    adapters = adapters_of_lines(model_options, [(line.where, line.sampling) for line in lines])
    with open_output(options.output) as target:
        with open_llm(model_options) as llm:
            outputs = llm.on_leader(lambda: _generate(llm, lines, values, adapters, target, options))
        return _print_failures(lines, outputs or [])


def _generate(
    llm: "LLM",
    lines: list[PromptLine],
    values: dict,
    adapters: list[str | None],
    target: TextIO,
    options: GenerateOptions,
) -> list["RequestOutput"]:
    params = _params(llm, lines, values)
    if len(lines) == 1 and params[0].n == 1 and not options.as_json and options.output is None:
        return [_stream(llm, lines[0], params[0], adapters[0], target)]
    outputs = llm.generate([line.prompt for line in lines], params, adapter=adapters)
    for index, (output, own_params, name) in enumerate(zip(outputs, params, adapters, strict=True)):
        if options.as_json:
            coordinates = [llm.coordinate(output, answer.index).to_dict() for answer in output.outputs]
            told = request_data(index, output, own_params) | adapter_data(llm, name)
            write_json({**told, "coordinates": coordinates}, target)
        else:
            by = f", {'no adapter' if name is None else f'adapter {name}'}" if len(set(adapters)) > 1 else ""
            _write_answers(output, own_params, target, heading=f"{index + 1}/{len(lines)}{by}")
    return outputs


def _params(llm: "LLM", lines: list[PromptLine], values: dict) -> list["SamplingParams"]:
    from jaxinfer.sampling.params import SamplingParamsError

    params = []
    for line in lines:
        try:
            params.append(merge_params(llm.default_params, {**values, **line.sampling}))
        except SamplingParamsError as error:
            if not line.sampling:
                raise
            raise SamplingParamsError(error.parameter, f"{line.where}: {error}") from None
    return params


def _stream(
    llm: "LLM", line: PromptLine, params: "SamplingParams", adapter: str | None, file: TextIO
) -> "RequestOutput":
    text, output = stream_answer(llm, line.prompt, params, lambda text: write_text(text, file), adapter=adapter)
    assert output is not None
    end_line(text, file)
    write_logprobs(output, params, file)
    note(f"{describe(llm, output)} · seed {output.outputs[0].seed}")
    return output


def _write_answers(output: "RequestOutput", params: "SamplingParams", file: TextIO, heading: str) -> None:
    prompt = output.prompt if output.prompt is not None else output.prompt_token_ids
    for answer in output.outputs:
        number = f", answer {answer.index + 1}/{len(output.outputs)}" if len(output.outputs) > 1 else ""
        write_text(f"=== {heading}{number}: {brief(prompt, limit=70)}\n{answer.text}", file)
        end_line(answer.text, file)
    write_logprobs(output, params, file)


def _print_failures(lines: list[PromptLine], outputs: list["RequestOutput"]) -> int:
    """Prints the errors of failed answers; returns the exit code."""
    num_failed = 0
    for line, output in zip(lines, outputs, strict=True):
        failed = [answer for answer in output.outputs if answer.finish_reason == "error"]
        num_failed += bool(failed)
        for answer in failed[:1]:
            say(f"error: {line.where}: {answer.error}")
    if num_failed == 0:
        return OK
    if len(lines) > 1:
        say(f"error: {num_failed} of {len(lines)} prompts failed")
    return PARTIAL if num_failed < len(lines) else ERROR
