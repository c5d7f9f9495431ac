"""Prefix cache: the pages that hold the beginnings of earlier sequences, for prompts that begin alike.

A radix tree (Zheng et al. 2024, SGLang, section 3) whose edges are whole pages: a node is a page of each group, the
path to it spells the tokens it and the pages before it hold. A node may lack the page of a group, since each pool gives
away its own; it goes when it has neither pages nor children. With a host tier a page that is given away may lie in host
memory, from where it is brought back when it is found. Plain Python: no JAX here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.pages import NULL_PAGE, PagePool
from jaxinfer.engine.tiers.host_tier import HostTier


class PrefixNode:
    """The pages that hold the tokens of `key` after those of the nodes before it, by group, on the device and in host
    memory; NULL_PAGE where there is none."""

    __slots__ = ("children", "hosts", "key", "pages", "parent", "salt")

    def __init__(self, key: bytes, num_groups: int, parent: "PrefixNode | None", salt: str | None = None):
        self.key, self.parent = key, parent
        self.salt = salt  # of a root; None for others, also when they have left the tree
        self.pages = [NULL_PAGE] * num_groups
        self.hosts = [NULL_PAGE] * num_groups
        self.children: dict[bytes, PrefixNode] = {}

    def has(self, group: int) -> bool:
        """True if the page of a group is on the device or in host memory."""
        return self.pages[group] != NULL_PAGE or self.hosts[group] != NULL_PAGE

    @property
    def is_empty(self) -> bool:
        return not self.children and not any(self.pages) and not any(self.hosts)


class PrefixObserver(Protocol):
    """An object that is told what a tree does, in the thread that does it."""

    def changed(self, node: PrefixNode) -> None:
        """A page of the node came or went, on the device or in host memory."""
        ...

    def cleared(self) -> None:
        """No node is found any more, whatever its pages; nothing is told of those there were."""
        ...


class PrefixPlace:
    """How far a sequence's pages are in the tree, so that the next ones are inserted without a walk from the root."""

    __slots__ = ("count", "node")

    def __init__(self) -> None:
        self.node: PrefixNode | None = None
        self.count = 0


@dataclass
class PrefixMatch:
    """Tables of pages that a sequence shares, by group, NULL_PAGE for those that nothing reads.

    NULL_PAGE stands, too, for pages that lie in host memory until `PrefixTree.restore`: `absent` are their groups,
    their places in the tables, and their nodes.
    """

    tables: list[list[int]]
    absent: list[tuple[int, int, PrefixNode]] = field(default_factory=list)

    def num_absent(self, group: int) -> int:
        return sum(other == group for other, _, _ in self.absent)


class PrefixTree:
    """Finds and keeps pages by their tokens.

    Keys are the exact bytes of a page's token ids, so nothing can collide. A `salt` separates tenants: sequences of
    different salts never share. The tree owns no page; it asks the pools to keep those it knows, and a pool's order of
    giving them away (least recently used, ends before beginnings) is what makes the tree shrink from its leaves.

    Args:
      pools: of the groups. groups: what each needs for a sequence to go on. page_size: tokens of a page.
      tier: the host pages of the groups; None for none.

    Attributes:
      observer: told of each change; None for none.
    """

    def __init__(
        self, pools: Sequence[PagePool], groups: Sequence[CacheGroup], page_size: int, tier: HostTier | None = None
    ):
        self._tier = tier or HostTier()
        self._has_tier = bool(self._tier)
        self._pools, self._groups, self._page_size = tuple(pools), tuple(groups), page_size
        self._full = [index for index, group in enumerate(groups) if group.window is None]
        self._windows = [index for index, group in enumerate(groups) if group.window is not None]
        self._roots: dict[str, PrefixNode] = {}
        self._hidden: set[PrefixNode] = set()  # roots of pages that nothing finds
        self.num_pages = 0  # of all groups
        self.observer: PrefixObserver | None = None

    @property
    def full_groups(self) -> Sequence[int]:
        """The groups without a window."""
        return self._full

    def nodes(self) -> list[PrefixNode]:
        """The nodes that are found, each after those before it."""
        nodes, rest = [], list(reversed(self._roots.values()))
        while rest:
            node = rest.pop()
            nodes += [node] if node.parent is not None else []
            rest += reversed(node.children.values())
        return nodes

    def match(self, keys: Sequence[bytes], salt: str = "") -> PrefixMatch:
        """The pages of the longest beginning of `keys` after which a sequence can go on; the caller becomes one of
        their owners, and calls `restore` or `release_match`."""
        nodes = self._walk(keys, salt)
        match = PrefixMatch([])
        for index, (group, pool) in enumerate(zip(self._groups, self._pools, strict=True)):
            first = min(group.first_needed(len(nodes) * self._page_size, self._page_size), len(nodes))
            places = [*range(group.sinks_before(first)), *range(first, len(nodes))]
            table = [NULL_PAGE] * len(nodes)
            for place in places:
                table[place] = nodes[place].pages[index]
            pool.share([page for page in table if page != NULL_PAGE])
            match.tables.append(table)
            match.absent += [(index, place, nodes[place]) for place in places if table[place] == NULL_PAGE]
            for place in reversed(places) if self._has_tier else ():  # beginnings are given away last
                if nodes[place].hosts[index] != NULL_PAGE:
                    self._tier.touch(index, nodes[place].hosts[index])
        for group, _, node in match.absent:
            self._tier.pin(group, node.hosts[group])
        return match

    def restore(self, match: PrefixMatch) -> list[list[int]]:
        """Plans that absent pages come back from host memory, into pages that must be available; the tables."""
        for group, place, node in match.absent:
            (page,) = self._pools[group].allocate(1)
            self._keep(node, group, page)
            self._tier.move_back(group, page, node.hosts[group])
            match.tables[group][place] = page
        match.absent = []
        return match.tables

    def release_match(self, match: PrefixMatch) -> None:
        """Ends the ownership that `match` began."""
        for pool, table in zip(self._pools, match.tables, strict=False):
            pool.release([page for page in table if page != NULL_PAGE])
        for group, _, node in match.absent:
            self._tier.unpin(group, node.hosts[group])

    def num_known(self, keys: Sequence[bytes], salt: str = "") -> int:
        """Number of pages that `match` would find."""
        return len(self._walk(keys, salt))

    def num_stored(self, keys: Sequence[bytes], salt: str = "") -> int:
        """Pages of the longest beginning that the groups without a window have, whether or not a sequence can go on
        after it."""
        node, count = self._roots.get(salt), 0
        while node is not None and count < len(keys):
            node = node.children.get(keys[count])
            if node is None or not all(node.has(group) for group in self._full):
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
                child = node.children[key] = PrefixNode(key, len(self._pools), node)
            for group, table in enumerate(tables):
                if table[index] not in (NULL_PAGE, child.pages[group]):
                    is_changed |= self._add_page(child, group, table, index)
            node = child
        place.node, place.count = node, len(keys)
        self._drop_empty(node)
        return is_changed

    def add_host_pages(self, keys: Sequence[bytes], start: int, salt: str = "") -> list[int]:
        """Host pages of the first group for `keys[start:]`, as many as there is room for, which the caller fills; those
        before `start` must be known, and there must be no other group."""
        node = self._root(salt)
        path = [node := node.children[key] for key in keys[:start]]
        self._renew_hosts(path)
        hosts = []
        for key in keys[start:]:
            child = PrefixNode(key, len(self._pools), node)
            host = self._tier.place(0, partial(self._forget_host, child, 0))
            is_gone = node.parent is None and start + len(hosts) > 0
            if host == NULL_PAGE or is_gone:
                if is_gone and host != NULL_PAGE:
                    self._tier.drop(0, host)
                break
            if node.parent is None:
                self._roots[salt] = node
            child.hosts[0], node.children[key] = host, child
            if self.observer is not None:
                self.observer.changed(child)
            hosts.append(host)
            path.append(child)
            node = child
        self._renew_hosts(path)
        self._drop_empty(node)
        return hosts

    def _renew_hosts(self, nodes: Sequence[PrefixNode]) -> None:
        for node in reversed(nodes):  # beginnings are given away last
            if node.hosts[0] != NULL_PAGE:
                self._tier.touch(0, node.hosts[0])

    def touch(self, place: PrefixPlace, group: int) -> None:
        """Idle pages of a group on a path are given away after those of other paths, ends before beginnings."""
        node = place.node
        while node is not None:
            self._pools[group].touch(node.pages[group])
            node = node.parent

    def is_before_an_end(self, place: PrefixPlace | None, index: int, num_pages: int, prompt_end: int) -> bool:
        """True if another sequence is likely to go on within `num_pages` pages after page `index` of a path: where the
        path branches, or at page `prompt_end`, where a prompt ends that may come again."""
        if place is None or place.node is None or index < prompt_end <= index + num_pages:
            return True
        node: PrefixNode | None = place.node
        for depth in range(place.count, index, -1):
            if node is None:
                return True
            if depth <= index + num_pages and len(node.children) > 1:
                return True
            node = node.parent
        return False

    def drop_hosts(self) -> None:
        """Gives up what is in host memory, but for pages that are on their way back."""
        nodes = [*self._roots.values(), *self._hidden]
        for node in nodes:
            nodes += node.children.values()
        for node in reversed(nodes):
            for group, host in enumerate(node.hosts):
                if host != NULL_PAGE and not self._tier.pools[group].is_pinned(host):
                    self._drop_host(node, group)
            self._drop_empty(node)

    def hide(self) -> None:
        """Pages that have owners are not found any more."""
        for root in self._roots.values():
            root.salt = None
        self._hidden.update(self._roots.values())
        self._roots = {}
        if self.observer is not None:
            self.observer.cleared()

    def check(self) -> None:
        """Raises RuntimeError where a page is known twice, or not kept, or could be given away before one after it."""
        stack = [*self._roots.values(), *self._hidden]
        if not all(root.children for root in stack):
            raise RuntimeError("a salt without pages is remembered")
        seen: set[tuple[int, int]] = set()
        hosts: list[set[int]] = [set() for _ in self._tier.pools]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                self._check_node(child, node, key, seen)
                self._check_hosts(child, node, hosts)
                stack.append(child)
        if len(seen) != self.num_pages:
            raise RuntimeError(f"{len(seen)} pages are known, {self.num_pages} were counted")
        self._tier.check(hosts)

    def _check_hosts(self, child: PrefixNode, node: PrefixNode, hosts: list[set[int]]) -> None:
        for group, host in enumerate(child.hosts):
            if host == NULL_PAGE:
                continue
            if host in hosts[group]:
                raise RuntimeError(f"host page {host} is known twice")
            hosts[group].add(host)
            if group in self._full and node.parent is not None and not node.has(group):
                raise RuntimeError(f"host page {host} is known, but not what is before it")

    def _check_node(self, child: PrefixNode, node: PrefixNode, key: bytes, seen: set[tuple[int, int]]) -> None:
        if child.is_empty:
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

    def _root(self, salt: str) -> PrefixNode:
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = PrefixNode(b"", len(self._pools), None, salt)
        return node

    def _walk(self, keys: Sequence[bytes], salt: str) -> list[PrefixNode]:
        """The nodes of the longest beginning of which each group has what it needs."""
        node, nodes = self._roots.get(salt), []
        if node is None:
            return nodes
        usable, runs = [0], dict.fromkeys(self._windows, 0)
        for key in keys:
            node = node.children.get(key)
            if node is None or not all(node.has(group) for group in self._full):
                break
            nodes.append(node)
            is_usable = True
            for group in self._windows:  # of windows, the last pages in a row
                runs[group] = runs[group] + 1 if node.has(group) else 0
                first = self._groups[group].first_needed(len(nodes) * self._page_size, self._page_size)
                is_usable &= runs[group] >= len(nodes) - first
                sinks = nodes[: self._groups[group].sinks_before(first)]
                is_usable &= all(sink.has(group) for sink in sinks)
            if is_usable:
                usable.append(len(nodes))
        return nodes[: next(count for count in reversed(usable) if self._has_room(nodes[:count]))]

    def _has_room(self, nodes: list[PrefixNode]) -> bool:
        """True if there are pages for those of windows, or of states, that have to come back from host memory."""
        for group in self._windows if self._has_tier else ():
            first = self._groups[group].first_needed(len(nodes) * self._page_size, self._page_size)
            needed = nodes[: self._groups[group].sinks_before(first)] + nodes[first:]
            if sum(node.pages[group] == NULL_PAGE for node in needed) > self._pools[group].num_available:
                return False
        return True

    def _keep(self, node: PrefixNode, group: int, page: int) -> None:
        """Makes a page that has an owner the node's."""
        node.pages[group] = page
        self._pools[group].keep(page, partial(self._forget, node, group))
        self.num_pages += 1
        if self.observer is not None:
            self.observer.changed(node)

    def _add_page(self, node: PrefixNode, group: int, table: list[int], index: int) -> bool:
        """Makes a sequence's page the node's, or the node's page the sequence's; returns whether it is the latter."""
        pool = self._pools[group]
        if node.pages[group] == NULL_PAGE:
            self._keep(node, group, table[index])
            if node.hosts[group] != NULL_PAGE:  # what was computed again may differ from it in the last bits
                self._drop_host(node, group)
            return False
        pool.share([node.pages[group]])
        pool.release([table[index]])
        table[index] = node.pages[group]
        return True

    def _forget(self, node: PrefixNode, group: int) -> None:
        """A page is given away on the device: it moves to host memory, or what continues it goes too."""
        is_full, page = group in self._full, node.pages[group]
        if node.parent is None or (is_full and any(child.pages[group] for child in node.children.values())):
            raise RuntimeError(f"page {page} is given away before the pages that continue it")
        self._tier.cancel(group, page)
        if node.hosts[group] != NULL_PAGE:
            self._tier.touch(group, node.hosts[group])
        elif not self._pools[group].is_unlikely(page):
            node.hosts[group] = self._tier.move_out(group, page, partial(self._forget_host, node, group))
        node.pages[group] = NULL_PAGE
        self.num_pages -= 1
        if self.observer is not None:
            self.observer.changed(node)
        if is_full and node.hosts[group] == NULL_PAGE:
            self._cut(node)
        self._drop_empty(node)

    def _forget_host(self, node: PrefixNode, group: int) -> None:
        """A page is given away in host memory."""
        self._drop_host(node, group)
        if group in self._full and node.pages[group] == NULL_PAGE:
            self._cut(node)
        self._drop_empty(node)

    def _drop_host(self, node: PrefixNode, group: int) -> None:
        self._tier.drop(group, node.hosts[group])
        node.hosts[group] = NULL_PAGE
        if self.observer is not None:
            self.observer.changed(node)

    def _cut(self, node: PrefixNode) -> None:
        """Gives up what a node and those after it have, since no sequence goes on there any more."""
        nodes = [node]
        for descendant in nodes:
            nodes += descendant.children.values()
        for descendant in reversed(nodes):
            for group, host in enumerate(descendant.hosts):
                if host != NULL_PAGE:
                    self._drop_host(descendant, group)
            for group in self._windows:
                self._pools[group].drop(descendant.pages[group])
            self._drop_empty(descendant)

    def _drop_empty(self, node: PrefixNode) -> None:
        """Removes a node that has neither pages nor children, and those above it to which the same then applies."""
        while node.is_empty:
            parent = node.parent
            if parent is None:
                self._hidden.discard(node)
                if node.salt is not None and self._roots.get(node.salt) is node:
                    del self._roots[node.salt]
                return
            del parent.children[node.key]
            node.parent = None
            node = parent
