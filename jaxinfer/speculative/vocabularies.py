"""Tables by which a draft model reads and predicts the tokens of a target with another tokenizer.

A target token is read as the draft's token of the same bytes, or else as several that have its bytes together; it is
drafted where one draft token has its bytes (Timor et al. 2025, token-level intersection). Special tokens are matched
by name and by what they are for. Here is no JAX.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinfer.kept_files import KeptFiles, key_of, sources_key
from jaxinfer.text import Tokenizer

TABLES = ("token_pieces", "token_index")  # names in the parameters of a model with a `models.TokenMapConfig`
MAX_PIECES = 4  # draft tokens that a target token is read as
LEAST_KEPT = 2**15  # tokens of both together from which tables are kept between processes
# Least share of a text's tokens that can be drafted: with less, such as letters alone, no round gains anything.
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
      size. Of more the last ones are there.
    counts: int32[V], how many pieces each has.
    index: int32[V], the draft's token that each is drafted by, or the draft's size for one that is not.
    size: of the draft. first_token: its token that the first position is read as; None for the one that is there.
    """

    pieces: np.ndarray
    counts: np.ndarray
    index: np.ndarray
    size: int
    first_token: int | None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Those that a draft model has beside its parameters, by name."""
        return dict(zip(TABLES, (self.pieces, self.index), strict=True))

    @property
    def num_predicted(self) -> int:
        """Tokens of the target that are drafted."""
        return int(np.sum(self.index < self.size))


def token_tables(target: ModelTokens, draft: ModelTokens) -> TokenTables:
    """The tables of a draft for a target; those of large vocabularies are kept between processes.

    Raises ValueError, with the share, if a plain text has too few tokens that could be drafted.
    """
    tables = _kept_tables(target, draft)
    sample = target.tokenizer.encode(SAMPLE, add_special_tokens=False)
    share = float(np.mean(tables.index[sample] < draft.size))
    if share < LEAST_SHARE:
        raise ValueError(
            f"{draft.name} cannot draft for {target.name}: it has {share:.1%} of the tokens of an English text, and "
            f"{LEAST_SHARE:.0%} are needed; take a draft whose tokenizer is nearer to the model's"
        )
    return tables


def make_tables(target: ModelTokens, draft: ModelTokens) -> TokenTables:
    """`token_tables` without its check."""
    texts, names = _token_bytes(target), target.tokenizer.tokens_by_id()
    ours, theirs = _ids_by_bytes(draft.tokenizer, _token_bytes(draft)), _ids_by_bytes(target.tokenizer, texts)
    special, longest = _special_pairs(target, draft), max(map(len, ours), default=0)
    pieces = np.full((target.size, MAX_PIECES), draft.size, np.int32)
    counts, index = np.zeros(target.size, np.int32), np.full(target.size, draft.size, np.int32)
    for token, text in enumerate(texts):
        if token in special:
            cut = [special[token]]
        else:  # a special token that the draft lacks is read as its name
            cut = _cut(names.get(token, "").encode() if text is None else text, ours, longest)
        counts[token] = len(cut)
        cut = cut[-MAX_PIECES:]
        pieces[token, : len(cut)] = cut
    for text, token in theirs.items():
        index[token] = ours.get(text, draft.size)
    for token, its in special.items():  # one target token for each of the draft's
        if its not in index:
            index[token] = its
    return TokenTables(pieces, counts, index, draft.size, _first_token(draft.tokenizer))


def _kept_tables(target: ModelTokens, draft: ModelTokens) -> TokenTables:
    files = KeptFiles.of("tokenizers") if target.size + draft.size >= LEAST_KEPT else None
    if files is None:
        return make_tables(target, draft)
    models = [(model.tokenizer.digest, model.size, model.eos_token_ids) for model in (target, draft)]
    key = key_of("tables of tokens", repr(models), str(MAX_PIECES), sources_key(Path(__file__)))
    shape = target.size, MAX_PIECES + 2
    content = files.read(key)
    if content is None or len(content) != 4 * shape[0] * shape[1]:
        tables = make_tables(target, draft)
        columns = np.column_stack([tables.pieces, tables.counts, tables.index])
        files.write(key, columns.astype("<i4").tobytes())
        return tables
    columns = np.frombuffer(content, "<i4").reshape(shape).astype(np.int32)
    pieces, counts, index = (np.ascontiguousarray(part) for part in (columns[:, :-2], columns[:, -2], columns[:, -1]))
    return TokenTables(pieces, counts, index, draft.size, _first_token(draft.tokenizer))


def _token_bytes(model: ModelTokens) -> list[bytes | None]:
    """The bytes of each id; None for special tokens, and ids without a token."""
    tokenizer = model.tokenizer
    return [tokenizer.token_bytes(token) if tokenizer.has_id(token) else None for token in range(model.size)]


def _ids_by_bytes(tokenizer: Tokenizer, tokens: Sequence[bytes | None]) -> dict[bytes, int]:
    """The token of each text: the first one, and one that is named by its byte (`<0x41>`) only where no other is."""
    ids: dict[bytes, int] = {}
    for token, text in enumerate(tokens):
        if text and (text not in ids or _is_named_by_byte(tokenizer, ids[text], text)):
            ids[text] = token
    return ids


def _is_named_by_byte(tokenizer: Tokenizer, token: int, text: bytes) -> bool:
    return len(text) == 1 and tokenizer.id_to_token(token) == f"<0x{text[0]:02X}>"


def _special_pairs(target: ModelTokens, draft: ModelTokens) -> dict[int, int]:
    """The draft's special token for each of the target's that is called alike, or is for the same."""
    theirs, ours = target.tokenizer, draft.tokenizer
    special = {}
    for token in sorted(theirs.special_ids):
        its = ours.token_to_id(theirs.id_to_token(token) or "")
        if its in ours.special_ids:
            special[token] = its
    roles = "eos_token_id", "bos_token_id", "pad_token_id"
    pairs = [(getattr(theirs, role), getattr(ours, role)) for role in roles]
    pairs += [(token, ours.eos_token_id) for token in target.eos_token_ids]
    for token, its in pairs:
        if token is not None and its is not None:
            special.setdefault(token, its)
    return {token: its for token, its in special.items() if token < target.size and its < draft.size}


def _first_token(tokenizer: Tokenizer) -> int | None:
    """The token that a tokenizer puts before every text."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer.encode("a")[:1] == [bos] else None


def _cut(text: bytes, ids: dict[bytes, int], longest: int) -> list[int]:
    """The longest tokens that bytes begin with, one after another; bytes that no token has are left out."""
    tokens, start = [], 0
    while start < len(text):
        end = min(len(text), start + longest)
        while end > start and text[start:end] not in ids:
            end -= 1
        if end > start:
            tokens.append(ids[text[start:end]])
        start = max(end, start + 1)
    return tokens
