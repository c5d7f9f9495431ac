"""Token ids that a user gives as a prompt."""

import operator
from typing import Any


def read_token_ids(prompt: Any, vocab_size: int | None = None) -> list[int]:
    """The ids of a prompt: a sequence of integers or an integer array, each below `vocab_size` if that is given.

    Raises ValueError, with the position and the value, for what is no token id: `True` and `1.0` would pass `int()`.
    """
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, (bytes, dict, set, frozenset)) or not hasattr(values, "__iter__"):
        raise ValueError(f"a prompt is a text or a list of token ids, got {_shown(prompt)}")
    ids = list(values)
    if set(map(type, ids)) - {int}:
        ids = [_read_id(value, position) for position, value in enumerate(ids)]
    if vocab_size is not None and ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        position, token = next((at, token) for at, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise ValueError(f"token id {_shown(token)} is outside the vocabulary of {vocab_size}, at position {position}")
    return ids


def _read_id(value: Any, position: int) -> int:
    """Integers of NumPy and JAX have an index too, and so do their booleans, or had in older releases."""
    is_boolean = isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"
    try:
        if not is_boolean:
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"the prompt has {_shown(value)} at position {position}, which is no token id: ids are integers")


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an integer of thousands of digits
        return f"an integer of {value.bit_length()} bits"
