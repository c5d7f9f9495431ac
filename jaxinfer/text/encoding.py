"""Encodes untrusted text: message content never becomes a control token.

`tokenizers` can be told to ignore *special* tokens only, and even then its models may produce an added token's id
by merging (or, for Unigram, by finding it in the vocabulary). So content is encoded by a second tokenizer that has
no control tokens at all: the same model, normalizer and pre-tokenizer, without the control tokens among the added
tokens, and with their entries in the model's own vocabulary renamed to a secret string. Ids stay the same.

Sentencepiece-style tokenizers put a dummy `▁` at the start of a text. Pieces of one chat are encoded apart only
where control tokens separate them, and the library itself treats such pieces apart; `position` tells whether the
library would have put the dummy there.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tokenizers

from jaxinfer.text.chat_template import ChatTemplateError, RenderedChat
from jaxinfer.text.decoders import load_component

Position = Literal["start", "after_token", "after_normalized_token"]
"""Place of a piece of text: at the start of the whole text, or after a control token (which may be one that
is matched in the normalized text, so that the normalizer has already run over both sides together)."""


class ContentEncoder:
    """Encodes text in which no control token exists.

    Args:
        backend: The whole tokenizer.
        control: Control tokens, text to id (with the unknown token, if it is an added token).
        is_reachable: Whether the model's own vocabulary could produce one of them from plain text.
        normalizer, pre_tokenizer: Their entries in tokenizer.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        control: Mapping[str, int],
        is_reachable: bool,
        normalizer: Mapping[str, Any] | None,
        pre_tokenizer: Mapping[str, Any] | None,
    ):
        self._backend = backend
        self._control = dict(control)
        self._is_reachable = is_reachable
        self._normalizer = normalizer
        self._pre_tokenizer = pre_tokenizer
        self._variants: dict[Position, tuple[tokenizers.Tokenizer, dict[int, int]]] = {}

    def encode(self, text: str, position: Position = "start") -> list[int]:
        """Token ids of `text`; none of them is a control token's."""
        if position not in self._variants:
            self._variants[position] = self._build(position)
        variant, renumbered = self._variants[position]
        ids = variant.encode(text, add_special_tokens=False).ids
        return [renumbered.get(token_id, token_id) for token_id in ids] if renumbered else ids

    def _build(self, position: Position) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        if self._variants:
            model = next(iter(self._variants.values()))[0].model
        else:
            model = self._model_without_control_tokens()
        variant = tokenizers.Tokenizer(model)
        normalizer, pre_tokenizer = self._normalizer, self._pre_tokenizer
        if position != "start":
            pre_tokenizer = _without_first_prefix(pre_tokenizer)
        if position == "after_normalized_token":
            normalizer = _without_prepend(normalizer)
        if normalizer is not None:
            variant.normalizer = load_component("normalizer", normalizer)
        if pre_tokenizer is not None:
            variant.pre_tokenizer = load_component("pre_tokenizer", pre_tokenizer)
        added = self._backend.get_added_tokens_decoder()
        variant.add_tokens([token for token in added.values() if token.content not in self._control])
        kept = {token.content: token_id for token_id, token in added.items()}
        renumbered = {token_id: kept[token.content] for token_id, token in variant.get_added_tokens_decoder().items()}
        return variant, {token_id: kept_id for token_id, kept_id in renumbered.items() if token_id != kept_id}

    def _model_without_control_tokens(self) -> Any:
        if not self._is_reachable:
            return self._backend.model
        model = json.loads(self._backend.to_str())["model"]
        secret = {text: f"\U0010fffd{secrets.token_hex(16)}\U0010fffd{text}" for text in self._control}
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {secret.get(text, text): token_id for text, token_id in vocab.items()}
        else:  # Unigram: a list of [text, score], whose index is the id
            model["vocab"] = [[secret.get(text, text), score] for text, score in vocab]
        if model.get("unk_token") in secret:
            model["unk_token"] = secret[model["unk_token"]]
        if "merges" in model:
            prefix = model.get("continuing_subword_prefix") or ""
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [
                [left, right]
                for left, right in pairs
                if not {left, right, left + right.removeprefix(prefix)} & secret.keys()
            ]
        return load_component("model", model)


class ChatEncoder:
    """Encodes rendered chats: control tokens only where the template wrote them.

    Args:
        backend: The whole tokenizer.
        content: For text without control tokens.
        control_ids: Ids of the control tokens.
        unknown: Id and text of the unknown token, if it is an added token. Its *text* counts as a control token;
            its id alone does not, since a character the vocabulary lacks has it too.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        content: ContentEncoder,
        control_ids: frozenset[int],
        unknown: tuple[int, str] | None,
    ):
        self._backend = backend
        self._content = content
        self._added = backend.get_added_tokens_decoder()
        self._control_ids = control_ids
        self._unknown = unknown
        used = {char for token in self._added.values() for char in token.content}
        self._blank = next(chr(code) for code in range(0x10FFFD, 0x10FF00, -1) if chr(code) not in used)

    def encode(self, chat: RenderedChat) -> list[int]:
        """Token ids of a rendered chat.

        The chat is encoded as one string, the way Transformers does it. If every control token found lies in text
        of the template, those ids are the answer. Otherwise content holds control text: all that is not the
        template's is blanked out to find the template's control tokens, and what stands between them is encoded
        by the `ContentEncoder`, one piece each.

        Raises ChatTemplateError: a control token that is neither provably the template's nor part of the content.
        """
        text, trusted = chat.text, _TrustedText(chat)
        ids, tokens = self._find_control_tokens(text)
        forged = [(start, end) for _, start, end in tokens if not trusted.covers(start, end)]
        if not forged:
            return ids
        for start, end in forged:
            forgery = text[start:end].strip()
            if forgery not in chat.content or forgery in chat.doubtful:
                raise ChatTemplateError(
                    f"the rendered chat has the control token {forgery!r} at character {start}, and it cannot be "
                    "told whether the chat template or a message wrote it"
                )
        blanked = trusted.blank_out_the_rest(self._blank)
        tokens = [token for token in self._find_control_tokens(blanked)[1] if trusted.covers(*token[1:])]
        return self._encode_around(text, tokens)

    def _find_control_tokens(self, text: str) -> tuple[list[int], list[tuple[int, int, int]]]:
        """All token ids of `text`, and the control tokens among them as (id, start, end)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        unknown_id, unknown_text = self._unknown or (None, "")
        if self._control_ids.isdisjoint(ids) and unknown_id not in ids:
            return ids, []
        return ids, [
            (token_id, start, end)
            for token_id, (start, end) in zip(ids, encoding.offsets, strict=True)
            if token_id in self._control_ids or (token_id == unknown_id and text[start:end].strip() == unknown_text)
        ]

    def _encode_around(self, text: str, tokens: Sequence[tuple[int, int, int]]) -> list[int]:
        ids: list[int] = []
        done: int = 0
        position: Position = "start"
        for token_id, start, end in tokens:
            if start > done:
                ids += self._content.encode(text[done:start], position)
            ids.append(token_id)
            done = end
            position = "after_normalized_token" if self._added[token_id].normalized else "after_token"
        return ids + self._content.encode(text[done:], position) if done < len(text) else ids


class _TrustedText:
    """The characters of a rendered chat that the template wrote as (pieces of) control tokens."""

    def __init__(self, chat: RenderedChat):
        self._text = chat.text
        self._spans: list[tuple[int, int]] = []
        for start, end in chat.trusted_spans:
            if self._spans and self._spans[-1][1] == start:
                start = self._spans.pop()[0]
            self._spans.append((start, end))
        self._starts = [start for start, _ in self._spans]

    def covers(self, start: int, end: int) -> bool:
        """True if all of `[start, end)`, apart from white space at its ends, is trusted."""
        token = self._text[start:end]
        start, end = end - len(token.lstrip()), start + len(token.rstrip())
        index = bisect_right(self._starts, start) - 1
        return start < end and index >= 0 and self._spans[index][1] >= end

    def blank_out_the_rest(self, blank: str) -> str:
        """The text with every untrusted character but white space replaced, positions unchanged."""
        pieces, done = [], 0
        for start, end in [*self._spans, (len(self._text), len(self._text))]:
            pieces += [re.sub(r"\S", blank, self._text[done:start]), self._text[start:end]]
            done = end
        return "".join(pieces)


def _without_first_prefix(spec: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A pre-tokenizer that does not treat its text as the start of a string: Metaspace "first" becomes "never"."""
    if spec is None:
        return None
    if spec["type"] == "Sequence":
        return {**spec, "pretokenizers": [_without_first_prefix(child) for child in spec["pretokenizers"]]}
    if spec["type"] == "Metaspace" and spec.get("prepend_scheme") == "first":
        return {**spec, "prepend_scheme": "never"}
    return spec


def _without_prepend(spec: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A normalizer that puts nothing in front of its text."""
    if spec is None or spec["type"] == "Prepend":
        return None
    if spec["type"] == "Sequence":
        children = [_without_prepend(child) for child in spec["normalizers"]]
        return {**spec, "normalizers": [child for child in children if child is not None]}
    return spec
