"""Renders chat templates: messages to the text of the prompt, with the origin of every control token.

How message content is kept from imitating a role. Rendering gives one string, and a tokenizer cannot see that the
`<|im_end|>` in it came out of a user's message. Three designs were weighed. Replacing content by sentinels breaks
templates that look into it (`content.split('</think>')`, `| trim`). Breaking up every control string in the content
survives transforms, but not joins: two fields side by side, or `replace` taking out a middle, put the pieces
together again. So the *template's* literals are marked instead (`provenance.py`): the chat is rendered once plainly,
which is the result, and once with marks around the control tokens the template writes. What is not provably the
template's is text. Content needs no detection at all, so no trick in it matters; and a chat whose control tokens
are all the template's, which is nearly every chat, is encoded as one string, with exactly the ids Transformers
gives. `encoding.py` does the encoding.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.nodes

from jaxinfer.text.histories import HistoryForm, fitted, needs_form, probe
from jaxinfer.text.limits import ChatTemplateError, ChatTemplateLimitError, Meter
from jaxinfer.text.messages import (
    ROLE_PATTERN,
    Message,
    check_messages,
    check_template_kwargs,
    check_tools,
    text_leaves,
)
from jaxinfer.text.provenance import ROLE_FUNCTION, ControlStrings, extract_literals, split_marks
from jaxinfer.text.sandbox import MAX_TEMPLATE_CHARS, NOW, ChatEnvironment

__all__ = ["ChatTemplate", "ChatTemplateError", "ChatTemplateLimitError", "RenderedChat"]


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat.

    `trusted_spans` are the parts `[start, end)` of `text` in which the template itself wrote a control token or a
    piece of one; ascending. `content` is all text of the messages, tools and template variables, joined.
    `doubtful` is template text that holds control tokens but could not be told from content in this chat.
    """

    text: str
    trusted_spans: tuple[tuple[int, int], ...]
    content: str = field(repr=False, default="")
    doubtful: str = field(repr=False, default="")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source, from the checkpoint; never from a request.
        special_tokens: Variables such as `bos_token`.
        control_tokens: Every string the tokenizer turns into a control token.
        time_limit: CPU seconds of this thread for one `render`.

    Raises ChatTemplateError: the source is too long or does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Collection[str] = (),
        time_limit: float = 1.0,
    ):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed"
            )
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._time_limit = time_limit
        self._control = ControlStrings(control_tokens)
        environment = ChatEnvironment()
        try:
            tree = environment.parse(source)
            self._strings = _constants(tree)
            self._literals = extract_literals(tree, self._control, self._special_tokens)
            self._template = environment.compile_tree(tree)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._reads_parts = "text" in self._strings

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render a chat; the text equals that of Transformers' `apply_chat_template(tokenize=False)` for the same chat
        in the form that the template reads (`histories.py`).

        With `continue_final_message` the text ends where the last message's content ends. Where the template has
        no case for a list of text parts, the parts are joined with newlines.

        Raises:
            ValueError: Messages, tools or variables that are not as `messages.py` says.
            ChatTemplateError: The template refused the chat or failed.
            ChatTemplateLimitError: It took over `time_limit`, or made more than 4x the input + its own length + 64 Ki
                characters.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other; pass "
                "add_generation_prompt=False to continue the last message"
            )
        chat = check_messages(messages)
        if continue_final_message and chat[-1].get("tool_calls"):
            raise ValueError("continue_final_message: a message with tool_calls cannot be continued")
        chat = fitted(chat, self.form if needs_form(chat) else None)
        plain_tools = check_tools(tools) or None
        keywords = check_template_kwargs(template_kwargs or {}, self._special_tokens)
        content = "".join(text_leaves([chat, plain_tools, keywords])) + _joined_parts(chat)
        opening, closing, tag = self._unused_characters(content)
        for message in chat:
            if isinstance(message.get("content"), list) and not self._reads_parts:
                message["content"] = "\n".join(part["text"] for part in message["content"])
        roles = {message["role"] for message in chat} | self._strings
        variables = self._variables(chat, plain_tools, add_generation_prompt, keywords)
        run = _Run(self, variables, roles, opening, closing)
        # Non-string leaves (numbers, punctuation of JSON) count too: 16 characters for every value is generous.
        num_input = len(content) + 16 * _num_values([chat, plain_tools, keywords])
        meter = Meter(max_chars=4 * num_input + len(self.source) + 65536, time_limit=self._time_limit)
        now = NOW.set(datetime.now())
        try:
            with meter.running():
                text, spans, doubtful = run.text_and_spans()
                if continue_final_message:
                    text = text[: _end_of_content(text, run.with_messages(_tagged(chat, tag + " ")), tag)]
        finally:
            NOW.reset(now)
        spans = tuple((start, end) for start, end in spans if end <= len(text))
        return RenderedChat(text, spans, content, doubtful)

    @cached_property
    def form(self) -> HistoryForm:
        """The form that the template reads, learned from small chats that it renders."""
        return probe(self._try)

    def _try(self, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """The text of a small chat; None where the template fails on it."""
        variables = self._variables(chat, tools, True, {})
        now = NOW.set(datetime.now())
        try:
            with Meter(max_chars=len(self.source) + 65536, time_limit=self._time_limit / 4).running():
                return _Run(self, variables, set(), "", "").plain_text()
        except ChatTemplateError:
            return None
        finally:
            NOW.reset(now)

    def _variables(
        self, chat: Sequence[Message], tools: Any, add_generation_prompt: bool, keywords: Mapping[str, Any]
    ) -> dict[str, Any]:
        names = {"messages": chat, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return {**self._special_tokens, **keywords, **names}

    def _unused_characters(self, content: str) -> list[str]:
        """Three private-use characters that occur neither in the content nor in the template."""
        chosen: list[str] = []
        while len(chosen) < 3:
            char = chr(0xF0000 + secrets.randbelow(0xFFFD))
            if char not in content and char not in self.source and char not in chosen:
                chosen.append(char)
        return chosen


class _Run:
    """One chat on its way through the template: rendered plainly, then with marks."""

    def __init__(self, template: ChatTemplate, variables: dict[str, Any], roles: set[str], opening: str, closing: str):
        self._template = template._template
        self._literals = template._literals
        self._variables = variables
        self._roles = roles
        self._marks = (opening, closing)
        self._trusted = {lit.text[start:end] for lit in self._literals for start, end in lit.spans} | roles

    def plain_text(self) -> str:
        return self._render(())

    def with_messages(self, chat: Sequence[Message]) -> str:
        """The plain text of other messages."""
        self._variables = {**self._variables, "messages": chat}
        return self.plain_text()

    def text_and_spans(self) -> tuple[str, Sequence[tuple[int, int]], str]:
        """The plain text, the trusted spans, and the literals that could not be marked."""
        text = self.plain_text()
        everything = range(len(self._literals))
        spans = self._marked_spans(everything, text)
        if spans is not None:
            return text, spans, ""
        # Some literal is both printed and looked for in content (`{% set end = '</think>' %}`), and its mark changed
        # what the template does. Keep the others.
        usable = [index for index in everything if self._marked_spans((index,), text) is not None]
        spans = self._marked_spans(usable, text)
        kept = usable if spans is not None else []
        lost = "\n".join(self._literals[index].text for index in everything if index not in kept)
        return text, spans or (), lost

    def _marked_spans(self, indices: Sequence[int], text: str) -> list[tuple[int, int]] | None:
        try:
            parsed = split_marks(self._render(indices), *self._marks, self._trusted)
        except ChatTemplateLimitError:
            raise
        except ChatTemplateError:
            return None
        return parsed[1] if parsed is not None and parsed[0] == text else None

    def _render(self, marked: Sequence[int]) -> str:
        variables: dict[str, Any] = {literal.name: literal.text for literal in self._literals}
        for index in marked:
            variables[self._literals[index].name] = self._literals[index].marked(*self._marks)
        variables[ROLE_FUNCTION] = self._mark_role if marked else lambda role: role
        try:
            return self._template.render({**self._variables, **variables})
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused this chat: {error}") from error
        except Exception as error:
            raise ChatTemplateError(
                f"the chat template failed on this chat: {type(error).__name__}: {error}"
            ) from error

    def _mark_role(self, role: Any) -> Any:
        if isinstance(role, str) and role in self._roles and ROLE_PATTERN.fullmatch(role):
            return self._marks[0] + role + self._marks[1]
        return role


def _constants(tree: jinja2.nodes.Template) -> set[str]:
    """The string constants and attribute names of a template."""
    strings = {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return strings | {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}


def _num_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_num_values, value.values()))
    return 1 + sum(map(_num_values, value)) if isinstance(value, list) else 1


def _joined_parts(chat: Sequence[Mapping[str, Any]]) -> str:
    """The text parts of the messages without what stands between them, as templates print them."""
    lists = (message["content"] for message in chat if isinstance(message.get("content"), list))
    return "".join(part["text"] for parts in lists for part in parts)


def _tagged(chat: Sequence[Message], tag: str) -> list[Message]:
    """The chat with `tag` at the end of its last message's text, to find that end in the rendered chat."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        return [*chat[:-1], {**chat[-1], "content": content + tag}]
    if not content:
        raise ValueError("continue_final_message needs a last message with text to continue")
    last = {**content[-1], "text": content[-1]["text"] + tag}
    return [*chat[:-1], {**chat[-1], "content": [*content[:-1], last]}]


def _end_of_content(text: str, tagged: str, tag: str) -> int:
    """The end of the last message's content in `text`, by the same chat with a tag and a space after that content. If
    the template trimmed the space, it trims the content too. A template may print the content more than once: its last
    end counts."""
    at = tagged.rfind(tag)
    is_trimmed = tagged[at + 1 : at + 2] != " "
    before = re.sub(rf"{tag} |\s*{tag}(?! )", "", tagged[:at].rstrip() if is_trimmed else tagged[:at])
    if at < 0 or not text.startswith(before):
        raise ChatTemplateError(
            "continue_final_message: the template does not print the end of the last message, so there is "
            "nothing to continue"
        )
    return len(before)
