"""Streaming detokenization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

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

    - With byte-level tokenizers (GPT-2, Llama 3, Qwen, DeepSeek) a character comes with its last byte.
    - With byte fallback (`<0xE4>` tokens: Llama 2, Mistral v1, Gemma) a run of byte tokens comes when the run ends,
      since the library turns the whole run into U+FFFD if one of its bytes is invalid.

    `is_incremental` is False for a decoder without an exact streaming form (CTC, a regular expression after Fuse):
    then `add` returns "" and `finalize` everything.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = build_decoder(tokenizer.decoder_spec)
        self._held_ids: list[int] = []
        self._is_finished = False

    @property
    def is_incremental(self) -> bool:
        """Whether text comes before `finalize`."""
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
