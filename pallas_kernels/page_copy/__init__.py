"""Copies of cache pages: copy-on-write and defragmentation without a host round trip."""

from pallas_kernels.page_copy.api import copy_pages

__all__ = ["copy_pages"]
