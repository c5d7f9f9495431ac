"""Writes grammars for llguidance: rules in its variant of Lark, with JSON schemas inside."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Models write at most a few line breaks and an indentation; without a bound an answer could be white space to its end.
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}}
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


MAX_RULES = 10_000
MAX_CHARS = 3_000_000


class GrammarSizeError(ValueError):
    """A grammar has too many rules or characters."""


class Lark:
    """Rules of a grammar, which has at most `MAX_RULES` with `MAX_CHARS` characters.

    Args:
      special_tokens: ids of the tokenizer's special tokens; they are tokens in the grammar, all else is text.
    """

    def __init__(self, special_tokens: Mapping[str, int]):
        self._special = dict(special_tokens)
        self._rules: dict[str, str] = {}
        self._num_chars = 0

    def rule(self, name: str, right: str) -> str:
        """Adds a rule (a terminal if the name is in capitals); returns its name.

        Raises:
          GrammarSizeError: the grammar becomes too large: a schema refers to itself, or often to large definitions.
        """
        self._rules[name] = right
        self._count(len(name) + len(right))
        return name.partition("[")[0]

    def text(self) -> str:
        """The grammar. Forced text is left to the engine: llguidance would allow one spelling of it alone."""
        options = '%llguidance {"no_forcing": true}\n'
        return options + "".join(f"{name}: {right}\n" for name, right in self._rules.items())

    def tag(self, text: str) -> str:
        """A fixed text, with its special tokens as tokens."""
        inside = sorted((token for token in self._special if token and token in text), key=len, reverse=True)
        if not inside:
            return quote(text) if text else ""
        parts = re.split(f"({'|'.join(map(re.escape, inside))})", text)
        return " ".join(
            f"<[{self._special[text]}]>" if text in self._special else quote(text) for text in parts if text
        )

    def is_special(self, text: str) -> bool:
        return text in self._special

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value that matches a schema, which may have options of its own. Raises as `rule`."""
        text = f"%json {json.dumps({**_JSON_OPTIONS, **schema}, ensure_ascii=False)}"
        self._count(len(text))
        return text

    def _count(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if len(self._rules) > MAX_RULES or self._num_chars > MAX_CHARS:
            raise GrammarSizeError(
                f"the grammar of the tools' parameters has more than {MAX_RULES:,} rules or {MAX_CHARS:,} characters"
            )

    def free_text(self, name: str, forbidden: Iterable[str], line_openings: str = "") -> str:
        """A terminal: any text without the forbidden ones, and without these characters at the start of a line."""
        base = r"/(?s:.*)/"
        if line_openings:
            # A line is blank, or begins with white space and another character.
            others = "".join(_META.sub(r"\\\g<0>", char) for char in line_openings)
            line = rf"[ \t]*([^\s{others}][^\n]*)?"
            base = rf"/{line}(\n{line})*/"
        parts = [base, *(f"~/(?s:.*){escape(text)}(?s:.*)/" for text in forbidden)]
        return self.rule(name, " & ".join(parts))

    def sequence(self, name: str, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Adds rules for the items in this order, those that are not required or left out; returns the first rule.

        Args:
          items: the right side of each, and whether it is required. separator: between two.
        """
        # Two rules for each place: whether an item came before decides whether the next one needs a separator.
        last = len(items)
        for begun in ("", "_more") if separator else ("",):
            self.rule(f"{name}{begun}_{last}", '""')
        for index in range(last - 1, -1, -1):
            item, is_required = items[index]
            rule = self.rule(f"{name}_item_{index}", item)
            for begun in ("", "_more") if separator else ("",):
                following = f"{name}{'_more' if separator else ''}_{index + 1}"
                taken = f"{quote(separator)} {rule} {following}" if begun else f"{rule} {following}"
                skipped = "" if is_required else f" | {name}{begun}_{index + 1}"
                self.rule(f"{name}{begun}_{index}", taken + skipped)
        return f"{name}_0"


def quote(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """A text inside a regular expression."""
    return _META.sub(r"\\\g<0>", text).replace("\n", r"\n")
