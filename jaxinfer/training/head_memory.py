"""Estimates of what a step of a head's training holds on a device beside parameters, in bytes."""

from jaxinfer.models import ModelConfig


def target_bytes(target: ModelConfig, rows: int, length: int, draft_vocab_size: int, num_shards: int = 1) -> int:
    """Bytes of the target's pass over so many rows of a device: states of a layer, scores, logits of a row, and those
    of the head's vocabulary. Inner widths, heads and vocabularies are cut into `num_shards` parts."""
    inner = max(target.intermediate_size, target.hidden_size)
    cut = rows * length * (3 * inner + 2 * target.num_heads * length)
    cut += 3 * length * target.vocab_size + 2 * rows * length * draft_vocab_size
    return 4 * (8 * rows * length * target.hidden_size + cut // num_shards)


def head_bytes(
    head: ModelConfig, rows: int, length: int, num_drafts: int, draft_vocab_size: int, num_shards: int = 1
) -> int:
    """Bytes of the head's step over so many rows of a device with `num_drafts` draft tokens each, forward and
    backward."""
    cut = rows * num_drafts * (5 * draft_vocab_size + 6 * head.intermediate_size)
    cut += 4 * rows * num_drafts * head.num_heads * length * head.num_layers
    return 4 * (12 * rows * num_drafts * head.hidden_size + cut // num_shards)
