"""`jaxinfer chat`: a conversation, typed or piped in."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.chat_session import ChatSession, Turn, TurnError
from jaxinfer.cli.command import ERROR, OK, PARTIAL, UsageError, say, sentence
from jaxinfer.cli.options import DraftedModelOptions, SamplingOptions, merge_params, open_llm, sampling_values
from jaxinfer.cli.output import (
    console,
    describe,
    end_line,
    note,
    print_logprobs,
    request_data,
    stream_answer,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.sampling import SamplingParams

PROMPT = ">>> "


def chat(
    model_options: DraftedModelOptions,
    sampling_options: SamplingOptions,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="JSON lines: one object for each turn.")] = False,
) -> int:
    """Talk with a model.

    In a pipe, each line is a turn. Lines that begin with / are commands; [bold]/help[/bold] lists them. Ctrl-C stops
    an answer, Ctrl-D ends the conversation.

    Sampling options that are not given come from the checkpoint's generation_config. Where neither --max-tokens nor the
    checkpoint limits an answer, it may fill what max_model_len leaves.
    """
    values = sampling_values(sampling_options)
    if values.get("n", 1) != 1:
        raise UsageError("a chat has one answer to each turn: --n is for jaxinfer generate")
    with open_llm(model_options, max_seqs=1) as llm:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ValueError(
                f"{model_options.model} has no chat template, so it cannot chat: use jaxinfer generate, "
                "or add a chat_template.jinja to its folder"
            )
        params = merge_params(llm.default_params, {**_length_of_answers(llm.default_params), **values})
        session = ChatSession(llm.name, params, llm.max_model_len, system)
        is_interactive = sys.stdin.isatty() and not as_json
        if is_interactive:
            return _converse(llm, session)
        return _read_turns(llm, session, as_json=as_json)


def _length_of_answers(defaults: "SamplingParams") -> dict[str, None]:
    """A chat has no use for the 16 tokens that stand where the checkpoint sets no limit: answers may take what fits."""
    from jaxinfer.sampling.params import SamplingParams

    return {"max_tokens": None} if defaults.max_tokens == SamplingParams().max_tokens else {}


def _converse(llm: "LLM", session: ChatSession) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() its history and editing keys
    note(f"{llm.name}, up to {session.max_model_len} tokens. /help lists commands, Ctrl-D leaves.")
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return OK
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit leaves")
            continue
        if not line.strip():
            continue
        if line.startswith("/"):
            try:
                reply = session.command(line)
            except (ValueError, OSError) as error:
                _complain(sentence(error))
                continue
            if reply is None:
                return OK
            console(stderr=True).print(reply, style="dim", markup=False, soft_wrap=True)
            continue
        try:
            turn = _answer(llm, session, line, is_interactive=True)
        except (ValueError, FloatingPointError) as error:
            _complain(sentence(error))
            continue
        if turn.output is None:
            note("stopped; what was said stays in the conversation")
        else:
            note(describe(llm, turn.output))
        if turn.is_out_of_room:
            note(session.out_of_room(turn))


def _read_turns(llm: "LLM", session: ChatSession, *, as_json: bool) -> int:
    """Every line of standard input is a turn; a turn that fails is told, and the next one goes on without it."""
    num_turns = num_failed = 0
    for line in sys.stdin:
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        is_command = line.startswith("/")
        try:
            if is_command:
                reply = session.command(line)
                if reply is None:
                    break
                say(reply)
                continue
            num_turns += 1
            turn = _answer(llm, session, line, is_interactive=False, is_quiet=as_json)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, FloatingPointError) as error:
            num_failed += 1
            num_turns += is_command
            if as_json:
                write_json({"turn": num_turns - 1, "input": line, "error": sentence(error)})
            say(f"error: {sentence(error)}")
            continue
        if as_json:
            write_json({"turn": num_turns - 1, "input": line, **_turn_data(session, turn)})
        if turn.is_out_of_room:
            say(f"warning: {session.out_of_room(turn)}")
    if num_failed == 0:
        return OK
    return PARTIAL if num_failed < num_turns else ERROR


def _answer(llm: "LLM", session: ChatSession, text: str, *, is_interactive: bool, is_quiet: bool = False) -> Turn:
    """One turn: the answer is written as it comes and becomes part of the conversation."""
    messages = session.with_user(text)
    prompt = llm.chat_prompt(messages)
    params, is_cut = session.fit(len(prompt))
    with _stoppable(is_interactive) as is_stopped:
        write = (lambda text: None) if is_quiet else write_text
        answer, output = stream_answer(llm, prompt, params, write, is_stopped=is_stopped)
    if not is_quiet:
        end_line(answer)
    if output is not None:
        answered = output.outputs[0]
        if answered.finish_reason == "error":
            raise TurnError(answered.error or "the answer was not computed")
        if not is_quiet:
            _write_logprobs(output, params)
    session.keep(messages, answer)
    is_out_of_room = is_cut and output is not None and output.outputs[0].finish_reason == "length"
    return Turn(answer, output, params, len(prompt), is_out_of_room)


def _write_logprobs(output, params: "SamplingParams") -> None:
    if output.prompt_logprobs is not None:
        print_logprobs("prompt", output.prompt_logprobs, params.prompt_logprobs or 0)
    if output.outputs[0].logprobs is not None:
        print_logprobs("answer", list(output.outputs[0].logprobs), params.logprobs or 0)


def _turn_data(session: ChatSession, turn: Turn) -> dict:
    assert turn.output is not None
    data = request_data(0, turn.output, turn.params)
    answer = data["outputs"][0]
    del answer["index"]
    message = {"role": "assistant", "content": answer.pop("text")}
    extra = {"prompt_logprobs": data["prompt_logprobs"]} if "prompt_logprobs" in data else {}
    return {
        "message": message,
        **answer,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_messages": len(session.messages),
        "is_out_of_room": turn.is_out_of_room,
        "timings": data["timings"],
        **extra,
    }


def _complain(message: str) -> None:
    console(stderr=True).print(message, style="red", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _stoppable(is_wanted: bool) -> Iterator:
    """Within, Ctrl-C is noted, not raised, so that no step of the engine is cut in two; a second one is raised."""
    pressed: list[int] = []
    if not is_wanted:
        yield lambda: False
        return

    def on_interrupt(number, frame) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
