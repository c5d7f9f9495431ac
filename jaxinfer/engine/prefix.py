"""Prefix cache: the pages that hold the beginnings of earlier sequences, for prompts that begin alike.

A radix tree (Zheng et al. 2024, SGLang, section 3) whose edges are whole pages: a node is a page, the path to it
spells the tokens it and the pages before it hold. Plain Python: no JAX here.
"""

from collections.abc import Sequence
from functools import partial

from jaxinfer.engine.pages import PagePool


class _Node:
    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, key: bytes, page: int, parent: "_Node | None"):
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[bytes, _Node] = {}


class PrefixTree:
    """Finds and keeps pages by their tokens.

    Keys are the exact bytes of a page's token ids, so nothing can collide. A `salt` separates tenants: sequences of
    different salts never share. The tree owns no page; it asks the pool to keep those it knows, and the pool's order
    of giving them away (least recently used, ends before beginnings) is what makes the tree shrink from its leaves.
    """

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._roots: dict[str, _Node] = {}
        self.num_pages = 0

    def match(self, keys: Sequence[bytes], salt: str = "") -> list[int]:
        """The pages that hold the longest known beginning of `keys`; the caller becomes one of their owners."""
        pages = [node.page for node in self._walk(keys, salt)]
        self._pool.share(pages)
        return pages

    def num_known(self, keys: Sequence[bytes], salt: str = "") -> int:
        """Number of pages that `match` would find."""
        return len(self._walk(keys, salt))

    def insert(self, keys: Sequence[bytes], pages: list[int], salt: str = "") -> bool:
        """Inserts pages that the caller owns and that hold the tokens of `keys`.

        Where another page is known for the same beginning, it takes its place in `pages`, in the list itself: so a
        sequence owns every page on its path, and what it computed twice becomes free. Returns whether it did so.
        """
        is_changed = False
        if not keys:
            return is_changed
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = _Node(b"", -1, None)
        for index, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, pages[index], node)
                self._pool.keep(child.page, partial(self._forget, child, salt))
                self.num_pages += 1
            elif child.page != pages[index]:
                self._pool.share([child.page])
                self._pool.release([pages[index]])
                pages[index] = child.page
                is_changed = True
            node = child
        return is_changed

    def check(self) -> None:
        """Raises RuntimeError where a page is known twice, or not kept, or could be given away before one after it."""
        stack = list(self._roots.values())
        if not all(root.children for root in stack):
            raise RuntimeError("a salt without pages is remembered")
        seen: set[int] = set()
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                if child.key != key or child.parent is not node or child.page in seen:
                    raise RuntimeError(f"page {child.page} is known twice or under another key")
                if not self._pool.is_kept(child.page):
                    raise RuntimeError(f"page {child.page} is known, but the pool does not keep it")
                seen.add(child.page)
                if node.parent is not None and self._pool.num_owners(child.page) > self._pool.num_owners(node.page):
                    raise RuntimeError(f"page {child.page} has more owners than page {node.page} before it")
                stack.append(child)
        if len(seen) != self.num_pages:
            raise RuntimeError(f"{len(seen)} pages are known, {self.num_pages} were counted")

    def _walk(self, keys: Sequence[bytes], salt: str) -> list[_Node]:
        node, found = self._roots.get(salt), []
        if node is None:
            return found
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def _forget(self, node: _Node, salt: str) -> None:
        parent = node.parent
        if node.children or parent is None:
            raise RuntimeError(f"page {node.page} is given away before the pages that continue it")
        del parent.children[node.key]
        self.num_pages -= 1
        if parent.parent is None and not parent.children:
            del self._roots[salt]
