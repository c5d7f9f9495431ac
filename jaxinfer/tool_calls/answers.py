"""From the tools of a request to the calls in its answers, for one model."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.sampling import SamplingParams
from jaxinfer.text import Tokenizer
from jaxinfer.text.reasoning import (
    FAMILIES,
    AnswerSplitter,
    Family,
    Kind,
    Remover,
    family_of,
    hidden_tokens,
    make_splitter,
    prompt_end,
    split,
    starts_inside,
)
from jaxinfer.tool_calls.form import Content, ToolCall, ToolCallDelta, ToolCallParser, ToolForm, collect
from jaxinfer.tool_calls.registry import form_of, tool_form
from jaxinfer.tool_calls.tools import ToolUse, check_tools


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


def as_tools(tools: Any) -> Any:
    """Tools of OpenAI's form, in place of Python functions; what is no list stays, to be refused."""
    if not isinstance(tools, (list, tuple)):
        return tools
    return [_function_tool(tool) if callable(tool) else tool for tool in tools]


AnswerPart = Reasoning | Content | ToolCallDelta


class AnswerFormat:
    """How a model writes its answers.

    Args:
      tokenizer: None for a model of token ids, which can have no tools.
      parser: the form of its calls, one of `TOOL_FORMS`; "auto" for that of its chat template, "none" where calls are
        to be left in the text. reasoning: the family of its reasoning, None where it has none; "auto" for that of its
        chat template.

    Raises ValueError: an unknown `parser`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, parser: str = "auto", reasoning: Family | Literal["auto"] | None = "auto"
    ):
        template = None if tokenizer is None else tokenizer.chat_template
        self.tokenizer, self.parser = tokenizer, parser
        self.reasoning = family_of("auto", template) if reasoning == "auto" else reasoning
        self.form = None if parser == "none" else form_of(template or "") if parser == "auto" else tool_form(parser)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The tokenizer's special tokens."""
        if self.tokenizer is None:
            return {}
        decode, ids = self.tokenizer.decode, self.tokenizer.special_ids
        return {decode([token_id], skip_special_tokens=False): token_id for token_id in ids}

    @cached_property
    def hidden(self) -> tuple[str, ...] | None:
        """Texts to be removed from an answer with special tokens before its calls are read. None where the text without
        special tokens has all tags."""
        return hidden_tokens(self.reasoning, self.tokenizer, () if self.form is None else self.form.special_texts)

    @cached_property
    def _hidden_of_reasoning(self) -> tuple[str, ...] | None:
        return hidden_tokens(self.reasoning, self.tokenizer)

    @cached_property
    def _needs_whole_tools(self) -> bool:
        """Tells whether the chat template fails at a function that has a name alone, and not at one with all fields."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return False
        tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
        return not _renders(self.tokenizer, tool) and _renders(self.tokenizer, _whole_tool(tool))

    def hidden_with(self, offer: ToolOffer | None) -> tuple[str, ...] | None:
        """`hidden` where calls are read, else for the reasoning alone."""
        return self._hidden_of_reasoning if offer is None or not offer.is_read else self.hidden

    @property
    def reasoning_name(self) -> str:
        """The family's name, as structured output has it."""
        return next((name for name, family in FAMILIES.items() if family == self.reasoning), "none")

    def is_read(self, params: SamplingParams, offer: ToolOffer | None) -> bool:
        """Tells whether answers may have more than content. Structured output without reasoning has that alone."""
        if offer is not None and offer.is_read:
            return True
        return self.reasoning is not None and (params.structured is None or params.structured.reasoning != "none")

    def params(self, params: SamplingParams, offer: ToolOffer | None = None) -> SamplingParams:
        """Sampling parameters of a chat under which answers can be read, with special tokens in their text where those
        are tags; structured output begins after the reasoning, and answers call what they must.

        Raises ValueError: as `ToolOffer.structured`, or there are tools and structured output.
        """
        changes: dict[str, Any] = {}
        structured = params.structured
        if params.skip_special_tokens and self.is_read(params, offer) and self.hidden_with(offer) is not None:
            changes["skip_special_tokens"] = False
        if offer is not None and offer.is_read:
            if structured is not None:
                raise ValueError(
                    "tools and structured output exclude each other: leave one out, or set tool_choice='none'"
                )
            changes["structured"] = offer.structured()
        elif structured is not None and structured.reasoning is None and self.reasoning is not None:
            changes["structured"] = replace(structured, reasoning=self.reasoning_name)
        return replace(params, **changes) if changes else params

    def splitter(self, prompt_ids: Sequence[int]) -> AnswerSplitter | None:
        """Tells reasoning from content in a stream under the parameters of `params`, without tools; None where the tags
        of the reasoning are text."""
        if self.reasoning is None or self.tokenizer is None or self._hidden_of_reasoning is None:
            return None
        is_inside = starts_inside(self.reasoning, prompt_end(self.tokenizer, prompt_ids))
        return AnswerSplitter(self.reasoning, is_inside, self._hidden_of_reasoning)

    def read(
        self,
        text: str,
        prompt_ids: Sequence[int],
        seed: int,
        offer: ToolOffer | None = None,
        skip_special_tokens: bool = True,
    ) -> tuple[str, str, list[ToolCall]]:
        """Reasoning, content and calls of a whole answer.

        Args:
          text: under the parameters of `params`. seed: the answer's own. skip_special_tokens: as the request had it.
        """
        family, tokenizer = self.reasoning, self.tokenizer
        hidden = self.hidden_with(offer) if skip_special_tokens else None
        is_inside = False
        if family is not None and tokenizer is not None:
            is_inside = starts_inside(family, prompt_end(tokenizer, prompt_ids))
        if offer is None or not offer.is_read:
            return (*split(text, family, is_inside, hidden), [])
        parts = offer.reader(prompt_ids, seed, family, is_inside, hidden).feed(text, is_end=True)
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        return (reasoning, *collect(part for part in parts if not isinstance(part, Reasoning)))

    def offer(
        self,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
    ) -> ToolOffer | None:
        """A request's tools; None where it has none, or may call none.

        Args:
          tools: as of OpenAI's chat completions, or Python functions. The other two as of `check_tools`.

        Raises ValueError: with the place of what is wrong, too large, or cannot be served by this model.
        """
        given: Any = as_tools(tools)
        use = check_tools(given, tool_choice, parallel_tool_calls)
        if use.mode == "none" or not tools:
            return None
        if self._needs_whole_tools:
            given = [_whole_tool(tool) for tool in given]
        if self.form is None and use.needs_grammar:
            raise ValueError(
                "tool_choice that demands a call, parallel_tool_calls=false and strict tools need a model whose form "
                "of calls is known, and its chat template names none: tool_parser can name it"
            )
        self.check_shown()
        names = {tool.name for tool in use.tools}
        # Tools that may not be called are left out where nothing else keeps the model from calling them.
        shown = [tool for tool in given if use.mode == "required" or tool["function"]["name"] in names]
        return ToolOffer(self, use, shown)

    def check_shown(self) -> None:
        """Raises ValueError where the chat template does not tell the model of tools, and no form of calls was named
        for one that is told of them otherwise."""
        if self.parser in ("auto", "none") and self.tokenizer is not None and not self.tokenizer.shows_tools:
            raise ValueError(
                "tools: the model's chat template shows no tools, so the model would not see them; if the messages "
                "describe them, name the form of its calls with tool_parser"
            )


@dataclass(frozen=True)
class ToolOffer:
    """The tools that one request offers.

    Attributes:
      use: what may and must be called. shown: the tools for the chat template.
    """

    format: AnswerFormat
    use: ToolUse
    shown: Sequence[Mapping[str, Any]]

    @property
    def is_read(self) -> bool:
        """True if calls are told from the text."""
        return self.format.form is not None

    def structured(self) -> StructuredOutputs | None:
        """The grammar that makes answers the calls that the request demands; None where nothing is to be enforced.

        Raises ValueError: a tool's schema is too large or not supported, with its place.
        """
        form, use = self.format.form, self.use
        if form is None or not use.needs_grammar:
            return None
        from jaxinfer.grammar.schema import check_schema
        from jaxinfer.grammar.schema_grammar import schema_for_llguidance

        tools = []
        for tool in use.tools:
            try:
                parameters = schema_for_llguidance(check_schema(tool.parameters))
            except ValueError as error:
                raise ValueError(f"tools: the parameters of {tool.name!r}: {error}") from None
            tools.append(replace(tool, parameters=parameters))
        text = form.grammar(tools, use.mode, use.is_parallel, self.format.special_tokens)
        # Forms that are read before the reasoning have it in their grammars.
        return StructuredOutputs(
            grammar=text, reasoning="none" if form.is_before_reasoning else self.format.reasoning_name
        )

    def reader(
        self, prompt_ids: Sequence[int], seed: int, family: Family | None, is_inside: bool, hidden: Sequence[str] | None
    ) -> AnswerReader:
        """A reader of one answer's text as it streams, with arguments of `AnswerReader`. The ids of its calls are
        computed from the prompt and the answer's own seed."""
        form = self.format.form
        assert form is not None
        digest = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).hexdigest()
        return AnswerReader(form, form.parser(self.use.tools, f"{digest}.{seed}"), family, is_inside, hidden)


def text_of(part: AnswerPart) -> str:
    """All that a part says, as one text: what a stream that is resumed counts."""
    if isinstance(part, ToolCallDelta):
        return f"{part.name or ''}{part.id or ''}{part.arguments}"
    return part.text


class AnswerReader:
    """Reasoning, content and calls of one answer's text as it streams.

    Args:
      is_inside: the prompt ends within the reasoning. hidden: texts to be left out.
    """

    def __init__(
        self,
        form: ToolForm,
        parser: ToolCallParser,
        family: Family | None = None,
        is_inside: bool = False,
        hidden: Sequence[str] | None = None,
    ):
        self._parser, self._is_parser_first = parser, form.is_before_reasoning
        self._remover = Remover(hidden or ())
        self._splitter = None if family is None else make_splitter(family, is_inside)
        self.num_calls = 0

    def feed(self, text: str, is_end: bool) -> list[AnswerPart]:
        """Parts that are new and certain, in the order of the text; at the end all that was held back."""
        text = self._remover.feed(text) + (self._remover.finish() if is_end else "")
        parts = self._read_calls_first(text, is_end) if self._is_parser_first else self._split_first(text, is_end)
        for part in parts:
            if isinstance(part, ToolCallDelta):
                self.num_calls = max(self.num_calls, part.index + 1)
        return parts

    def _read_calls_first(self, text: str, is_end: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for item in self._parser.feed(text, is_end):
            if self._splitter is None or not isinstance(item, Content):
                parts.append(item)
            else:
                parts += [_part(kind, part) for kind, part in self._splitter.feed(item.text)]
        if is_end and self._splitter is not None:
            parts += [_part(kind, part) for kind, part in self._splitter.finish()]
        return parts

    def _split_first(self, text: str, is_end: bool) -> list[AnswerPart]:
        if self._splitter is None:
            return [*self._parser.feed(text, is_end)]
        parts: list[AnswerPart] = []
        for kind, part in (*self._splitter.feed(text), *(self._splitter.finish() if is_end else ())):
            parts += [Reasoning(part)] if kind == "reasoning" else self._parser.feed(part, False)
        return [*parts, *self._parser.feed("", True)] if is_end else parts


def _part(kind: Kind, text: str) -> Reasoning | Content:
    return Reasoning(text) if kind == "reasoning" else Content(text)


def _renders(tokenizer: Tokenizer, tool: Mapping[str, Any]) -> bool:
    try:
        tokenizer.render_chat([{"role": "user", "content": "a"}], tools=[tool])
    except ValueError:
        return False
    return True


def _whole_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that a request may leave out."""
    left_out = {"description": "", "parameters": {"type": "object", "properties": {}}}
    function = tool["function"]
    missing = {name: value for name, value in left_out.items() if function.get(name) is None}
    return {**tool, "function": {**function, **missing}}


def _function_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """A Python function as a tool, described by its signature and docstring. Raises ValueError."""
    from jaxinfer.grammar.python_types import schema_of

    return {"type": "function", "function": schema_of(function)}
