"""An answer's place in its grammar, by llguidance (https://github.com/guidance-ai/llguidance): right for every grammar.

llguidance never raises: a matcher that hits a limit or gets a wrong token stays in an error state, which is read here
after each call.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.extras import install_hint
from jaxinfer.grammar.spelling import MAX_FORCED, Spelling
from jaxinfer.grammar.structured import GrammarError

if TYPE_CHECKING:
    import llguidance

# Of llguidance's work, by its own counts: one grammar or one token cannot hold up the other answers for seconds.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


_SPECIAL = b"\xff"  # begins a special token, in texts of llguidance; no text in UTF-8 has it


class MatcherLibrary:
    """llguidance for one tokenizer. Raises ImportError, with what to install, where it is not there."""

    def __init__(self, spelling: Spelling):
        try:
            import llguidance
        except ImportError:
            raise ImportError(f"structured output needs llguidance: {install_hint('structured')}") from None
        self._library, self.spelling = llguidance, spelling
        self.vocabulary = spelling.vocabulary

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        wrapper = self._library.TokenizerWrapper(_Tokens(self.spelling))
        return self._library.LLTokenizer(
            wrapper, n_vocab=len(self.vocabulary), eos_token=list(self.vocabulary.eos_token_ids)
        )

    @cached_property
    def _executor(self) -> "llguidance.LLExecutor":
        return self._library.LLExecutor()

    def matcher(self, grammar: str) -> "Matcher":
        """At the beginning of a grammar, which is what `LLMatcher.grammar_from_*` returns. Raises GrammarError."""
        limits = self._library.LLParserLimits(**LIMITS)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        return Matcher(self, matcher)

    def fill(self, matchers: "Sequence[Matcher]", masks: np.ndarray) -> None:
        """Writes the masks of what may follow to the rows of uint32[len(matchers), ceil(V / 32)], in llguidance's own
        threads. A row is zero where its matcher has failed."""
        jobs = [(matcher.of_library, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks.shape[1] * 4, masks.shape[0])
        for row, matcher in enumerate(matchers):
            if matcher.error is not None:
                masks[row] = 0
            elif spelled := list(self.spelling.tokens(matcher.forced)):
                words, bits = np.divmod(np.array(spelled), 32)
                kept = np.zeros_like(masks[row])
                np.bitwise_or.at(kept, words, np.uint32(1) << bits.astype(np.uint32))
                masks[row] &= kept


class Matcher:
    """An answer's place in its grammar."""

    def __init__(self, library: MatcherLibrary, of_library: "llguidance.LLMatcher"):
        self.library, self.of_library = library, of_library

    def copy(self) -> "Matcher":
        """A matcher at this place, for another answer."""
        return Matcher(self.library, self.of_library.deep_copy())

    def accept(self, tokens: Sequence[int]) -> int:
        """Goes on with the leading tokens that are allowed, and returns how many. After an end-of-sequence id, which is
        allowed where the answer may end, nothing is."""
        ending = self.library.vocabulary.eos_token_ids
        for count, token in enumerate(tokens):
            if token in ending:
                return count + self.of_library.is_accepting()
            spelled = self.library.spelling.tokens(self.forced)
            # A wrong token that is consumed leaves an error behind.
            if (spelled and token not in spelled) or not self.of_library.validate_tokens([token]):
                return count
            if not self.of_library.consume_token(token):
                return count
        return len(tokens)

    @property
    def forced(self) -> bytes:
        """The text that must follow, as far as there is no choice: up to a special token, which has no other
        spelling."""
        return self.of_library.compute_ff_bytes().partition(_SPECIAL)[0][:MAX_FORCED]

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a limit of time or size."""
        return self.of_library.get_error().strip() if self.of_library.is_error() else None


class _Tokens:
    """A vocabulary as llguidance wants it."""

    def __init__(self, spelling: Spelling):
        self._encode, vocabulary = spelling.encode, spelling.vocabulary
        self.eos_token_id, self.bos_token_id = vocabulary.eos_token_ids[0], None
        # A special token has the name that forced text has for it.
        self.tokens = [
            _SPECIAL + b"[%d]" % number if token is None else token for number, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = [number for number, token in enumerate(vocabulary.tokens) if token is None]

    def __call__(self, text: Any) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace")))
