"""Tells a model's reasoning from its answer, by the tags of its family, as the text streams."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxinfer.text.tokenizer import Tokenizer

NUM_PROMPT_END = 32  # tokens
Kind = Literal["reasoning", "content"]
_TO_TOOL = re.compile(r"(?:^|\s)to=(?!assistant\b|user\b|all\b)")


@dataclass(frozen=True)
class Tags:
    """The texts before and after the reasoning, which is the first part of an answer. `label`: a word behind
    `opening` that is no part of it."""

    opening: str
    closing: str
    label: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def is_named_in(self, chat_template: str) -> bool:
        return self.closing in chat_template


@dataclass(frozen=True)
class Channels:
    """An answer of several messages, each with a header that names its channel (OpenAI's Harmony format): those of the
    channel `analysis`, and those to a tool, are the reasoning."""

    markers: tuple[str, ...] = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

    def is_named_in(self, chat_template: str) -> bool:
        return "<|channel|>" in chat_template


Family = Tags | Channels

FAMILIES: dict[str, Family] = {
    "think": Tags("<think>", "</think>"),  # Qwen 3, DeepSeek R1, GLM, QwQ, Nemotron
    "mistral": Tags("[THINK]", "[/THINK]"),
    "gemma4": Tags("<|channel>", "<channel|>", "thought"),
    "seed": Tags("<seed:think>", "</seed:think>"),
    "gpt-oss": Channels(),
}


def family_of(name: str, chat_template: str | None) -> Family | None:
    """A family by its name; for "auto" the one whose tags the chat template names. None where answers have no
    reasoning."""
    if name != "auto":
        return FAMILIES.get(name)
    named = (family for family in FAMILIES.values() if chat_template is not None and family.is_named_in(chat_template))
    return next(named, None)


def hidden_tokens(
    family: Family | None, tokenizer: Tokenizer | None, more: Iterable[str] = ()
) -> tuple[str, ...] | None:
    """Special tokens to be removed from text, where the family's tags, or some of `more`, are special tokens too: text
    without any would lack them. None where the tags are text."""
    tags = {*more, *(() if family is None else family.markers)}
    if not tags or tokenizer is None:
        return None
    texts = {tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.special_ids}
    return tuple(sorted(texts - tags)) if texts & tags else None


def prompt_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The text with which a prompt ends, with its special tokens: as much as has any opening tag."""
    end = [token for token in prompt[-NUM_PROMPT_END:] if tokenizer.has_id(token)]
    return tokenizer.decode(end, skip_special_tokens=False)


def starts_inside(family: Family, prompt_end: str) -> bool:
    """True if the prompt itself ends with the opening tag, as some templates write it."""
    return isinstance(family, Tags) and prompt_end.rstrip().endswith((family.opening, family.opening + family.label))


class Remover:
    """Removes some texts, such as special tokens, from a stream. None of them contains another."""

    def __init__(self, texts: Iterable[str]):
        self._texts = tuple(text for text in texts if text)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._held = ""

    def feed(self, text: str) -> str:
        """The text so far that is certain, without the removed ones."""
        held = self._pattern.sub("", self._held + text)
        cut = len(held) - max((_num_begun(held, removed) for removed in self._texts), default=0)
        self._held = held[cut:]
        return held[:cut]

    def finish(self) -> str:
        """The text that was held back when the stream has ended."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, marker: str) -> int:
    """Characters at the text's end that may be the beginning of the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)


class ReasoningSplitter:
    """Splits a streamed text. What it has returned after some text does not depend on where the pieces were cut.

    White space around the tags is dropped. A text that does not begin with the opening tag is all content, unless
    `is_inside`.
    """

    def __init__(self, tags: Tags, is_inside: bool = False):
        self._tags = tags
        self._state: Literal["start", "inside", "after", "content"] = "start"
        self._was_opened = is_inside
        self._held, self._label = "", "" if is_inside else tags.label
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
            if self._label.startswith(self._held) and self._label:
                return  # it may become the label
            if self._label and self._held.startswith(self._label):
                self._held = self._held.removeprefix(self._label).lstrip()
            self._label = ""
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
        held = self._held
        count = _num_begun(held, self._tags.closing)
        rest = held[: len(held) - count]
        return count + len(rest) - len(rest.rstrip())

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


class ChannelSplitter:
    """As `ReasoningSplitter`, for `Channels`. The prompt's end has begun the first header; a text without one is
    content. Messages of one kind are lines."""

    def __init__(self, channels: Channels):
        self._start, self._channel, self._message, *self._ends = channels.markers
        self._state: Literal["start", "header", "body"] = "start"
        self._kind: Kind = "content"
        self._held = ""
        self._written: dict[Kind, bool] = {"reasoning": False, "content": False}
        self._is_first = True  # of the message

    def feed(self, text: str) -> Iterator[tuple[Kind, str]]:
        """As `ReasoningSplitter.feed`."""
        self._held += text
        while True:
            if self._state == "start":
                openings = (self._start, self._channel)
                begun = self._held.lstrip(" ")
                if self._held.startswith(openings) or (begun.startswith("to=") and self._message in begun):
                    self._state = "header"
                elif begun and not (
                    begun.startswith("to=") or any(text.startswith(begun) for text in (*openings, "to="))
                ):
                    self._state = "body"
                else:
                    return
            if self._state == "header":
                header, marker, rest = self._held.partition(self._message)
                if not marker:
                    return
                channel = header.partition(self._channel)[2].split(maxsplit=1)
                is_reasoning = channel[:1] == ["analysis"] or _TO_TOOL.search(header) is not None
                self._kind = "reasoning" if is_reasoning else "content"
                self._state, self._held, self._is_first = "body", rest, True
            markers = (self._start, self._channel, *self._ends)
            ends = [at for mark in markers if (at := self._held.find(mark)) >= 0]
            cut = min(ends) if ends else len(self._held) - max(_num_begun(self._held, mark) for mark in markers)
            if cut:
                yield self._kind, self._line(self._held[:cut])
            self._held = self._held[cut:]
            if not ends:
                return
            self._state = "header"

    def finish(self) -> Iterator[tuple[Kind, str]]:
        """As `ReasoningSplitter.finish`."""
        if self._held and self._state != "header":
            yield self._kind, self._line(self._held)
        self._held = ""

    def _line(self, text: str) -> str:
        """A piece of the message's text, with a line break between it and another message of its kind."""
        begin = "\n" if self._is_first and self._written[self._kind] else ""
        self._is_first, self._written[self._kind] = False, True
        return begin + text


Splitter = ReasoningSplitter | ChannelSplitter


def make_splitter(family: Family, is_inside: bool = False) -> Splitter:
    """A splitter of an answer's text. `is_inside`: the prompt ends within the reasoning."""
    return ChannelSplitter(family) if isinstance(family, Channels) else ReasoningSplitter(family, is_inside)


class AnswerSplitter:
    """Reasoning and content of one answer's text as it streams.

    Args:
      is_inside: the prompt ends within the reasoning. hidden: texts to be left out.
    """

    def __init__(self, family: Family, is_inside: bool = False, hidden: Iterable[str] | None = None):
        self._remover, self._splitter = Remover(hidden or ()), make_splitter(family, is_inside)

    def feed(self, text: str, is_end: bool) -> tuple[str, str]:
        """New reasoning and content; at the end all that was held back."""
        text = self._remover.feed(text) + (self._remover.finish() if is_end else "")
        texts: dict[Kind, str] = {"reasoning": "", "content": ""}
        for kind, part in (*self._splitter.feed(text), *(self._splitter.finish() if is_end else ())):
            texts[kind] += part
        return texts["reasoning"], texts["content"]


def split(
    text: str, family: Family | None, is_inside: bool = False, hidden: Iterable[str] | None = None
) -> tuple[str, str]:
    """A whole text's reasoning and content, without the `hidden` texts."""
    return ("", text) if family is None else AnswerSplitter(family, is_inside, hidden).feed(text, is_end=True)
