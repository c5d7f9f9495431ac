"""The sandbox chat templates run in: what they may call, how long they may take, how much they may write.

A template comes with a checkpoint, so it is a program that is not trusted. Jinja's immutable sandbox keeps it away
from Python; it does not bound time or memory. A thread with a timeout cannot either: a Python thread cannot
be killed, and one long C call (`"a" * 10**9`) holds the interpreter lock, so the timeout itself never runs. A
worker process could, at the price of a second interpreter per server. So the bounds are built in
(`limits.py`): every loop turn, macro call, filter, call and operator passes a `Meter` that looks at the clock,
and what could make a large value out of small ones is checked before it runs.
"""

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from jaxinfer.text import limits

MAX_TEMPLATE_CHARS = 1 << 20
"""Longest template source that is compiled, in characters (the longest known real one has about 30,000)."""

NOW: ContextVar[datetime | None] = ContextVar("jaxinfer_template_now", default=None)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks assistant text for training masks; renders its body."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict(...)` and `dict.fromkeys(...)` of a template, without the type behind them."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace(...)` that takes no name starting with an underscore."""

    def __init__(*args: Any, **kwargs: Any):  # no named self: `namespace(self=...)` is legal
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_name(name)
        Namespace.__setitem__(self, name, value)


def _check_attribute_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store the attribute {name!r}")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Transformers 5 sets it up for chat templates (utils/chat_template_utils.py), plus the meter.

    Left out: `random`, `lipsum` (a prompt is a function of its inputs) and `pprint` (cannot be bounded).
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        self.concat = limits.bounded_concat  # type: ignore[method-assign]
        self.filters = {
            name: _metered_filter(name, function)
            for name, function in self.filters.items()
            if name not in ("random", "pprint", "tojson")
        }
        self.filters["tojson"] = _tojson
        for name in ("eq", "==", "equalto", "ne", "!=", "lt", "<", "le", "<=", "gt", ">", "ge", ">=", "in"):
            self.tests[name] = _metered_test(self.tests[name])
        self.globals.pop("lipsum")
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_tree(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a parsed template after building the meter's checks into it."""
        tree = _MeterChecks().visit(tree)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = limits.current_meter()
        meter.tick()
        if operator == "*":
            limits.check_product(meter, left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                limits.check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            limits.check_percent(meter, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)):
            meter.check_size(len(result))
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = limits.current_meter()
        meter.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, int):
            raise limits.ChatTemplateLimitError("a chat template may not call the methods of a number")
        if isinstance(owner, str):
            args = limits.check_string_method(meter, owner, getattr(__obj, "__name__", ""), args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, list, tuple, dict)):
            meter.check_size(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        template = value.__self__

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                args, kwargs = (), args[0]
            return _BoundedFormatter(self).vformat(template, args, kwargs)

        return bounded_format

    # Called by compiled templates through `environment.<name>`, a spelling no template can shadow.

    def tick(self) -> str:
        limits.current_meter().tick()
        return ""

    def bounded(self, value: Any) -> Any:
        if not isinstance(value, str):
            limits.current_meter().check_deep(value)
        return value

    def join_values(self, *values: Any) -> str:
        return limits.bounded_concat([str(self.bounded(value)) for value in values])


class _MeterChecks(NodeTransformer):
    """Builds the checks into a template's syntax tree where the environment has no hook for them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._tick_in_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._tick_in_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._tick_in_body(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("join_values", node.nodes, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        if node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return _environment_call("bounded", [node], node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        # Against a literal, a comparison visits no more than the literal; only two values can both be deep.
        if not any(isinstance(operand, (nodes.Const, nodes.List, nodes.Tuple)) for operand in operands):
            node.expr = _environment_call("bounded", [node.expr], node)
            for operand in node.ops:
                if operand.op not in ("in", "notin"):
                    operand.expr = _environment_call("bounded", [operand.expr], node)
        return node

    def _tick_in_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("tick", [], node), lineno=node.lineno))
        return node


def _environment_call(name: str, args: list[Any], near: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
    call.set_lineno(near.lineno, override=True)
    return call


class _BoundedFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        meter = limits.current_meter()
        if any(len(digits) > 4 for digits in re.findall(r"\d+", format_spec)):
            raise limits.ChatTemplateLimitError(f"the chat template formats to a width of {format_spec!r}")
        meter.check_deep(value)
        self._written = getattr(self, "_written", 0) + len(text := super().format_field(value, format_spec))
        meter.check_size(self._written)
        meter.tick()
        return text


def _finalize(value: Any) -> Any:
    if not isinstance(value, str) and (meter := limits.METER.get()) is not None:
        meter.check_deep(value)
    return value


# Filters that pass values on without turning them into text: how deep their values are does not matter.
_STRUCTURAL_FILTERS = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map"),
        *("reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    )
)
_PADDING_FILTERS = frozenset(("batch", "center", "indent", "round", "slice", "urlize", "wordwrap", "xmlattr"))


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    pass_arg = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @wraps(function)
    def metered(context: Context, value: Any = "", *args: Any, **kwargs: Any) -> Any:
        meter = limits.current_meter()
        meter.tick()
        arguments = [*args, *kwargs.values()]
        if name not in _STRUCTURAL_FILTERS:
            if not isinstance(value, (str, list, tuple, dict)) and hasattr(value, "__next__"):
                value = limits.bounded_list(meter, value)
            for item in (value, *arguments):
                meter.check_deep(item)
        if name in _PADDING_FILTERS:
            limits.check_width(arguments)
            limits.check_padding(meter, name, value, arguments)
        elif name == "replace" and len(args) >= 2:
            limits.check_replace(meter, str(value), str(args[0]), str(args[1]))
        elif name == "join" and arguments:
            meter.check_size(len(value) * len(str(arguments[0])) if hasattr(value, "__len__") else 0)
        elif name == "format":
            limits.check_percent(meter, str(value), arguments)
        elif name == "sum" and any(isinstance(item, (list, tuple, dict)) for item in arguments):
            raise limits.ChatTemplateLimitError("a chat template may sum numbers only")
        leading = {"context": [context], "eval_context": [context.eval_ctx], "environment": [context.environment]}
        result = function(*leading.get(str(pass_arg), []), value, *args, **kwargs)
        if isinstance(result, (str, list, tuple)):
            meter.check_size(len(result))
        return result

    return metered


def _metered_test(function: Callable[..., bool]) -> Callable[..., bool]:
    def metered(value: Any, *args: Any) -> bool:
        meter = limits.current_meter()
        meter.tick()
        if not isinstance(value, str) and args and not isinstance(args[0], str):
            meter.check_deep(value)
        return function(value, *args)

    return metered


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    meter = limits.current_meter()
    meter.check_deep(value)
    if (isinstance(indent, int) and indent > 64) or (isinstance(indent, str) and len(indent) > 64):
        raise limits.ChatTemplateLimitError(f"the chat template indents JSON by {indent!r}; the limit is 64")
    if separators is not None and sum(map(len, separators)) > 64:
        raise limits.ChatTemplateLimitError("the chat template uses JSON separators longer than 64 characters")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.check_size(len(text))
    return text


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > limits.MAX_WIDTH or any(len(digits) > 4 for digits in re.findall(r"\d+", format)):
        raise limits.ChatTemplateLimitError(f"the chat template formats the date with {format[:80]!r}")
    return (NOW.get() or datetime.now()).strftime(format)
