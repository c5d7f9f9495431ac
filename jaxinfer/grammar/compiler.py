"""Compiles the structured output of a request: a grammar that answers are matched against, and its table."""

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jaxinfer.files import cache_folder
from jaxinfer.grammar import nodes
from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.gate import Gate, gate_of
from jaxinfer.grammar.matcher import Matcher, MatcherLibrary
from jaxinfer.grammar.pattern import UnsupportedPattern, parse_pattern, pattern_of
from jaxinfer.grammar.schema import check_schema
from jaxinfer.grammar.schema_grammar import schema_grammar
from jaxinfer.grammar.schema_graph import components
from jaxinfer.grammar.schema_language import language_of
from jaxinfer.grammar.spelling import Spelling
from jaxinfer.grammar.structured import GrammarError, StructuredOutputs
from jaxinfer.grammar.table_builder import TableLimits, TokenTable, build_table
from jaxinfer.grammar.table_cache import MAX_BYTES, kept_table
from jaxinfer.grammar.vocabulary import vocabulary_of
from jaxinfer.kept_files import KeptFiles
from jaxinfer.text import Tokenizer
from jaxinfer.text.reasoning import Family

_LOG = logging.getLogger(__name__)
MAX_KEPT = 256  # compiled grammars
# Limits of users' Lark grammars: without them, llguidance ends the process with a full stack, or takes minutes.
MAX_NESTED_DEFINITIONS = 1_000  # at 3,000, each within the one before, llguidance overflows a stack of 8 MiB
MAX_INTERSECTIONS = 8  # `&` and `~`: 60 regular expressions together did not finish within 15 s

_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^:\n]*:", re.MULTILINE)
_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|#[^\n]*|%json\s*')


class Grammar:
    """A compiled grammar, shared by all answers that have it.

    Attributes:
      key: names it, among those of one vocabulary.
    """

    def __init__(self, key: str, first: Matcher, table: Future[TokenTable | None] | None):
        self.key, self._first, self._table = key, first, table
        self._lock = threading.Lock()

    def start(self) -> Matcher:
        """The place before an answer's first token."""
        with self._lock:  # a matcher belongs to one thread at a time
            return self._first.copy()

    @property
    def table(self) -> TokenTable | None:
        """Its table, None while that is built, and where there is none."""
        return self.wait() if self._table is not None and self._table.done() else None

    def wait(self) -> TokenTable | None:
        """Waits for the table; None where there is none."""
        if self._table is None or self._table.cancelled():
            return None
        if (error := self._table.exception()) is not None:  # answers go on under masks from the host
            _LOG.error("a table could not be built", exc_info=error)
            self._table = None
            return None
        return self._table.result()


class GrammarCompiler:
    """Compiles what requests ask for, and builds tables in a thread of its own. Threads may share it.

    Args:
      spelling: of the model's tokenizer. special_texts: of tokens that have none in its vocabulary.
      build: makes the table of a language, None where it is too large; without it there are no tables.
    """

    def __init__(
        self,
        spelling: Spelling,
        special_texts: Mapping[int, bytes],
        build: Callable[[nodes.Node], TokenTable | None] | None = None,
    ):
        self._special_texts, self._build = special_texts, build
        self.library = MatcherLibrary(spelling)
        self._builder = ThreadPoolExecutor(1, "grammar-tables")
        self._compiled = lru_cache(MAX_KEPT)(self._compile)

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The grammar of a request. Raises GrammarError, with the place, where it cannot be served."""
        return self._compiled(replace(structured, reasoning=None))

    def _compile(self, structured: StructuredOutputs) -> Grammar:
        try:
            language, text = read(structured)
        except ValueError as error:
            raise GrammarError(str(error)) from None
        try:
            first = self.library.matcher(text)
        except GrammarError as error:
            raise GrammarError(_own_place(str(error), structured)) from None
        table = None
        if language is not None and self._build is not None:
            table = self._builder.submit(self._build, language)
        key = hashlib.blake2b(repr(structured).encode(), digest_size=16).hexdigest()
        return Grammar(key, first, table)

    def gate(self, family: Family, prompt_end: str) -> Gate | None:
        """The gate before the grammar in an answer to a prompt that ends with this text, if the answer may begin with
        reasoning; None where the grammar begins with its first token."""
        return gate_of(family, prompt_end, self.library.vocabulary, self._special_texts)

    def close(self) -> None:
        """Builds no more tables."""
        self._builder.shutdown(wait=False, cancel_futures=True)


def read(structured: StructuredOutputs) -> tuple[nodes.Node | None, str]:
    """The language, where it is finite-state, and the grammar for llguidance; both mean the same. Raises ValueError."""
    import llguidance

    language: nodes.Node | None = None
    schema: Any = None
    if structured.kind == "choice":
        language = nodes.alternate([nodes.Text(text) for text in structured.choice or ()])
    elif structured.kind == "regex":
        language = _read_pattern(structured.regex or "")
    elif structured.kind != "grammar":
        schema = check_schema({"type": "object"} if structured.json_object else structured.json)
        language = language_of(schema) if structured.whitespace_pattern is None else None
    try:
        if language is not None:
            return language, _lark(f"start: /{pattern_of(language)}/")
    except ValueError:  # too long as a pattern
        pass
    if structured.kind == "regex":
        return None, _lark(f"start: /{llguidance.regex_to_lark(structured.regex or '', use_ascii='')}/")
    if schema is not None:
        return None, schema_grammar(schema, structured.whitespace_pattern)
    return None, _lark(check_lark(structured.grammar or ""))


def _own_place(message: str, structured: StructuredOutputs) -> str:
    """llguidance's message without the text that was put around the requested grammar."""
    match = re.match(r"(?:at )?(\d+)\((\d+)\): (.*?)(?=\n +\d+ \| |\Z)", message, re.DOTALL)
    if match is None:
        return message
    place = f"line {int(match[1]) - 1}, column {match[2]}: " if structured.kind == "grammar" else ""
    return place + match[3]


def _lark(text: str) -> str:
    """For llguidance, which by default would allow one spelling of a forced text only, by the tokens before it."""
    import llguidance

    return llguidance.LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + text)


def _read_pattern(pattern: str) -> nodes.Node | None:
    try:
        return parse_pattern(pattern)
    except UnsupportedPattern:
        return None  # llguidance says what is wrong with it, if it cannot read it either


def make_compiler(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarCompiler:
    """The compiler of a model with this tokenizer and V tokens. Raises ValueError for a tokenizer whose tokens have no
    texts of their own."""
    vocabulary = vocabulary_of(tokenizer, eos_token_ids, vocab_size)
    spelling = Spelling(vocabulary, lambda text: tokenizer.encode(text, False), tokenizer.digest)
    folder, limits = cache_folder("grammars"), TableLimits()
    files = None if folder is None else KeptFiles(folder, MAX_BYTES)

    def build(language: nodes.Node) -> TokenTable | None:
        def make() -> TokenTable:
            return build_table(build_automaton(language), spelling, limits)

        try:
            return kept_table(files, language, spelling, limits, make)
        except ValueError:
            return None  # masks from the host are right for it

    special = {token: tokenizer.decode([token], skip_special_tokens=False).encode() for token in tokenizer.special_ids}
    return GrammarCompiler(spelling, special, build)


def check_lark(text: str) -> str:
    """Returns the grammar if it is safe to compile.

    Raises ValueError where it has more definitions within one another, or more intersections, than the limits of this
    module, or where a JSON schema in it (`%json`) is not one that `check_schema` accepts.
    """
    position = 0
    pieces: list[str] = []
    while True:
        match = _LITERALS.search(text, position)
        between = text[position : match.start() if match else len(text)]
        pieces.append(between)
        if match is None:
            break
        position = match.end()
        if match[0].startswith("%json"):
            try:
                schema, position = json.JSONDecoder().raw_decode(text, position)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(
                    f"%json at character {match.start()} of the grammar: no JSON schema follows"
                ) from error
            try:
                check_schema(schema)
            except ValueError as error:
                raise ValueError(f"%json at character {match.start()} of the grammar: {error}") from error
    _check_definitions(" ".join(pieces))
    return text


def _check_definitions(text: str) -> None:
    """Checks a grammar without its literals. Definitions that contain one another count as all within one another."""
    starts = list(_DEFINITION.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    bodies: dict[str, str] = {}
    for match, end in zip(starts, ends, strict=True):
        bodies[match[1]] = bodies.get(match[1], "") + " " + text[match.end() : end]
    inner = {name: set(re.findall(r"[A-Za-z_]\w*", body)) & bodies.keys() for name, body in bodies.items()}
    inner[""] = set(bodies)  # contains all
    depths: dict[str, int] = {}
    intersections: dict[str, int] = {}
    for group in components("", lambda name: inner[name]):
        others = {other for name in group for other in inner[name] if other in depths}
        depth = len(group) + max((depths[other] for other in others), default=0)
        depths.update(dict.fromkeys(group, depth))
        if depth > MAX_NESTED_DEFINITIONS + 1:
            raise ValueError(
                f"{group[0] or 'start'}: the grammar has {depth} definitions within one another; at most "
                f"{MAX_NESTED_DEFINITIONS} are accepted"
            )
        for name in group:
            count = sum(bodies.get(name, "").count(sign) for sign in "&~")
            if name.isupper():  # a terminal is one regular expression with the terminals in it
                count += sum(intersections.get(other, 0) for other in inner[name] if other.isupper())
            intersections[name] = count
            if count > MAX_INTERSECTIONS:
                raise ValueError(f"{name}: {count} of `&` and `~` together; at most {MAX_INTERSECTIONS} are accepted")
