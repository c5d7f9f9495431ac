"""`jaxinfer chat`: a conversation, typed or piped in."""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import ERROR, OK, PARTIAL, UsageError, say, sentence
from jaxinfer.cli.names import literal
from jaxinfer.cli.options import (
    AnswerAdapterOptions,
    DraftedModelOptions,
    SamplingOptions,
    as_json,
    chosen_adapter,
    merge_params,
    open_llm,
    sampling_values,
)
from jaxinfer.cli.output import (
    console,
    describe,
    end_line,
    json_ready,
    note,
    open_output,
    request_data,
    stream_answer,
    write_json,
    write_logprobs,
    write_text,
)
from jaxinfer.options import argument, option
from jaxinfer.tables import facts_text

if TYPE_CHECKING:
    from jaxinfer.api.llm import LLM
    from jaxinfer.engine.request import RequestOutput
    from jaxinfer.sampling import SamplingParams


Message = dict[str, str]
PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
HISTORY = "JAXINFER_CHAT_HISTORY"  # a file; empty keeps no history
PAUSE_SECONDS = 0.5  # without typing ahead, after which programs are compiled
HELP = """\
/help              this list
/reset             clear the conversation; the system message stays
/system TEXT       set the system message; without a text, remove it
/regen             answer the last message again
/edit [TEXT]       change the last message, and answer it again
/save FILE         write the conversation as JSON
/params            show the sampling parameters
/set NAME VALUE    change one, such as /set temperature 0.7; none removes it
/quit              leave, as Ctrl-D does

A message of several lines begins and ends with three quotation marks, or its
lines end in a backslash, or it is pasted."""


AGAIN = ("/regen", "/edit")  # commands that answer the last message again
TURN_ERRORS = (ValueError, OSError, FloatingPointError)  # that do not end the conversation


class TurnError(ValueError):
    """A turn cannot be answered; the conversation is unchanged."""


@dataclass(frozen=True)
class Turn:
    """An answer. `output` is None if the user stopped it; `is_out_of_room` is true if max_model_len ended it."""

    text: str
    output: "RequestOutput | None"
    params: "SamplingParams"
    num_prompt_tokens: int
    is_out_of_room: bool


class ChatSession:
    """The state between turns. A turn that fails leaves it unchanged."""

    def __init__(
        self,
        model: str,
        params: "SamplingParams",
        max_model_len: int,
        system: str | None = None,
        adapter: str | None = None,
    ):
        self.model, self.params, self.max_model_len, self.system = model, params, max_model_len, system
        self.adapter = adapter
        self.turns: list[Message] = []
        self._saved: set[Path] = set()

    @property
    def messages(self) -> list[Message]:
        return [*self._first, *self.turns]

    @property
    def _first(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str, *, is_again: bool = False) -> list[Message]:
        """The messages that a question is answered after, itself the last; with `is_again` in place of the last one."""
        turns = self.turns[:-2] if is_again else self.turns
        return [*self._first, *turns, {"role": "user", "content": text}]

    def keep(self, messages: list[Message], answer: str, *, is_again: bool = False) -> None:
        """Adds an answered message and its answer to the conversation, or puts them in place of the last ones."""
        turns = self.turns[:-2] if is_again else self.turns
        self.turns = [*turns, messages[-1], {"role": "assistant", "content": answer}]

    def last_message(self) -> str:
        """The user's last message. Raises ValueError where there is none."""
        if not self.turns:
            raise ValueError("there is no message yet")
        return self.turns[-2]["content"]

    def fit(self, num_prompt_tokens: int) -> tuple["SamplingParams", bool]:
        """The parameters with max_tokens limited to the remaining length, and whether that is less than requested.

        Raises TurnError, with both lengths, if no token fits.
        """
        room = self.max_model_len - num_prompt_tokens
        wanted = self.params.max_tokens
        if room < max(1, self.params.min_tokens):
            least = "" if self.params.min_tokens <= 1 else f" and min_tokens={self.params.min_tokens} do not fit: that"
            raise TurnError(
                f"the conversation has {num_prompt_tokens} tokens{least or ', which'} leaves no room in "
                f"max_model_len={self.max_model_len}: /reset starts a new one"
            )
        if wanted is not None and wanted <= room:
            return self.params, False
        return replace(self.params, max_tokens=room), True

    def out_of_room(self, turn: Turn) -> str:
        return (
            f"the answer was cut: with {turn.num_prompt_tokens} tokens before it the conversation has reached "
            f"max_model_len={self.max_model_len}; /reset starts a new one"
        )

    def command(self, line: str) -> str | None:
        """Runs a /command; returns the text to show, or None to leave. Raises ValueError for a wrong command."""
        name, _, rest = line[1:].partition(" ")
        name = {"?": "help", "clear": "reset", "bye": "quit", "exit": "quit"}.get(name, name)  # of Ollama
        commands: dict[str, Callable[[str], str | None]] = {
            "help": lambda _: HELP,
            "reset": self._reset,
            "system": self._set_system,
            "save": self._save,
            "params": lambda _: self._show_params(),
            "set": self._set_param,
            "quit": lambda _: None,
        }
        if name not in commands:
            raise ValueError(f"/{name} is not a command: /help lists them")
        return commands[name](rest.strip())

    def _reset(self, _: str) -> str:
        num_turns = len(self.turns) // 2
        self.turns = []
        return f"cleared {num_turns} {'turn' if num_turns == 1 else 'turns'}"

    def _set_system(self, text: str) -> str:
        self.system = text or None
        return f"system message: {self.system}" if text else "no system message"

    def _save(self, name: str) -> str:
        if not name:
            raise ValueError("/save needs the name of a file")
        path = Path(os.path.expanduser(name))
        if path.exists() and path.resolve() not in self._saved:
            raise FileExistsError(f"{path} exists already: choose another name")
        content = {"model": self.model, "params": self._params(), "messages": self.messages}
        with open_output(path) as file:
            file.write(json.dumps(json_ready(content), indent=2, ensure_ascii=False) + "\n")
        self._saved.add(path.resolve())
        return f"saved {len(self.messages)} messages in {path}"

    def _params(self) -> dict[str, Any]:
        return {field.name: getattr(self.params, field.name) for field in fields(self.params)}

    def _show_params(self) -> str:
        shown = {name: _readable(value) for name, value in self._params().items() if name != "n"}
        shown["max_tokens"] = "none: as many as fit" if self.params.max_tokens is None else shown["max_tokens"]
        return facts_text(shown).rstrip("\n")

    def _set_param(self, text: str) -> str:
        from jaxinfer.sampling.params import SamplingParams, our_names

        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name or not value.strip():
            raise ValueError("/set needs a name and a value: /set temperature 0.7")
        if name == "n":
            raise ValueError("a chat has one answer per turn: n stays 1")
        given = our_names({name: literal(value.strip())})
        self.params = SamplingParams.from_dict({**self._params(), **given})
        return "\n".join(f"{name} = {_readable(getattr(self.params, name))}" for name in given) or "nothing changes"


def _readable(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    model_name: str | None = argument(
        None, "A checkpoint's folder, a GGUF file, a hub id, an alias, or demo; or as --model.", "MODEL"
    )
    system: str | None = option(None, "The system message.", "TEXT")
    as_json: bool = as_json("JSON lines: one object for each turn.")


@dataclass(frozen=True, kw_only=True)
class AnsweringOptions(AnswerAdapterOptions, DraftedModelOptions):
    """The model, a draft, and adapters."""


@dataclass(frozen=True, kw_only=True)
class ChatModelOptions(AnsweringOptions):
    """The model, which may be given by position, a draft, and adapters."""

    model: str | None = option(  # type: ignore[assignment]
        None, "The model by name.", "MODEL", "--model -m", group="Model"
    )


def chat(model_options: ChatModelOptions, sampling_options: SamplingOptions, options: ChatOptions) -> int:
    """Talk with a model.

    In a pipe, each line is a turn. Lines that begin with / are commands; [bold]/help[/bold] lists them. Ctrl-C stops
    an answer, Ctrl-D ends the conversation.

    Sampling options that are not given come from the checkpoint's generation_config. If neither --max-tokens nor the
    checkpoint limits an answer, max_model_len does.
    """
    values = sampling_values(sampling_options)
    if values.get("n", 1) != 1:
        raise UsageError("a chat has one answer per turn: --n is for jaxinfer generate")
    if (options.model_name is None) == (model_options.model is None):
        raise UsageError("chat takes one model: jaxinfer chat MODEL, such as jaxinfer chat demo")
    model_options = replace(model_options, model=options.model_name or model_options.model)
    return talk(model_options, values, options.system, as_json=options.as_json)


def talk(model_options: AnsweringOptions, values: dict[str, Any], system: str | None, *, as_json: bool) -> int:
    """Loads the model, and has a conversation until its input ends; returns the exit code."""
    adapter = chosen_adapter(model_options)
    with open_llm(model_options, max_seqs=1) as llm:
        session = open_session(llm, values, system, adapter)
        is_interactive = sys.stdin.isatty() and not as_json
        if is_interactive:
            with _compiling_behind(llm) as is_typing:
                return _converse(llm, session, Terminal(), is_typing)
        return _read_turns(llm, session, as_json=as_json)


@contextlib.contextmanager
def _compiling_behind(llm: "LLM") -> Iterator[threading.Event]:
    """Compiles programs in a thread, one after another, while the event that is given is set: the first message waits
    for those that it needs only, and no later one for any."""
    is_typing, is_over = threading.Event(), threading.Event()

    def is_stopped() -> bool:
        while not is_over.is_set():
            is_typing.wait()
            # A message that is piped in comes at once: it is answered first.
            if not is_over.wait(PAUSE_SECONDS) and is_typing.is_set():
                break
        return is_over.is_set()

    def compile_programs() -> None:
        with contextlib.suppress(Exception):  # a message that needs the program says what failed
            llm.engine.compile_ahead(is_stopped)

    thread = threading.Thread(target=compile_programs, name="jaxinfer compile", daemon=True)
    thread.start()
    try:
        yield is_typing
    finally:
        is_over.set()
        is_typing.set()
        thread.join()


def open_session(llm: "LLM", values: dict[str, Any], system: str | None, adapter: str | None = None) -> ChatSession:
    """A conversation with a model, or with an adapter of it. `values` are sampling parameters; `system` None takes the
    alias's system prompt.

    Raises ValueError for a model without a chat template.
    """
    tokenizer = llm.client.prompts_of(adapter).tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError(
            f"{llm.name} has no chat template, so it cannot chat: use jaxinfer generate, "
            "or add a chat_template.jinja to its folder"
        )
    params = merge_params(llm.default_params, {**length_of_answers(llm.default_params), **values})
    if system is None:
        system = llm.client.system
    llm.client.system = None  # the session has it, where /system changes it
    return ChatSession(llm.name, params, llm.max_model_len, system, adapter)


def answer_once(llm: "LLM", session: ChatSession, text: str, *, as_json: bool) -> None:
    """One question and its answer. Raises TurnError if the question does not fit."""
    turn = _answer(llm, session, text, is_quiet=as_json)
    if as_json:
        write_json({"input": text, **_turn_data(session, turn)})
    elif turn.output is not None:
        note(describe(llm, turn.output))
    if turn.is_out_of_room:
        say(f"warning: {session.out_of_room(turn)}")


def length_of_answers(defaults: "SamplingParams") -> dict[str, None]:
    """Removes the default limit of 16 tokens, unless the checkpoint sets a limit."""
    from jaxinfer.sampling.params import SamplingParams

    return {"max_tokens": None} if defaults.max_tokens == SamplingParams().max_tokens else {}


def _converse(llm: "LLM", session: ChatSession, terminal: "Terminal", is_typing: threading.Event) -> int:
    """Answers what is typed until the input ends; `is_typing` is set while nothing is answered."""
    note(f"{llm.name}, up to {session.max_model_len} tokens. /help lists commands, Ctrl-D leaves.")
    while True:
        is_typing.set()
        try:
            line = terminal.message()
        except EOFError:
            print()
            return OK
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit leaves")
            continue
        if not line.strip():
            continue
        is_typing.clear()
        try:
            reply = _reply(llm, session, line, lambda text: terminal.read(PROMPT, text), stops=True)
        except TURN_ERRORS as error:
            console(stderr=True).print(sentence(error), style="red", markup=False, soft_wrap=True)
            continue
        if reply is None:
            return OK
        if isinstance(reply, str):
            console(stderr=True).print(reply, style="dim", markup=False, soft_wrap=True)
            continue
        stopped = "stopped; the partial answer stays in the conversation"
        note(stopped if reply.output is None else describe(llm, reply.output))
        if reply.is_out_of_room:
            note(session.out_of_room(reply))


def _reply(
    llm: "LLM", session: ChatSession, line: str, edit: Callable[[str], str] | None = None, **answering: Any
) -> str | Turn | None:
    """The reply to a line: the text of a command, None of one that leaves, or the turn with the model's answer.
    `edit` lets the user change a text; `answering` is as of `_answer`. Raises one of `TURN_ERRORS`."""
    name, _, text = line.partition(" ")
    is_again = name in AGAIN
    if not is_again:
        return session.command(line) if line.startswith("/") else _answer(llm, session, line, **answering)
    last = session.last_message()
    text = last if name == "/regen" else text.strip()
    if not text:
        if edit is None:
            raise ValueError("/edit needs the new text of the last message")
        try:
            text = edit(last)
        except (EOFError, KeyboardInterrupt):
            raise ValueError("nothing is changed") from None
    return _answer(llm, session, text, is_again=True, **answering)


def _read_turns(llm: "LLM", session: ChatSession, *, as_json: bool) -> int:
    """Each line of standard input is a turn; a failed turn is reported and left out of the conversation."""
    num_turns = num_failed = 0
    for line in sys.stdin:
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        is_command = line.startswith("/") and line.partition(" ")[0] not in AGAIN
        try:
            num_turns += not is_command
            reply = _reply(llm, session, line, is_quiet=as_json)
        except BrokenPipeError:
            raise
        except TURN_ERRORS as error:
            num_failed += 1
            num_turns += is_command
            if as_json:
                write_json({"turn": num_turns - 1, "input": line, "error": sentence(error)})
            say(f"error: {sentence(error)}")
            continue
        if reply is None:
            break
        if isinstance(reply, str):
            say(reply)
            continue
        if as_json:
            write_json({"turn": num_turns - 1, "input": line, **_turn_data(session, reply)})
        if reply.is_out_of_room:
            say(f"warning: {session.out_of_room(reply)}")
    if num_failed == 0:
        return OK
    return PARTIAL if num_failed < num_turns else ERROR


def _answer(
    llm: "LLM",
    session: ChatSession,
    text: str,
    *,
    is_again: bool = False,
    stops: bool = False,
    is_quiet: bool = False,
) -> Turn:
    """One turn: the answer is streamed and added to the conversation, or replaces the last one.

    With `stops`, Ctrl-C ends the answer.
    """
    messages = session.ask(text, is_again=is_again)
    prompt = llm.chat_prompt(messages, adapter=session.adapter)
    params, is_cut = session.fit(len(prompt))
    with _stoppable(stops) as is_stopped:
        write = (lambda text: None) if is_quiet else write_text
        formatted, splitter = llm.answer_format.params(params), llm.answer_format.splitter(prompt)
        more: dict[str, Any] = {"splitter": splitter, "adapter": session.adapter}
        answer, output = stream_answer(llm, prompt, formatted, write, is_stopped=is_stopped, **more)
    if not is_quiet:
        end_line(answer)
    if output is not None:
        answered = output.outputs[0]
        if answered.finish_reason == "error":
            raise TurnError(answered.error or "the answer failed")
        if not is_quiet:
            write_logprobs(output, params)
    session.keep(messages, answer, is_again=is_again)
    is_out_of_room = is_cut and output is not None and output.outputs[0].finish_reason == "length"
    return Turn(answer, output, params, len(prompt), is_out_of_room)


def _turn_data(session: ChatSession, turn: Turn) -> dict:
    assert turn.output is not None
    data = request_data(0, turn.output, turn.params)
    answer = data["outputs"][0]
    del answer["index"], answer["text"]
    return {
        "message": {"role": "assistant", "content": turn.text},
        **answer,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_messages": len(session.messages),
        "is_out_of_room": turn.is_out_of_room,
        **{name: data[name] for name in ("timings", "prompt_logprobs") if name in data},
    }


@contextlib.contextmanager
def _stoppable(is_wanted: bool) -> Iterator:
    """Within the block Ctrl-C sets a flag, so that no engine step is interrupted; a second Ctrl-C is raised."""
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


def read_message(read: Callable[[str], str]) -> str:
    """A message of one line or several, from what reads a line after a prompt.

    A line that begins with three quotation marks begins a text that ends with three; a line that ends in a backslash
    goes on in the next one.
    """
    line = read(PROMPT)
    if not line.lstrip().startswith(QUOTES):
        while line.endswith("\\"):
            line = line[:-1] + "\n" + read(MORE)
        return line
    text = line.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        text += "\n" + read(MORE)
    return text.rstrip().removesuffix(QUOTES).strip("\n")


class Terminal:
    """Lines typed at a terminal, with editing keys and a history. What is pasted is one text, whatever lines it has."""

    def __init__(self, **streams: Any):
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(history=_history(), **streams)

    def read(self, prompt: str, text: str = "") -> str:
        """A line, or what was pasted; `text` is there to edit. Raises EOFError, KeyboardInterrupt."""
        return self._session.prompt(prompt, default=text)

    def message(self) -> str:
        """A message, as `read_message` reads it."""
        return read_message(self.read)


def history_file() -> Path | None:
    """The file of the history; None for none."""
    if (given := os.environ.get(HISTORY)) is not None:
        return Path(given).expanduser() if given else None
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "jaxinfer" / "chat_history"


def _history() -> Any:
    """The history in its file, which only its owner may read; in memory where no such file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    with contextlib.suppress(OSError, RuntimeError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            return FileHistory(path)
    return InMemoryHistory()
