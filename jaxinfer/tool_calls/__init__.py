"""Calls of tools: what a request offers, how families of models write calls, and grammars that make them match."""

from jaxinfer.tool_calls.answers import AnswerFormat, AnswerReader, Reasoning, ToolOffer, as_tools, text_of
from jaxinfer.tool_calls.form import Content, ToolCall, ToolCallDelta, ToolForm, collect
from jaxinfer.tool_calls.registry import TOOL_FORMS, form_of, tool_form
from jaxinfer.tool_calls.tools import Tool, check_tools

__all__ = [
    "TOOL_FORMS",
    "AnswerFormat",
    "AnswerReader",
    "Content",
    "Reasoning",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolForm",
    "ToolOffer",
    "as_tools",
    "check_tools",
    "collect",
    "form_of",
    "text_of",
    "tool_form",
]
