"""Comparing the vocabularies of two tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


def check_same_tokens(one: Tokenizer, other: Tokenizer, names: tuple[str, str]) -> None:
    """Raises ValueError, with the first id that differs, unless both map the same ids to the same tokens.

    Ids that only one of them has are ignored, since models pad their vocabularies differently.
    """
    tokens, others = one.tokens_by_id(), other.tokens_by_id()
    for token_id in sorted(tokens.keys() & others.keys()):
        if tokens[token_id] != others[token_id]:
            raise ValueError(
                f"{names[0]} and {names[1]} have different tokenizers: token id {token_id} is "
                f"{tokens[token_id]!r} in one and {others[token_id]!r} in the other"
            )
    if not tokens.keys() & others.keys():
        raise ValueError(f"{names[0]} and {names[1]} have no token in common")
