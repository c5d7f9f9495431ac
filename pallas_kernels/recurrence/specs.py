"""Static facts of a pass over the states of all slots."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortSpec:
    """Static facts of one call: states are [slots, key_heads, key_size, width], tokens at most `tokens` of a slot."""

    slots: int
    key_heads: int
    key_size: int
    width: int
    tokens: int
