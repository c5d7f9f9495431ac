"""Configuration of trained heads that draft for a target from its hidden states."""

from dataclasses import dataclass
from typing import Literal, get_args

# How a head computes (`models.draft_head`): pairs of a hidden state and the token after it, from states of several
# layers ("eagle3": Li et al. 2025) or from the last one ("mtp": DeepSeek-V3, section 2.2), or a block of tokens at once
# ("dflash": Chen et al. 2026, arXiv 2602.06036; with convolutions and a selector DFlash 2, with a Markov head DSpark).
HeadKind = Literal["eagle3", "mtp", "dflash"]
# Norms of tapped states before they are projected: none, one of each, or one of all side by side.
TapNorms = Literal["none", "each", "all"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
MAX_BLOCK = 32  # tokens, as in `pallas_kernels.paged_attention`: a block is seen as trees are


@dataclass(frozen=True)
class DraftHeadConfig:
    """Settings of a head beside its layers.

    Attributes:
      kind: see `HeadKind`.
      tap_layers: which states of the target it reads: those that enter the layer of that number, or leave the last one;
        () for the default of `tap_layers_of`. num_taps: how many. tap_size: their width.
      vocab_size: tokens that it drafts, a part of the target's vocabulary; None for all.
      has_embedding, has_lm_head: whether they are among its parameters; otherwise the target's are used.
      has_draft_index: whether the places of the target's tokens in a smaller vocabulary are among them.
      tap_norms: see `TapNorms`.
      returns_normed: a drafted token is followed by the state after the last norm, not before it.
      adds_normed: the first layer adds to the normed state.
      block_size: tokens that a "dflash" head computes at once. mask_token: stands for those that are not known.
      drafts_at_root: the first token of a block predicts the next one already, so that a block drafts one more.
      causal_layers: the layers in which tokens of a block do not see later ones.
      conv_size, conv_group: taps of a convolution around attention and MLP, and channels that share its kernel; 0 for
        none.
      selector_rank, selector_top_k: of a selector that chooses among the best tokens by the token before; 0 for none.
      markov_rank, markov_kind: of a bias by the token before; 0 for none.
      first_layer: number of its first layer in its files, which may be the target's.
      has_confidence: predicts whether a token will be accepted. confidence_has_token: from the token before, too.
    """

    kind: HeadKind
    tap_layers: tuple[int, ...] = ()
    num_taps: int = 3
    tap_size: int = 0
    vocab_size: int | None = None
    has_embedding: bool = False
    has_lm_head: bool = False
    has_draft_index: bool = False
    tap_norms: TapNorms = "none"
    returns_normed: bool = False
    adds_normed: bool = False
    block_size: int = 0
    mask_token: int = -1
    drafts_at_root: bool = False
    causal_layers: tuple[int, ...] = ()
    conv_size: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    first_layer: int = 0
    has_confidence: bool = False
    confidence_has_token: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("kind", HeadKind), ("tap_norms", TapNorms), ("markov_kind", MarkovKind)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if self.tap_layers and len(self.tap_layers) != self.num_taps:
            raise ValueError(f"{len(self.tap_layers)} tap_layers, and num_taps={self.num_taps}")
        if self.tap_size < 1 or self.num_taps < 1:
            raise ValueError(f"tap_size={self.tap_size} and num_taps={self.num_taps} must be at least 1")
        if self.kind != "dflash":
            return
        if not 2 <= self.block_size <= MAX_BLOCK:
            raise ValueError(f"block_size={self.block_size} must be 2 to {MAX_BLOCK}")
        if self.mask_token < 0:
            raise ValueError("a head that drafts blocks needs a mask_token")
        if self.conv_size > self.block_size:
            raise ValueError(f"conv_size={self.conv_size} is more than block_size={self.block_size}")
        if self.confidence_has_token and not (self.has_confidence and self.markov_rank):
            raise ValueError("confidence_has_token needs has_confidence and a markov_rank")

    @property
    def is_block(self) -> bool:
        """True if it drafts a block of tokens at once."""
        return self.kind == "dflash"

    @property
    def max_drafts(self) -> int | None:
        """Most tokens that it drafts in a round; None for any number."""
        return self.block_size - (not self.drafts_at_root) if self.is_block else None


def tap_layers_of(head: DraftHeadConfig, num_layers: int) -> tuple[int, ...]:
    """The `tap_layers` of a target with so many layers; by default near the beginning, in the middle and near the end
    (EAGLE-3's published code). Raises ValueError for a layer that the target does not have, with both numbers."""
    layers = head.tap_layers or (2, num_layers // 2, num_layers - 3)
    if len(layers) != head.num_taps or not all(0 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"the head reads the target before layers {', '.join(map(str, layers))} ({head.num_taps} states), and the "
            f"target has layers 0 to {num_layers - 1}"
        )
    return layers


def tap_names_of(head: DraftHeadConfig, num_layers: int) -> tuple[str, ...]:
    """The names (`models.tap_names`) of the states that a head reads of a target with so many layers."""
    if head.kind == "mtp":
        return ("final_norm",)
    return tuple("embed" if layer == 0 else f"layers.{layer - 1}.residual" for layer in tap_layers_of(head, num_layers))
