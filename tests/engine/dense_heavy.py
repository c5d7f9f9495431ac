"""The dense form of heavy hitters (H2O, Zhang et al. 2023, section 4), written from the paper in NumPy: attention over
all tokens under a mask for each key head, which loses a page of tokens when a page is full."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, bind

ROW_TOKENS = 80  # of which rows are padded to a multiple


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def keep_best(is_kept: np.ndarray, scores: np.ndarray, count: int, num_recent: int) -> np.ndarray:
    """Of the tokens that are kept, bool [T], the last `num_recent`, and the best others up to `count` in all."""
    at = np.flatnonzero(is_kept)
    older = at[: len(at) - num_recent]
    best = older[np.argsort(-scores[older], kind="stable")][: count - num_recent]
    found = np.zeros_like(is_kept)
    found[best] = found[at[len(at) - num_recent :]] = True
    return found


class DenseHeavy:
    """`attend` over all tokens [T] of a prompt of `num_prompt` tokens with its answer.

    `kept` are bool [T, T] by layer and key head: the tokens that stay after each one. `early` evicts so many positions
    early, a planted fault.
    """

    def __init__(self, num_prompt: int, page_size: int, budget: int, *, early: int = 0):
        self.num_prompt, self.page_size, self.budget, self.early = num_prompt, page_size, budget, early
        self.kept: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, layer: int, q: Any, k: Any, v: Any, window: None, *, scale: float | None = None) -> Any:
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        group = q.shape[1] // k.shape[1]
        out = [
            self._head(layer, head, q[:, head * group : (head + 1) * group], k[:, head], v[:, head], scale)
            for head in range(k.shape[1])
        ]
        return jnp.asarray(np.concatenate(out, axis=1), jnp.float32)

    def _head(self, layer: int, head: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
        """float64 [T, G, K] of the query heads q [T, G, K] of one key head k, v [T, K]."""
        num_tokens = len(q)
        whole = -(-self.budget // self.page_size) * self.page_size  # tokens that stay when a page is full
        sums, is_kept, out = np.zeros(num_tokens), np.zeros(num_tokens, bool), []
        history = self.kept[layer, head] = np.zeros((num_tokens, num_tokens), bool)
        for token in range(num_tokens):
            is_kept[token] = True
            at = np.flatnonzero(is_kept)
            shares = softmax(q[token] @ k[at].T * scale)
            out.append(shares @ v[at])
            sums[at] += shares.mean(axis=0)
            end = token + 1
            if end == self.num_prompt and end - whole >= self.page_size:
                # A prompt's tokens are compared by what a query that saw them gave them, as in kvpress.
                means = sums / np.maximum(end - np.arange(num_tokens), 1)
                is_kept = keep_best(is_kept, means, whole + end % self.page_size, self.budget // 2)
            elif end > self.num_prompt and is_kept.sum() + self.early == whole + self.page_size:
                is_kept = keep_best(is_kept, sums, whole - self.early, self.budget // 2)
            history[token] = is_kept
        return np.stack(out)


def dense_logits(config: ModelConfig, params: Params, tokens: Sequence[int], attend: DenseHeavy) -> np.ndarray:
    """float32 [T, V]. Tokens that come later change nothing: with them, rows of many lengths share their programs."""
    row = np.pad(np.asarray(tokens, np.int32), (0, -len(tokens) % ROW_TOKENS))
    decoder = bind(config, params)
    return np.asarray(decoder.logits(decoder(jnp.asarray(row), jnp.arange(len(row)), attend)))[: len(tokens)]
