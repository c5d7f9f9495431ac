"""Attention over a paged cache of keys and values."""

from pallas_kernels.choice import KernelChoice
from pallas_kernels.paged_attention.api import (
    Schedule,
    choose,
    make_schedule,
    new_pages,
    paged_attention,
    platform_layout,
)
from pallas_kernels.paged_attention.layout import (
    BitPages,
    InterleavedPages,
    Pages,
    PageShape,
    SeparatePages,
    empty_pages,
    move_tokens,
    pack,
    unpack,
)
from pallas_kernels.paged_attention.parts import PagePart, merge_parts
from pallas_kernels.paged_attention.specs import MAX_TREE_TOKENS, PagedSpec, make_spec

__all__ = [
    "MAX_TREE_TOKENS",
    "BitPages",
    "InterleavedPages",
    "KernelChoice",
    "PagePart",
    "PageShape",
    "PagedSpec",
    "Pages",
    "Schedule",
    "SeparatePages",
    "choose",
    "empty_pages",
    "make_schedule",
    "make_spec",
    "merge_parts",
    "move_tokens",
    "new_pages",
    "pack",
    "paged_attention",
    "platform_layout",
    "unpack",
]
