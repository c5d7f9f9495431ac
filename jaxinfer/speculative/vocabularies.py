"""Tables by which a draft model reads and predicts the tokens of a target with another tokenizer.

A target token is read as the draft's token of the same bytes, or else as several that have its bytes together; it is
drafted where one draft token has its bytes. Special tokens are matched by what they are for. Here is no JAX.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.text import Tokenizer

TABLES = ("token_pieces", "token_index")  # names in the parameters of a model (`models.TokenMapConfig`)
MAX_PIECES = 4  # draft tokens that a target token is read as
# A text of the target that has fewer tokens in common with the draft than this is not worth drafting: such a draft
# proposes words letter by letter, or not at all.
LEAST_SHARE = 0.3
SAMPLE = """The first two days of the trial went well, and nobody at the office expected what came next. "We have 12 \
new cases," she said; "it's more than last year." He didn't answer at once.

They looked at the numbers again, then wrote to the people who had made the system, asking how long it would take. The \
reply was short: about three weeks, if everything goes as planned."""


@dataclass(frozen=True)
class ModelTokens:
    """The tokens of a model.

    Attributes:
      name: for messages. size: ids of the model, of which the tokenizer may have fewer.
      eos_token_ids: tokens that end an answer.
    """

    name: str
    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class TokenTables:
    """Attributes:
    pieces: int32[V, m], the draft's tokens that each of a target's V tokens is read as, filled up with the draft's
      number of tokens.
    index: int32[V], the draft token that each is drafted by, or the draft's number of tokens.
    first_token: draft token that the first position is read as; None for the one that is there.
    is_cut: bool[V], whether a token has more pieces, of which the last are read.
    num_predicted: target tokens that are drafted.
    """

    pieces: np.ndarray
    index: np.ndarray
    first_token: int | None
    is_cut: np.ndarray
    num_predicted: int

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What the draft model's parameters have of them, by name."""
        return dict(zip(TABLES, (self.pieces, self.index), strict=True))


def token_tables(target: ModelTokens, draft: ModelTokens) -> TokenTables:
    """The tables of a draft for a target. Raises ValueError, with the share, if a plain text has few common tokens."""
    own, others = _token_bytes(draft), _token_bytes(target)
    id_of, drafted = _ids_by_bytes(draft.tokenizer, own), _ids_by_bytes(target.tokenizer, others)
    roles = _same_roles(target, draft)
    nothing = next((token for token in (draft.tokenizer.pad_token_id, draft.tokenizer.eos_token_id) if token), 0)
    pieces = np.full((target.size, MAX_PIECES), draft.size, np.int32)
    index, is_cut = np.full(target.size, draft.size, np.int32), np.zeros(target.size, bool)
    cut = _Pieces(id_of)
    names = target.tokenizer.tokens_by_id()
    for token in range(target.size):
        text = others[token]
        if token in roles:
            found = [roles[token]]
        elif text is None:  # a special token that the draft lacks is read as its name
            found = cut(names.get(token, "").encode())
        else:
            found = [id_of[text]] if text in id_of else cut(text)
        found = found or [nothing]
        is_cut[token] = len(found) > MAX_PIECES
        pieces[token, : len(found)] = found[-MAX_PIECES:]
    for text, token in drafted.items():
        index[token] = id_of.get(text, draft.size)
    taken = set(index.tolist())
    for token, its in roles.items():
        if its not in taken:
            index[token] = its
            taken.add(its)
    sample = target.tokenizer.encode(SAMPLE, add_special_tokens=False)
    share = float(np.mean(index[sample] < draft.size))
    if share < LEAST_SHARE:
        raise ValueError(
            f"{share:.0%} of the tokens that {target.name} has of a plain text are tokens of {draft.name}, and a draft "
            f"needs {LEAST_SHARE:.0%}: their tokenizers are too different"
        )
    return TokenTables(pieces, index, _first_token(draft.tokenizer), is_cut, int(np.sum(index < draft.size)))


def _token_bytes(model: ModelTokens) -> list[bytes | None]:
    """The bytes of each id; None for special tokens, and ids without a token."""
    tokenizer = model.tokenizer
    return [tokenizer.token_bytes(token) if tokenizer.has_id(token) else None for token in range(model.size)]


def _ids_by_bytes(tokenizer: Tokenizer, tokens: Sequence[bytes | None]) -> dict[bytes, int]:
    """The token of each text: the first one, and one that is named by its byte (`<0x41>`) only where no other is."""
    found: dict[bytes, int] = {}
    for token, text in enumerate(tokens):
        if text and (text not in found or _is_named_by_byte(tokenizer, found[text], text)):
            found[text] = token
    return found


def _is_named_by_byte(tokenizer: Tokenizer, token: int, text: bytes) -> bool:
    return len(text) == 1 and tokenizer.id_to_token(token) == f"<0x{text[0]:02X}>"


def _same_roles(target: ModelTokens, draft: ModelTokens) -> dict[int, int]:
    """The draft's special token for each of the target's that is called alike, or is for the same."""
    one, other = target.tokenizer, draft.tokenizer
    found = {}
    for end in target.eos_token_ids:
        if other.eos_token_id is not None:
            found[end] = other.eos_token_id
    for role in ("pad_token_id", "eos_token_id", "bos_token_id"):
        pair = getattr(one, role), getattr(other, role)
        if None not in pair:
            found[pair[0]] = pair[1]
    for token in one.special_ids:
        its = other.token_to_id(one.id_to_token(token) or "")
        if its is not None and its in other.special_ids:
            found[token] = its
    return {token: its for token, its in found.items() if token < target.size and its < draft.size}


def _first_token(tokenizer: Tokenizer) -> int | None:
    """The token that a tokenizer puts before every text."""
    first, bos = tokenizer.encode("a")[:1], tokenizer.bos_token_id
    return bos if first == [bos] else None


class _Pieces:
    """Cuts bytes into the longest tokens, from the left; bytes that no token has are left out."""

    def __init__(self, id_of: dict[bytes, int]):
        self._id_of, self._longest = id_of, max(map(len, id_of), default=0)

    def __call__(self, text: bytes) -> list[int]:
        found, start = [], 0
        while start < len(text):
            end = min(len(text), start + self._longest)
            while end > start and text[start:end] not in self._id_of:
                end -= 1
            if end > start:
                found.append(self._id_of[text[start:end]])
            start = max(end, start + 1)
        return found
