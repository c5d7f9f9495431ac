"""Which characters of a rendered chat the template wrote itself.

A control token may come only from the template. So the template's own literals are marked, not the content: each
control token in a literal (and each end of a literal that could be half of one, as in `'<|' + role + '|>'`) is
rendered between two private-use characters that occur nowhere in the input. What is between the marks is the
template's, whatever the template did to the content around it: trim, split, slice, replace, join. Losing a mark
can only cost trust, never grant it; a literal that is compared with content (`'</think>' in content`) is not
marked, so the template decides as it always does. The caller renders without marks too and checks that both texts
agree (`chat_template.py`).
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import jinja2.nodes as nodes

ROLE_FUNCTION = "_trusted_role"

# Methods and filters whose argument (by position, None = all) flows into the result rather than being searched for.
_VALUE_ARGS: Mapping[str, int | None] = {
    "replace": 1,
    "get": 1,
    "join": None,
    "format": None,
    "default": None,
    "d": None,
}


class ControlStrings:
    """The control tokens as text, with the two questions asked of a literal: which pieces, and where.

    A model of speech may have 65,536 of them: time and memory of a question grow with those that the literal has.
    """

    def __init__(self, tokens: Collection[str]):
        self.tokens = frozenset(token for token in tokens if token)
        self._sorted = sorted(self.tokens)
        self._reversed = sorted(token[::-1] for token in self.tokens)
        self._longest = max(map(len, self.tokens), default=0)

    def pieces(self, literal: str) -> list[tuple[int, int]]:
        """Spans of `literal` to trust: whole control tokens, and a half of one at its start or end."""
        inside = sorted((token for token in self.tokens if token in literal), key=lambda token: (-len(token), token))
        spans = [match.span() for match in re.finditer("|".join(map(re.escape, inside)), literal)] if inside else []
        end_of_head = spans[0][0] if spans else len(literal)
        head = self._longest_end(end_of_head, lambda n: _starts_a_longer(self._reversed, literal[:n][::-1]))
        start_of_tail = max(spans[-1][1] if spans else 0, head)
        room = len(literal) - start_of_tail
        tail = self._longest_end(room, lambda n: _starts_a_longer(self._sorted, literal[len(literal) - n :]))
        return ([(0, head)] if head else []) + spans + ([(len(literal) - tail, len(literal))] if tail else [])

    def opens(self, literal: str) -> bool:
        """True if `literal` ends with the first half of a control token."""
        spans = self.pieces(literal)
        return (
            bool(spans) and spans[-1][1] == len(literal) and _starts_a_longer(self._sorted, literal[slice(*spans[-1])])
        )

    def _longest_end(self, room: int, fits: Callable[[int], bool]) -> int:
        return next((n for n in range(min(room, self._longest - 1), 0, -1) if fits(n)), 0)


def _starts_a_longer(ordered: Sequence[str], text: str) -> bool:
    """True if one of the sorted texts starts with `text` and goes on."""
    index = bisect_right(ordered, text)
    return index < len(ordered) and ordered[index].startswith(text)


@dataclass(frozen=True)
class Literal:
    """A literal of the template that becomes a variable: its name, its text, and the spans of it to trust."""

    name: str
    text: str
    spans: tuple[tuple[int, int], ...]

    def marked(self, opening: str, closing: str) -> str:
        text, done = [], 0
        for start, end in self.spans:
            text += [self.text[done:start], opening, self.text[start:end], closing]
            done = end
        return "".join([*text, self.text[done:]])


def extract_literals(
    tree: nodes.Template, control: ControlStrings, special_tokens: Mapping[str, str]
) -> tuple[Literal, ...]:
    """Turn the literals of `tree` that hold control text into variables (in place), and return them.

    Variables such as `bos_token` count as literals. A role printed right after half a control token is passed
    through the function `_trusted_role`.
    """
    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    extractor = _Extractor(control, {name: text for name, text in special_tokens.items() if name not in assigned})
    extractor.statements(tree.body)
    return tuple(extractor.literals)


class _Extractor:
    """Walks statements, and expressions whose value reaches the output; comparisons are left as they are."""

    def __init__(self, control: ControlStrings, special_tokens: Mapping[str, str]):
        self._control = control
        self._special_tokens = special_tokens
        self.literals: list[Literal] = []

    def statements(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Output):
            node.nodes = self._chain(node.nodes)
        elif isinstance(node, (nodes.Assign, nodes.ExprStmt)):
            node.node = self._value(node.node)  # type: ignore[arg-type]
        elif isinstance(node, nodes.For):
            node.iter = self._value(node.iter)  # type: ignore[arg-type]
        elif isinstance(node, nodes.Macro):
            node.defaults = [self._value(default) for default in node.defaults]
        elif isinstance(node, nodes.CallBlock):
            node.call = self._value(node.call)  # type: ignore[assignment]
        elif isinstance(node, nodes.With):
            node.values = [self._value(value) for value in node.values]
        for body in ("body", "elif_", "else_"):
            self.statements(getattr(node, body, None) or ())

    def _value(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.TemplateData):
            return self._literal(node.data, node)
        if isinstance(node, nodes.Const):
            return self._literal(node.value, node) if isinstance(node.value, str) else node
        if isinstance(node, nodes.Name):
            text = self._special_tokens.get(node.name) if node.ctx == "load" else None
            return node if text is None else self._literal(text, node)
        if isinstance(node, (nodes.Add, nodes.Concat)):
            return self._sum(node)
        if isinstance(node, (nodes.BinExpr, nodes.And, nodes.Or)):
            node.left, node.right = self._value(node.left), self._value(node.right)
        elif isinstance(node, nodes.CondExpr):
            node.expr1 = self._value(node.expr1)
            node.expr2 = node.expr2 and self._value(node.expr2)
        elif isinstance(node, (nodes.List, nodes.Tuple)):
            node.items = [self._value(item) for item in node.items]
        elif isinstance(node, nodes.Dict):
            for pair in node.items:
                pair.value = self._value(pair.value)
        elif isinstance(node, (nodes.Getattr, nodes.Getitem)):
            node.node = self._value(node.node)
        elif isinstance(node, nodes.Filter):
            node.node = node.node and self._value(node.node)
            self._arguments(node, node.name)
        elif isinstance(node, nodes.Call):
            if isinstance(node.node, nodes.Getattr):
                node.node.node = self._value(node.node.node)
                self._arguments(node, node.node.attr)
            else:  # a macro, namespace(), dict(): its arguments may be printed
                node.args = [self._value(argument) for argument in node.args]
                self._keywords(node)
        return node

    def _arguments(self, node: nodes.Filter | nodes.Call, name: str) -> None:
        if name in _VALUE_ARGS:
            only = _VALUE_ARGS[name]
            node.args = [
                self._value(argument) if only in (None, index) else argument for index, argument in enumerate(node.args)
            ]
            self._keywords(node)

    def _keywords(self, node: nodes.Filter | nodes.Call) -> None:
        for keyword in node.kwargs:
            keyword.value = self._value(keyword.value)

    def _sum(self, node: nodes.Expr) -> nodes.Expr:
        """`a + b + c`, `a ~ b ~ c`: the operands in order, put back together."""
        if isinstance(node, nodes.Concat):
            node.nodes = self._chain(node.nodes)
            return node
        operands, adds, left = [], [], node
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            adds.append(left)
            left = left.left
        operands = self._chain([left, *reversed(operands)])
        for add, right in zip(reversed(adds), operands[1:], strict=True):
            add.right = right
        adds[-1].left = operands[0]
        return node

    def _chain(self, operands: Sequence[nodes.Expr]) -> list[nodes.Expr]:
        chained: list[nodes.Expr] = []
        is_open = False
        for operand in operands:
            text = _text_of(operand)
            if is_open and _is_role(operand):
                call = nodes.Call(nodes.Name(ROLE_FUNCTION, "load"), [operand], [], None, None)
                call.set_lineno(operand.lineno, override=True)
                chained.append(call)
            else:
                chained.append(self._value(operand))
            is_open = text is not None and self._control.opens(text)
        return chained

    def _literal(self, text: str, node: nodes.Expr) -> nodes.Expr:
        spans = tuple(self._control.pieces(text))
        if not spans:
            return node
        literal = Literal(f"_literal_{len(self.literals)}", text, spans)
        self.literals.append(literal)
        return nodes.Name(literal.name, "load", lineno=node.lineno)


def _text_of(node: nodes.Expr) -> str | None:
    if isinstance(node, nodes.TemplateData):
        return node.data
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _is_role(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return isinstance(node, nodes.Name) and node.name == "role"


def split_marks(
    marked: str, opening: str, closing: str, trusted: Collection[str]
) -> tuple[str, list[tuple[int, int]]] | None:
    """Take the marks out of a rendered text: the text, and the spans that were marked.

    Only spans whose text is one of `trusted` count. None if the marks do not pair up (the template cut through
    one).
    """
    text: list[str] = []
    spans: list[tuple[int, int]] = []
    length, start = 0, -1
    for piece in re.split(f"([{opening}{closing}])", marked):
        if piece == opening:
            if start >= 0:
                return None
            start = length
        elif piece == closing:
            if start < 0:
                return None
            if text[-1] in trusted:
                spans.append((start, length))
            start = -1
        else:
            text.append(piece)
            length += len(piece)
    return None if start >= 0 else ("".join(text), spans)
