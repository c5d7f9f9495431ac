"""The state of a conversation: its messages, its sampling parameters, and the /commands that change them."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.output import json_ready, open_output

if TYPE_CHECKING:
    from jaxinfer.engine.request import RequestOutput
    from jaxinfer.sampling import SamplingParams

Message = dict[str, str]
HELP = """\
/help              this list
/reset             forget the conversation; the system message stays
/system TEXT       set the system message; without a text, remove it
/save FILE         write the conversation as JSON
/params            show the sampling parameters
/set NAME VALUE    change one, such as /set temperature 0.7; none unsets it
/quit              leave, as Ctrl-D does"""


class TurnError(ValueError):
    """A turn cannot be answered; the conversation is as it was before."""


@dataclass(frozen=True)
class Turn:
    """An answer. `output` is None if it was stopped. `is_out_of_room`: max_model_len ended it, not max_tokens."""

    text: str
    output: "RequestOutput | None"
    params: "SamplingParams"
    num_prompt_tokens: int
    is_out_of_room: bool


class ChatSession:
    """What is kept between turns. A turn that fails leaves it as it was."""

    def __init__(self, model: str, params: "SamplingParams", max_model_len: int, system: str | None = None):
        self.model, self.params, self.max_model_len, self.system = model, params, max_model_len, system
        self.turns: list[Message] = []
        self._saved: set[Path] = set()

    @property
    def messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*first, *self.turns]

    def with_user(self, text: str) -> list[Message]:
        """The conversation with a new message, which is not kept yet."""
        return [*self.messages, {"role": "user", "content": text}]

    def keep(self, messages: list[Message], answer: str) -> None:
        """Makes an answered message and its answer part of the conversation."""
        self.turns += [messages[-1], {"role": "assistant", "content": answer}]

    def fit(self, num_prompt_tokens: int) -> tuple["SamplingParams", bool]:
        """The parameters with max_tokens as large as there is room for, and whether that is less than was asked.

        Raises TurnError where no token fits, with both lengths.
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
        """Does what a /command says; returns what to show, or None to leave. Raises ValueError for a wrong one."""
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], str | None]] = {
            "help": lambda _: HELP,
            "reset": self._reset,
            "system": self._set_system,
            "save": self._save,
            "params": lambda _: self._show_params(),
            "set": self._set_param,
            "quit": lambda _: None,
            "exit": lambda _: None,
        }
        if name not in commands:
            raise ValueError(f"/{name} is no command: /help lists them")
        return commands[name](rest.strip())

    def _reset(self, _: str) -> str:
        num_turns = len(self.turns) // 2
        self.turns = []
        return f"forgot {num_turns} {'turn' if num_turns == 1 else 'turns'}"

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
        shown["max_tokens"] = "none: what fits" if self.params.max_tokens is None else shown["max_tokens"]
        return "\n".join(f"{name:<28}{value}" for name, value in shown.items())

    def _set_param(self, text: str) -> str:
        from jaxinfer.sampling.params import SamplingParams

        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name or not value.strip():
            raise ValueError("/set needs a name and a value: /set temperature 0.7")
        if name == "n":
            raise ValueError("a chat has one answer to each turn: n stays 1")
        self.params = SamplingParams.from_dict({**self._params(), name: _parse(value.strip())})
        return f"{name} = {_readable(getattr(self.params, name))}"


def _parse(text: str) -> Any:
    """JSON, with none, true and false as people write them; anything else is a text."""
    known = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _readable(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)
