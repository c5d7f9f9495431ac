"""Streaming detokenization, and stop strings in streamed text."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxinfer.text.decoders import build_decoder

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns token ids into text as they come.

    The contract, for any ids at all: the deltas of `add` and the text of `finalize`, joined, equal
    `tokenizer.decode(all_ids, skip_special_tokens)` exactly. Text is given out as soon as no later token can change
    it; U+FFFD only where the full decode has it. Each token is looked at once, so the cost per token is constant.

    The decoder runs as an incremental machine, not as repeated decodes of a window: a window has no exact answer
    for decoders whose output depends on how far back a run of byte tokens began. Two consequences:

    - With byte-level tokenizers (GPT-2, Llama 3, Qwen, DeepSeek) a character is emitted with its last byte.
    - With byte fallback (`<0xE4>` tokens: Llama 2, Mistral v1, Gemma) a run of byte tokens is emitted when it ends,
      since the library turns the whole run into U+FFFD if one of its bytes is invalid.

    `is_incremental` is False for a decoder without an exact streaming form (CTC, a regular expression after Fuse):
    then `add` returns "" and `finalize` everything.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = build_decoder(tokenizer.decoder_spec)
        self._held_ids: list[int] = []
        self._is_finished = False

    @property
    def is_incremental(self) -> bool:
        """True if text comes before `finalize`."""
        return self._decoder is not None

    def add(self, ids: Iterable[int] | int) -> str:
        """Take the next token ids; return the text that is certain now.

        Raises:
            ValueError: An id outside of the vocabulary.
            RuntimeError: Called after `finalize`.
        """
        if self._is_finished:
            raise RuntimeError("this StreamingDetokenizer is finished; make a new one for the next sequence")
        ids = [int(token_id) for token_id in (ids if isinstance(ids, Iterable) else (ids,))]
        self._tokenizer.check_ids(ids)
        if self._decoder is None:
            self._held_ids.extend(ids)
            return ""
        tokenizer, decoder = self._tokenizer, self._decoder
        skipped = tokenizer.skipped_tokens if self._skip_special_tokens else ()
        tokens = (tokenizer.id_to_token(token_id) for token_id in ids)
        return "".join(decoder.push(token) for token in tokens if token is not None and token not in skipped)

    def finalize(self) -> str:
        """Return the rest of the text: no token follows. A second call returns ""."""
        if self._is_finished:
            return ""
        self._is_finished = True
        if self._decoder is None:
            return self._tokenizer.decode(self._held_ids, skip_special_tokens=self._skip_special_tokens)
        return self._decoder.flush()


MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024


class StopResult(NamedTuple):
    """Result of one `feed`: the `text` that may be sent, and the stop string that was `matched`, or None."""

    text: str
    matched: str | None


class StopStringMatcher:
    """Ends streamed text at the first stop string; no text from the stop string on is returned.

    The text ends at the *earliest character that completes* a stop string; of several stop strings completed by
    that same character the longest counts, so the cut is as early as can be. This depends on the characters
    alone, not on how tokens split them, and never needs text from after the stop. (It differs from "smallest
    start" only where one stop string occurs inside a longer one: with stops `"abcd"` and `"bc"`, `"abc"` stops at
    `"bc"`, whatever the model would have generated next.)

    The longest end of the text that could still become a stop string is held back, and no more. Aho-Corasick:
    constant time per character whatever the number of stop strings.

    Args:
        stops: At most 16 strings of 1 to 1,024 characters. One `str` is taken as one stop string.
        include_stop: Also send the stop string itself (`include_stop_str_in_output`).

    Raises ValueError: too many stop strings, or one that is empty or too long.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        self._stops = _validate(stops)
        self._include_stop = include_stop
        self._next, self._fail, self._depth, self._output = _automaton(self._stops)
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matched

    def feed(self, delta: str) -> StopResult:
        """Take the next piece of text; return what may be sent. After a match the text stays empty."""
        if self._matched is not None:
            return StopResult("", self._matched)
        state, text = self._state, self._held + delta
        transitions, fail = self._next, self._fail
        for index, char in enumerate(delta, start=len(self._held) + 1):
            while state and char not in transitions[state]:
                state = fail[state]
            state = transitions[state].get(char, 0)
            if stop := self._output[state]:
                self._matched, self._held = stop, ""
                return StopResult(text[: index if self._include_stop else index - len(stop)], stop)
        self._state = state
        num_sent = len(text) - self._depth[state]
        self._held = text[num_sent:]
        return StopResult(text[:num_sent], None)

    def flush(self) -> str:
        """Return what was held back: the text ended without completing a stop string. Empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held


def _validate(stops: Sequence[str]) -> tuple[str, ...]:
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(stops)} stop strings were given; at most {MAX_STOP_STRINGS} are allowed")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise ValueError(f"stop[{index}] must be a string, not {type(stop).__name__}")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise ValueError(f"stop[{index}] has {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed")
    return stops


def _automaton(stops: Sequence[str]) -> tuple[list[dict[str, int]], list[int], list[int], list[str]]:
    """Aho-Corasick automaton: transitions, failure links, depths, and the longest stop string ending in a state."""
    transitions: list[dict[str, int]] = [{}]
    depth, output = [0], [""]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in transitions[state]:
                transitions[state][char] = len(transitions)
                transitions.append({})
                depth.append(depth[state] + 1)
                output.append("")
            state = transitions[state][char]
        output[state] = stop
    fail = [0] * len(transitions)
    queue = deque(transitions[0].values())
    while queue:
        state = queue.popleft()
        for char, child in transitions[state].items():
            back = fail[state]
            while back and char not in transitions[back]:
                back = fail[back]
            fail[child] = transitions[back].get(char, 0)
            output[child] = output[child] or output[fail[child]]
            queue.append(child)
    return transitions, fail, depth, output
