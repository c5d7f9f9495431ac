"""A LoRA adapter as host arrays, by the names of our parameters."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change of one weight [..., in, out]: scale * a @ b is added to it (Hu et al. 2021, arXiv 2106.09685).

    Attributes:
      a: float [in, r], or [E, in, r] of a stack of experts. b: float [r, out]; [E, r, out] of such a stack, and
        [heads, r, out] of a weight that is kept by heads, which share `a`. Of the embedding, in is the vocabulary.
      scale: alpha / r, or alpha / sqrt(r) where it is rank-stabilized.
      magnitude: float [..., out], the lengths of the columns of the changed weight (DoRA); None without.
      bias: float [..., out] (`lora_bias`), of which scale times is added to the outputs; None without.

    Raises ValueError for shapes that do not fit each other.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None
    bias: np.ndarray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", float(self.scale))
        if min(self.a.ndim, self.b.ndim) < 2 or self.a.shape[-1] != self.b.shape[-2]:
            raise ValueError(
                f"A and B of shapes {self.a.shape} and {self.b.shape} have no common rank: A is [in, r], B [r, out]"
            )
        outputs = (*self.b.shape[:-2], self.b.shape[-1])
        for name, array in (("magnitude", self.magnitude), ("bias", self.bias)):
            if array is not None and array.shape != outputs:
                raise ValueError(f"a {name} of shape {array.shape} for B of shape {self.b.shape}, not {outputs}")

    @property
    def rank(self) -> int:
        return self.a.shape[-1]


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The trained vectors of some tokens, which stand in place of the base's.

    Attributes:
      tokens: their ids. rows: float [tokens, D], in that order.

    Raises ValueError for another number of rows.
    """

    tokens: tuple[int, ...]
    rows: np.ndarray

    def __post_init__(self) -> None:
        if self.rows.shape[:-1] != (len(self.tokens),):
            raise ValueError(f"rows of shape {self.rows.shape} for {len(self.tokens)} tokens")


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter for a base model. Arrays have the dtype in which they are stored.

    Attributes:
      low_rank: by the name of the weight, such as "layers.3.attention.q_proj", "embed" or "lm_head".
      replaced: parameters that stand in place of the base's: saved modules, and biases that were trained; by their
        names, such as "lm_head", "embed" and "layers.0.attention.q_proj.bias", in the shapes of our parameters. Where
        tokens were added, `embed` and `lm_head` are larger than the base's. Of a base with tied embeddings, "embed"
        here or in another field changes what is read, and not the head.
      token_rows: of "embed" and "lm_head". A head's are columns of our parameter [D, V].
      invocation_tokens: the adapter changes only what comes from their last occurrence on (aLoRA, arXiv 2504.12397); ()
        where it changes everything.
      base_model: name of the base model that the adapter was trained on; None if it names none.
      base_fingerprint: of that model's weights; None if the file has none.
    """

    low_rank: Mapping[str, LowRank]
    replaced: Mapping[str, np.ndarray] = field(default_factory=dict)
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    invocation_tokens: tuple[int, ...] = ()
    base_model: str | None = None
    base_fingerprint: str | None = None

    @property
    def max_rank(self) -> int:
        """The largest rank; 0 without pairs."""
        return max((pair.rank for pair in self.low_rank.values()), default=0)

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens, where the adapter brings an embedding of its own; else None."""
        return self.replaced["embed"].shape[0] if "embed" in self.replaced else None

    def num_added(self, which: str, vocab_size: int) -> int:
        """How many tokens after the first `vocab_size` it has vectors for in "embed" or "lm_head"."""
        whole, rows = self.replaced.get(which), self.token_rows.get(which)
        of_whole = 0 if whole is None else whole.shape[0 if which == "embed" else 1]
        last = max(rows.tokens, default=-1) if rows is not None else -1
        return max(of_whole, last + 1, vocab_size) - vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all that changes answers: every array and scale, and the invocation tokens.

        It is computed anew each time, of the arrays as they are. It does not depend on the folder, on the order or the
        names of tensors in files, or on the base's name.
        """
        digest = hashlib.sha256()
        _add(digest, "jaxinfer adapter 1", list(self.invocation_tokens))
        for name, pair in sorted(self.low_rank.items()):
            _add(digest, "low_rank", name, float(pair.scale).hex())
            for array in (pair.a, pair.b, pair.magnitude, pair.bias):
                _add_array(digest, array)
        for name, array in sorted(self.replaced.items()):
            _add(digest, "replaced", name)
            _add_array(digest, array)
        for name, rows in sorted(self.token_rows.items()):
            _add(digest, "token_rows", name, list(rows.tokens))
            _add_array(digest, rows.rows)
        return digest.hexdigest()


def _add(digest: Any, *parts: Any) -> None:
    digest.update(json.dumps(parts).encode() + b"\n")


def _add_array(digest: Any, array: np.ndarray | None) -> None:
    if array is None:
        _add(digest, None)
        return
    _add(digest, str(array.dtype), list(array.shape))
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
