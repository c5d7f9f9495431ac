"""Prefix cache: the pages that hold the beginnings of earlier sequences, for prompts that begin alike.

A radix tree (Zheng et al. 2024, SGLang, section 3) whose edges are whole pages: a node is a page of each group, the
path to it spells the tokens it and the pages before it hold. A node may lack the page of a group, since each pool gives
away its own; it goes when it has neither pages nor children. Plain Python: no JAX here.
"""

from collections.abc import Sequence
from functools import partial

from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.pages import NULL_PAGE, PagePool


class _Node:
    __slots__ = ("children", "key", "pages", "parent")

    def __init__(self, key: bytes, num_groups: int, parent: "_Node | None"):
        self.key, self.parent = key, parent
        self.pages = [NULL_PAGE] * num_groups
        self.children: dict[bytes, _Node] = {}


class PrefixPlace:
    """How far a sequence's pages are in the tree, so that the next ones are inserted without a walk from the root."""

    __slots__ = ("count", "node")

    def __init__(self) -> None:
        self.node: _Node | None = None
        self.count = 0


class PrefixTree:
    """Finds and keeps pages by their tokens.

    Keys are the exact bytes of a page's token ids, so nothing can collide. A `salt` separates tenants: sequences of
    different salts never share. The tree owns no page; it asks the pools to keep those it knows, and a pool's order of
    giving them away (least recently used, ends before beginnings) is what makes the tree shrink from its leaves.

    Args:
      pools: of the groups. groups: what each needs for a sequence to go on. page_size: tokens of a page.
    """

    def __init__(self, pools: Sequence[PagePool], groups: Sequence[CacheGroup], page_size: int):
        self._pools, self._groups, self._page_size = tuple(pools), tuple(groups), page_size
        self._full = [index for index, group in enumerate(groups) if group.window is None]
        self._windows = [index for index, group in enumerate(groups) if group.window is not None]
        self._roots: dict[str, _Node] = {}
        self.num_pages = 0  # of all groups

    def match(self, keys: Sequence[bytes], salt: str = "") -> list[list[int]]:
        """By group, the pages of the longest beginning of `keys` after which a sequence can go on; the caller becomes
        one of their owners. NULL_PAGE stands for those that nothing reads any more."""
        nodes = self._walk(keys, salt)
        tables = []
        for index, (group, pool) in enumerate(zip(self._groups, self._pools, strict=True)):
            first = min(group.first_needed(len(nodes) * self._page_size, self._page_size), len(nodes))
            num_sinks = group.sinks_before(first)
            sinks, needed = ([node.pages[index] for node in part] for part in (nodes[:num_sinks], nodes[first:]))
            pool.share(sinks + needed)
            tables.append(sinks + [NULL_PAGE] * (first - num_sinks) + needed)
        return tables

    def num_known(self, keys: Sequence[bytes], salt: str = "") -> int:
        """Number of pages that `match` would find."""
        return len(self._walk(keys, salt))

    def num_stored(self, keys: Sequence[bytes], salt: str = "") -> int:
        """Pages of the longest beginning that the groups without a window have, whether or not a sequence can go on
        after it."""
        node, count = self._roots.get(salt), 0
        while node is not None and count < len(keys):
            node = node.children.get(keys[count])
            if node is None or any(node.pages[group] == NULL_PAGE for group in self._full):
                break
            count += 1
        return count

    def insert(
        self, keys: Sequence[bytes], tables: Sequence[list[int]], salt: str = "", place: PrefixPlace | None = None
    ) -> bool:
        """Inserts pages that the caller owns and that hold the tokens of `keys`; NULL_PAGE is passed over.

        Where another page is known for the same beginning, it takes its place in `tables`, in the lists themselves: so
        a sequence owns every page on its path, and what it computed twice becomes free. Returns whether it did so.
        `place`, of an earlier call for the same sequence, is where to begin; it is brought up to date.
        """
        place = place or PrefixPlace()
        if len(keys) <= place.count:
            return False
        node, start = place.node, place.count
        if node is None or node.parent is None:  # its pages were given away, and it went with them
            node, start = self._root(salt), 0
        is_changed = False
        for index in range(start, len(keys)):
            key = keys[index]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, len(self._pools), node)
            for group, table in enumerate(tables):
                if table[index] not in (NULL_PAGE, child.pages[group]):
                    is_changed |= self._add_page(child, group, table, index, salt)
            node = child
        place.node, place.count = node, len(keys)
        self._drop_empty(node, salt)
        return is_changed

    def renew(self, place: PrefixPlace, group: int) -> None:
        """Idle pages of a group on a path are given away after those of other paths, ends before beginnings."""
        node = place.node
        while node is not None:
            self._pools[group].renew(node.pages[group])
            node = node.parent

    def is_before_an_end(self, place: PrefixPlace | None, index: int, num_pages: int, prompt_end: int) -> bool:
        """Whether another sequence is likely to go on within `num_pages` pages after page `index` of a path: where the
        path branches, or at page `prompt_end`, where a prompt ends that may come again."""
        if place is None or place.node is None or index < prompt_end <= index + num_pages:
            return True
        node: _Node | None = place.node
        for depth in range(place.count, index, -1):
            if node is None:
                return True
            if depth <= index + num_pages and len(node.children) > 1:
                return True
            node = node.parent
        return False

    def check(self) -> None:
        """Raises RuntimeError where a page is known twice, or not kept, or could be given away before one after it."""
        stack = list(self._roots.values())
        if not all(root.children for root in stack):
            raise RuntimeError("a salt without pages is remembered")
        seen: set[tuple[int, int]] = set()
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                self._check_node(child, node, key, seen)
                stack.append(child)
        if len(seen) != self.num_pages:
            raise RuntimeError(f"{len(seen)} pages are known, {self.num_pages} were counted")

    def _check_node(self, child: _Node, node: _Node, key: bytes, seen: set[tuple[int, int]]) -> None:
        if not child.children and not any(child.pages):
            raise RuntimeError("a node without pages and children is remembered")
        for group, page in enumerate(child.pages):
            if child.key != key or child.parent is not node or (group, page) in seen:
                raise RuntimeError(f"page {page} is known twice or under another key")
            if page == NULL_PAGE:
                continue
            pool = self._pools[group]
            if not pool.is_kept(page):
                raise RuntimeError(f"page {page} is known, but the pool does not keep it")
            seen.add((group, page))
            if group not in self._full or node.parent is None:
                continue
            if node.pages[group] == NULL_PAGE or pool.num_owners(page) > pool.num_owners(node.pages[group]):
                raise RuntimeError(f"page {page} has more owners than page {node.pages[group]} before it")

    def _root(self, salt: str) -> _Node:
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = _Node(b"", len(self._pools), None)
        return node

    def _walk(self, keys: Sequence[bytes], salt: str) -> list[_Node]:
        """The nodes of the longest beginning of which each group has what it needs."""
        node, found = self._roots.get(salt), []
        if node is None:
            return found
        num_usable, runs = 0, dict.fromkeys(self._windows, 0)
        for key in keys:
            node = node.children.get(key)
            if node is None or any(node.pages[group] == NULL_PAGE for group in self._full):
                break
            found.append(node)
            is_usable = True
            for group in self._windows:  # of windows, the last pages in a row
                runs[group] = runs[group] + 1 if node.pages[group] != NULL_PAGE else 0
                first = self._groups[group].first_needed(len(found) * self._page_size, self._page_size)
                is_usable &= runs[group] >= len(found) - first
                sinks = found[: self._groups[group].sinks_before(first)]
                is_usable &= all(one.pages[group] != NULL_PAGE for one in sinks)
            if is_usable:
                num_usable = len(found)
        return found[:num_usable]

    def _add_page(self, node: _Node, group: int, table: list[int], index: int, salt: str) -> bool:
        """Makes a sequence's page the node's, or the node's page the sequence's; returns whether it is the latter."""
        pool = self._pools[group]
        if node.pages[group] == NULL_PAGE:
            node.pages[group] = table[index]
            pool.keep(table[index], partial(self._forget, node, group, salt))
            self.num_pages += 1
            return False
        pool.share([node.pages[group]])
        pool.release([table[index]])
        table[index] = node.pages[group]
        return True

    def _forget(self, node: _Node, group: int, salt: str) -> None:
        is_full = group in self._full
        if node.parent is None or (is_full and any(child.pages[group] for child in node.children.values())):
            raise RuntimeError(f"page {node.pages[group]} is given away before the pages that continue it")
        node.pages[group] = NULL_PAGE
        self.num_pages -= 1
        if is_full:  # nothing goes on here any more
            for other in self._windows:
                self._pools[other].drop(node.pages[other])
        self._drop_empty(node, salt)

    def _drop_empty(self, node: _Node, salt: str) -> None:
        """Removes a node that has neither pages nor children, and those above it to which the same then applies."""
        while not node.children and not any(node.pages):
            parent = node.parent
            if parent is None:
                if self._roots.get(salt) is node:
                    del self._roots[salt]
                return
            del parent.children[node.key]
            node.parent = None
            node = parent
