"""Linear recurrences and convolutions token by token in NumPy and float64, the oracle in tests."""

import numpy as np


def recurrence(q, k, v, g, beta=None, state=None) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, H, V] of one sequence [T] and its last state [H, K, V], from `state` or zeros."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    num_heads = v.shape[1]
    q, k = (np.repeat(x, num_heads // x.shape[1], axis=1) for x in (q, k))
    state = np.zeros((num_heads, k.shape[-1], v.shape[-1])) if state is None else np.asarray(state, np.float64)
    out = np.zeros(v.shape)
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        new = v[t]
        if beta is not None:
            new = np.asarray(beta[t], np.float64)[:, None] * (new - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * new[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out, state


def convolution(x, weight, bias=None, state=None) -> tuple[np.ndarray, np.ndarray]:
    """A causal depthwise convolution of one sequence [T, C] with weight [C, W], and its last W - 1 inputs."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    width = weight.shape[1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])) if state is None else np.asarray(state), x])
    out = np.sum([padded[i : i + len(x)] * weight[:, i] for i in range(width)], axis=0)
    return out if bias is None else out + np.asarray(bias, np.float64), padded[len(padded) - (width - 1) :]
