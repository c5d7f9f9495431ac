"""Tells a model's reasoning from its answer, by the tags of its family, as the text streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True)
class Tags:
    """What stands before and after the reasoning, which is the first part of an answer."""

    opening: str
    closing: str


FAMILIES = {
    "think": Tags("<think>", "</think>"),  # Qwen 3, DeepSeek R1, GLM, QwQ, Nemotron
    "mistral": Tags("[THINK]", "[/THINK]"),
    "seed": Tags("<seed:think>", "</seed:think>"),
}


def tags_of(family: str, chat_template: str | None) -> Tags | None:
    """The tags of a family; of "auto", those that the chat template names. None where answers have no reasoning."""
    if family != "auto":
        return FAMILIES.get(family)
    found = (tags for tags in FAMILIES.values() if chat_template is not None and tags.closing in chat_template)
    return next(found, None)


def starts_inside(tags: Tags, prompt_end: str) -> bool:
    """Whether the prompt itself ends with the opening tag, as some templates write it."""
    return prompt_end.rstrip().endswith(tags.opening)


class ReasoningSplitter:
    """Splits a streamed text. What it has returned after some text does not depend on where the pieces were cut.

    White space around the tags is dropped. A text that does not begin with the opening tag is all content, unless
    `is_inside`.
    """

    def __init__(self, tags: Tags, is_inside: bool = False):
        self._tags = tags
        self._state: Literal["start", "inside", "after", "content"] = "start"
        self._was_opened = is_inside
        self._held = ""
        self._has_text = False  # of the reasoning

    def feed(self, text: str) -> Iterator[tuple[Kind, str]]:
        """Adds text; yields what is certain: nothing that may be a part of a tag."""
        self._held += text
        if self._state == "start":
            yield from self._start()
        if self._state == "inside":
            yield from self._inside()
        if self._state == "after":
            self._held = self._held.lstrip()
            self._state = "content" if self._held else "after"
        if self._state == "content" and self._held:
            yield "content", self._take(len(self._held))

    def finish(self) -> Iterator[tuple[Kind, str]]:
        """Yields what was held back when the answer has ended."""
        if self._state == "inside" or (self._state == "start" and self._was_opened):
            held = self._held.rstrip()
            if held:
                yield "reasoning", held
        elif self._held:
            yield "content", self._held
        self._held = ""

    def _start(self) -> Iterator[tuple[Kind, str]]:
        """Decides whether the answer begins with reasoning."""
        begun = self._held.lstrip()
        if begun.startswith(self._tags.opening):
            self._held = begun[len(self._tags.opening) :]
            self._state = "inside"
        elif not self._tags.opening.startswith(begun):
            self._state = "inside" if self._was_opened else "content"
        return iter(())

    def _inside(self) -> Iterator[tuple[Kind, str]]:
        if not self._has_text:
            self._held = self._held.lstrip()
        end = self._held.find(self._tags.closing)
        if end >= 0:
            text = self._take(end).rstrip()
            self._held = self._held[len(self._tags.closing) :]
            self._state = "after"
        else:
            text = self._take(len(self._held) - self._num_doubtful())
        if text:
            self._has_text = True
            yield "reasoning", text

    def _num_doubtful(self) -> int:
        """Characters at the end that may be the beginning of the closing tag, and white space before it."""
        closing, held = self._tags.closing, self._held
        count = next((n for n in range(min(len(closing) - 1, len(held)), 0, -1) if closing.startswith(held[-n:])), 0)
        rest = held[: len(held) - count]
        return count + len(rest) - len(rest.rstrip())

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def split(text: str, tags: Tags | None, is_inside: bool = False) -> tuple[str, str]:
    """A whole text's reasoning and content."""
    if tags is None:
        return "", text
    splitter = ReasoningSplitter(tags, is_inside)
    parts: dict[str, str] = {"reasoning": "", "content": ""}
    for kind, piece in (*splitter.feed(text), *splitter.finish()):
        parts[kind] += piece
    return parts["reasoning"], parts["content"]
