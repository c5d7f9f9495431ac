"""Speculative decoding: what is drafted, and what of it the target keeps."""

from jaxinfer.speculative.tree import TokenTree, chain

__all__ = ["TokenTree", "chain"]
