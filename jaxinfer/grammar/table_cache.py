"""Tables on disk, by language and tokenizer."""

import io
import zipfile
from collections.abc import Callable

import numpy as np

from jaxinfer.grammar.nodes import Node
from jaxinfer.grammar.pattern import pattern_of
from jaxinfer.grammar.spelling import Spelling
from jaxinfer.grammar.table_builder import TableLimits, TokenTable
from jaxinfer.kept_files import KeptFiles, key_of

FORMAT_VERSION = 2
"""Changes when the same language and tokenizer give another table, or its arrays another meaning."""
MAX_BYTES = 512 * 2**20
"""Bytes of all tables that are kept."""


def kept_table(
    files: KeptFiles | None, node: Node, spelling: Spelling, limits: TableLimits, build: Callable[[], TokenTable]
) -> TokenTable:
    """The table of a language over a tokenizer's vocabulary, from its file or else from `build`, then kept.

    A file that is no such table is removed, and logged. Raises what `build` raises.
    """
    if files is None:
        return build()
    key = key_of(str(FORMAT_VERSION), repr(limits), spelling.vocabulary.digest, spelling.name, pattern_of(node))
    if (content := files.read(key)) is not None:
        try:
            return _read(content, len(spelling.vocabulary))
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            files.remove(key, f"no table ({error})")
    table, data = build(), io.BytesIO()
    np.savez(data, **vars(table))
    files.write(key, data.getvalue())
    return table


def _read(content: bytes, vocab_size: int) -> TokenTable:
    """Raises ValueError unless the arrays fit one another: an index out of range would read another row's mask."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        table = TokenTable(**{name: arrays[name] for name in TokenTable.__dataclass_fields__})
    num_states, num_classes = table.successors.shape
    shapes = {
        "classes": (np.int16, (vocab_size,), 0, num_classes),
        "successors": (np.int32, (num_states, num_classes), -1, num_states),
        "masks": (np.uint32, (len(table.masks), -(-vocab_size // 32)), 0, 2**32),
        "mask_of": (np.int32, (num_states,), 0, len(table.masks)),
        "drafts": (np.int32, (num_states,), -1, vocab_size),
    }
    for name, (dtype, shape, low, high) in shapes.items():
        array = getattr(table, name)
        if array.dtype != dtype or array.shape != shape or not array.size:
            raise ValueError(f"{name} has type {array.dtype} and shape {array.shape}")
        if array.min() < low or array.max() >= high:
            raise ValueError(f"{name} has numbers outside of {low} to {high - 1}")
    return table
