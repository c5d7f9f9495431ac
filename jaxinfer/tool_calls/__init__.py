"""Calls of tools: what a request offers, how families of models write calls, and grammars that make them match."""

from jaxinfer.tool_calls.answers import (
    AnswerFormat,
    AnswerPart,
    AnswerReader,
    Reasoning,
    ToolOffer,
    as_tools,
    text_of,
)
from jaxinfer.tool_calls.form import ToolForm
from jaxinfer.tool_calls.parser import Content, ToolCall, ToolCallDelta, ToolCallParser, collect
from jaxinfer.tool_calls.registry import TOOL_FORMS, form_of, tool_form
from jaxinfer.tool_calls.tools import Tool, ToolUse, check_tools

__all__ = [
    "TOOL_FORMS",
    "AnswerFormat",
    "AnswerPart",
    "AnswerReader",
    "Content",
    "Reasoning",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolForm",
    "ToolOffer",
    "ToolUse",
    "as_tools",
    "check_tools",
    "collect",
    "form_of",
    "text_of",
    "tool_form",
]
