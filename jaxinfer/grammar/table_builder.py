"""Tables of a regular language over a vocabulary: which tokens may follow in each state, and where they lead."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.grammar.automaton import Automaton
from jaxinfer.grammar.minimize import breadth_first, useful_states
from jaxinfer.grammar.nodes import TooLargeError
from jaxinfer.grammar.spelling import MAX_FORCED, Spelling
from jaxinfer.grammar.utf8 import unique_rows
from jaxinfer.grammar.vocabulary import Vocabulary

_MAX_CELLS = 2**20  # of one array at a time
_MAX_MAP_BYTES = 2**28
_MAX_STEPS = 2**30  # states times distinct beginnings of tokens: seconds


@dataclass(frozen=True, eq=False)
class TokenTable:
    """A finite automaton over tokens, with Q states, C classes of tokens and M distinct masks over V tokens.

    State 0 is the first. Tokens of one class lead from every state to the same state, or are refused in it.

    Attributes:
      classes: int16[V], the class of each token.
      successors: int32[Q, C], the state after a token of a class, -1 where it is refused. An end-of-sequence id leads
        to the last state, in which only end-of-sequence ids are allowed.
      masks: uint32[M, ceil(V / 32)], bit v % 32 of word v // 32 is token v. mask_of: int32[Q], each state's mask.
      drafts: int32[Q], the token to draft where the text that follows is forced, -1 elsewhere. Other tokens may be
        allowed there too, which spell the same text in other pieces.
    """

    classes: np.ndarray
    successors: np.ndarray
    masks: np.ndarray
    mask_of: np.ndarray
    drafts: np.ndarray

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())

    def state_after(self, tokens: Sequence[int]) -> int:
        """The state after these tokens from the first one on, which must be allowed."""
        state = 0
        for token in tokens:
            state = int(self.successors[state, self.classes[token]])
            if state < 0:
                raise ValueError(f"token {token} is refused by the grammar's table")
        return state


@dataclass(frozen=True)
class TableLimits:
    """Limits of a table.

    Attributes:
      max_states: Q, with the last one. max_classes: C. max_masks: M. max_bytes: of all arrays.
    """

    max_states: int = 8193
    max_classes: int = 32767
    max_masks: int = 4096
    max_bytes: int = 256 * 2**20


def build_table(automaton: Automaton, spelling: Spelling, limits: TableLimits | None = None) -> TokenTable:
    """The table of a language over the vocabulary of a tokenizer, with its spelling of forced texts.

    A state has a row if tokens lead to it, and from each row they lead to an end.

    Raises:
      TooLargeError: names the limit.
      ValueError: the vocabulary has no end-of-sequence id, or its tokens can begin a text of the language that they
        cannot end.
    """
    vocabulary, limits = spelling.vocabulary, limits or TableLimits()
    if not vocabulary.eos_token_ids:
        raise ValueError("the vocabulary has no end-of-sequence id, so an answer could not end")
    classes, successors = _token_classes(automaton, vocabulary, limits)
    forced = _forced_texts(automaton)
    classes, successors = _with_spelling(classes, successors, forced, spelling)
    kept = _reached_states(successors, automaton.is_accepting)
    if len(kept) + 1 > limits.max_states:
        raise TooLargeError(f"the table has {len(kept) + 1} states; at most {limits.max_states} are allowed")
    number = np.full(automaton.num_states + 1, -1, np.int32)
    number[kept] = np.arange(len(kept))
    classes, successors = _with_end(
        classes, number[successors[kept]], automaton.is_accepting[kept], vocabulary.eos_token_ids
    )
    if successors.shape[1] > limits.max_classes:
        raise TooLargeError(
            f"the table has {successors.shape[1]} classes of tokens; at most {limits.max_classes} are allowed"
        )
    allowed, mask_of = unique_rows(successors >= 0)
    num_bytes = classes.nbytes + successors.nbytes + 4 * vocabulary.num_words * len(allowed) + 8 * len(successors)
    if len(allowed) > limits.max_masks or num_bytes > limits.max_bytes:
        raise TooLargeError(
            f"the table has {len(allowed)} masks and {num_bytes} bytes; at most {limits.max_masks} and "
            f"{limits.max_bytes} are allowed"
        )
    return TokenTable(
        classes=classes,
        successors=successors,
        masks=_pack(allowed, classes, vocabulary.num_words),
        mask_of=mask_of.astype(np.int32),
        drafts=np.array(
            [*(spelling.first(text) if (text := forced.get(state)) else -1 for state in kept.tolist()), -1], np.int32
        ),
    )


def _token_classes(automaton: Automaton, vocabulary: Vocabulary, limits: TableLimits) -> tuple[np.ndarray, np.ndarray]:
    """int32[V], the class of each token, and int32[Q, C], where each class leads; class 0 is refused everywhere.

    A text maps states to states, and most beginnings of tokens share few such maps. So the tree of all tokens is walked
    level by level with one row per map, not one per node.
    """
    columns, byte_class = unique_rows(automaton.next.T)  # bytes that no state tells apart
    steps = np.ascontiguousarray(np.concatenate([columns, np.full((len(columns), 1), -1, np.int32)], axis=1))
    num_states, num_bytes = automaton.num_states, len(columns)
    refused = np.full(num_states, -1, np.int32)
    maps = [refused, np.arange(num_states, dtype=np.int32)]
    numbers = {row.tobytes(): index for index, row in enumerate(maps)}
    map_of = np.array([1])  # of the beginnings of a level
    classes = np.zeros(len(vocabulary), np.int32)
    num_steps = 0
    for level in vocabulary.trie:
        keys = map_of[level.parents] * num_bytes + byte_class[level.bytes]
        keys[map_of[level.parents] == 0] = 0  # what is refused everywhere stays so, whatever follows
        pairs, pair_of = np.unique(keys, return_inverse=True)
        map_numbers = np.zeros(len(pairs), np.int64)
        chunk = max(1, _MAX_CELLS // num_states)
        for low in range(0, len(pairs), chunk):
            before, byte = np.divmod(pairs[low : low + chunk], num_bytes)
            rows = steps[byte[:, None], np.stack([maps[index] for index in before])]
            for index, row in enumerate(rows):
                number = numbers.setdefault(data := row.tobytes(), len(maps))
                if number == len(maps):
                    maps.append(np.frombuffer(data, np.int32))
                map_numbers[low + index] = number
            num_steps += rows.size
            if len(maps) * num_states * 4 > _MAX_MAP_BYTES or num_steps > _MAX_STEPS:
                raise TooLargeError(f"tokens lead from {num_states} states in {len(maps)} ways and more")
        map_of = map_numbers[pair_of]
        classes[level.tokens] = map_of[level.ends]
    used, classes = np.unique(np.concatenate([[0], classes]), return_inverse=True)
    if len(used) * num_states * 4 > limits.max_bytes:
        raise TooLargeError(
            f"the table has {len(used)} classes of tokens in {num_states} states; at most {limits.max_bytes} bytes are "
            "allowed"
        )
    return classes[1:].astype(np.int32), np.stack([maps[index] for index in used], axis=1)


def _reached_states(successors: np.ndarray, is_accepting: np.ndarray) -> np.ndarray:
    """The states to which tokens lead from state 0, which is the first."""
    reached = breadth_first(successors, 0)
    if not useful_states(successors, is_accepting)[reached].all():
        # Without the token that leads there its mask would not be llguidance's.
        raise ValueError("the tokens of the vocabulary cannot end every text of the language that they can begin")
    return reached


def _with_end(
    classes: np.ndarray, successors: np.ndarray, is_accepting: np.ndarray, eos_token_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """int16[V] and int32[Q + 1, C]: with the last state and the class of end-of-sequence ids; equal classes are one."""
    num_states, num_classes = successors.shape
    columns = np.full((num_classes + 1, num_states + 1), -1, np.int32)
    columns[:-1, :-1] = successors.T
    columns[-1, :-1] = np.where(is_accepting, num_states, -1)
    columns[-1, -1] = num_states
    classes = classes.copy()
    classes[list(eos_token_ids)] = num_classes
    used, classes = np.unique(classes, return_inverse=True)
    columns, class_of = unique_rows(columns[used])
    if len(columns) > 32767:
        raise TooLargeError(f"the table has {len(columns)} classes of tokens; at most 32767 are allowed")
    return class_of[classes].astype(np.int16), np.ascontiguousarray(columns.T)


def _pack(allowed: np.ndarray, classes: np.ndarray, num_words: int) -> np.ndarray:
    """uint32[M, words] of bool[M, C]."""
    masks = np.zeros((len(allowed), num_words * 4), np.uint8)
    indices = classes.astype(np.intp)
    for mask, row in zip(masks, allowed, strict=True):
        bits = np.packbits(row.take(indices), bitorder="little")
        mask[: len(bits)] = bits
    return masks.view("<u4").astype(np.uint32)


def _forced_texts(automaton: Automaton) -> dict[int, bytes]:
    """By state, the text that must follow, as far as there is no choice."""
    is_possible = automaton.next >= 0
    is_forced = (is_possible.sum(axis=1) == 1) & ~automaton.is_accepting
    byte = np.argmax(is_possible, axis=1)
    after = automaton.next[np.arange(automaton.num_states), byte].tolist()
    texts = {}
    for first in np.flatnonzero(is_forced).tolist():
        text, state = bytearray(), first
        while is_forced[state] and len(text) < MAX_FORCED:
            text.append(byte[state])
            state = after[state]
        texts[first] = bytes(text)
    return texts


def _with_spelling(
    classes: np.ndarray, successors: np.ndarray, forced: dict[int, bytes], spelling: Spelling
) -> tuple[np.ndarray, np.ndarray]:
    """Leaves the tokens of `Spelling` alone in states whose text is forced: tokens that are allowed in some of
    these have classes of their own."""
    allowed_in: dict[int, list[int]] = {}  # states by token
    restricted = []
    for state, text in forced.items():
        if tokens := spelling.tokens(text):
            restricted.append(state)
            for token in tokens:
                if successors[state, classes[token]] >= 0:
                    allowed_in.setdefault(token, []).append(state)
    if not restricted:
        return classes, successors
    classes, kinds = classes.copy(), {}
    columns = [np.where(np.isin(np.arange(len(successors)), restricted)[:, None], -1, successors)]
    for token, states in allowed_in.items():
        kind = (int(classes[token]), *states)
        if kind not in kinds:
            kinds[kind] = successors.shape[1] + len(kinds)
            column = columns[0][:, kind[0]].copy()
            column[states] = successors[states, kind[0]]
            columns.append(column[:, None])
        classes[token] = kinds[kind]
    return classes, np.concatenate(columns, axis=1)
