"""Calls of tools: what a request offers, how families of models write calls, and grammars that make them match."""

from jaxinfer.tool_calls.form import ToolForm
from jaxinfer.tool_calls.parser import Content, ToolCall, ToolCallDelta, ToolCallParser, collect
from jaxinfer.tool_calls.registry import TOOL_FORMS, form_of, tool_form
from jaxinfer.tool_calls.tools import Tool, ToolUse, check_tools

__all__ = [
    "TOOL_FORMS",
    "Content",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolForm",
    "ToolUse",
    "check_tools",
    "collect",
    "form_of",
    "tool_form",
]
