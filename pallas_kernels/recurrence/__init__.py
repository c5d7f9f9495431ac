"""Recurrent layers: gated delta net, state spaces (Mamba 2) and short convolutions, over states in slots."""

from pallas_kernels.recurrence.api import (
    MAX_SHORT_TOKENS,
    commit_recurrence,
    form,
    linear_recurrence,
    recurrence_of_sequences,
)
from pallas_kernels.recurrence.batch import BLOCK_TOKENS, RaggedBatch, RecurrentTokens
from pallas_kernels.recurrence.conv import causal_conv, commit_conv, conv_of_sequences

__all__ = [
    "BLOCK_TOKENS",
    "MAX_SHORT_TOKENS",
    "RaggedBatch",
    "RecurrentTokens",
    "causal_conv",
    "commit_conv",
    "commit_recurrence",
    "conv_of_sequences",
    "form",
    "linear_recurrence",
    "recurrence_of_sequences",
]
