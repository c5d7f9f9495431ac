"""Host memory behind the pages of the device: which pages of the prefix tree lie there. Plain Python: no JAX here.

A page that is given away on the device, though its contents may be wanted again, moves to a host page of its group; a
prompt that finds it brings it back into a page of the device. The scheduler decides, and the runner moves: a plan lists
pages that leave, which are read before anything is written, and then pages that come back. Contents never change, so
what came back keeps its host page too, and need not be moved again when it is next given away.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxinfer.engine.pages import NULL_PAGE

BATCH_PAGES = (128, 32, 8, 1)  # that one program copies
BATCH_BYTES = 64 * 2**20  # of a batch, which takes as much memory of the device for a while
MAX_IN_TRANSIT = 2  # batches that leave at once


class HostPoolSize(NamedTuple):
    """Host pages of a group of layers, or of saved states, and bytes of one."""

    num_pages: int
    page_bytes: int


class PageMove(NamedTuple):
    """A page of a group on the device, and a host page of that group."""

    group: int
    page: int
    host: int


def transit_bytes(page_bytes: int) -> int:
    """Memory of a device that moves take: batches that leave, one that comes back, and a program's temporary."""
    return (MAX_IN_TRANSIT + 2) * min(BATCH_PAGES[0] * page_bytes, max(BATCH_BYTES, page_bytes))


class HostPool:
    """Host pages 1 .. num_pages of one group. The one that is unused for longest is given away, and its `on_evict` is
    called; pinned pages stay."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_evictions = 0
        self._free = list(range(num_pages, NULL_PAGE, -1))
        self._on_evict: OrderedDict[int, Callable[[], None]] = OrderedDict()  # longest unused first
        self._pins: Counter[int] = Counter()

    @property
    def num_used(self) -> int:
        return len(self._on_evict)

    def allocate(self, on_evict: Callable[[], None]) -> int:
        """A host page; NULL_PAGE where there is none, or all are pinned."""
        if not self._free:
            page = next((page for page in self._on_evict if not self._pins[page]), NULL_PAGE)
            if page == NULL_PAGE:
                return NULL_PAGE
            self.num_evictions += 1
            self._on_evict[page]()  # which drops it, and may drop others
        page = self._free.pop()
        self._on_evict[page] = on_evict
        return page

    def touch(self, page: int) -> None:
        """The page is given away after all others."""
        self._on_evict.move_to_end(page)

    def drop(self, page: int) -> None:
        """Gives up what a page holds."""
        if self._pins[page]:
            raise RuntimeError(f"host page {page} is dropped before it was read")
        del self._on_evict[page]
        self._free.append(page)

    def is_pinned(self, page: int) -> bool:
        return self._pins[page] > 0

    def pin(self, page: int, count: int) -> None:
        """Adds to the reasons for which a page has to stay."""
        self._pins[page] += count
        if self._pins[page] <= 0:
            del self._pins[page]

    def check(self, known: set[int]) -> None:
        """Raises RuntimeError unless `known` are the pages in use, and none is pinned."""
        if set(self._on_evict) != known or set(self._free) & known:
            raise RuntimeError(f"host pages {sorted(self._on_evict)} are used, {sorted(known)} are known")
        if len(self._free) + len(known) != self.num_pages or len(set(self._free)) != len(self._free):
            raise RuntimeError(f"{self.num_pages} host pages: {len(self._free)} are free, {len(known)} are used")


class HostTier:
    """The host pages of all groups, and the moves that are still to be planned.

    Args:
      sizes: of the groups, in the order of the prefix tree; () for no tier.
    """

    def __init__(self, sizes: Sequence[HostPoolSize] = ()):
        self.sizes = tuple(sizes)
        self.pools = tuple(HostPool(size.num_pages) for size in sizes)
        self._leaving: dict[tuple[int, int], int] = {}  # the page by group and host page
        self._coming: dict[tuple[int, int], int] = {}  # the host page by group and page

    def __bool__(self) -> bool:
        return bool(self.pools)

    @property
    def num_bytes(self) -> int:
        """Bytes of all host pages."""
        return sum(size.num_pages * size.page_bytes for size in self.sizes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the host pages that hold something."""
        return sum(pool.num_used * size.page_bytes for pool, size in zip(self.pools, self.sizes, strict=True))

    def move_out(self, group: int, page: int, on_evict: Callable[[], None]) -> int:
        """Plans that a page moves to the host; returns its host page, NULL_PAGE where there is no room. `on_evict` is
        called when that is given away, and has to `drop` it."""
        host = self.pools[group].allocate(on_evict) if self.pools else NULL_PAGE
        if host != NULL_PAGE:
            self._leaving[group, host] = page
        return host

    def place(self, group: int, on_evict: Callable[[], None]) -> int:
        """A host page whose contents do not come from the device; NULL_PAGE where there is no room. As `move_out`."""
        return self.pools[group].allocate(on_evict)

    def move_back(self, group: int, page: int, host: int) -> None:
        """Plans that a pinned host page is copied to a page, and stays pinned until then."""
        self._coming[group, page] = host

    def cancel(self, group: int, page: int) -> None:
        """Nothing has to come back into a page that is given away."""
        host = self._coming.pop((group, page), NULL_PAGE)
        if host != NULL_PAGE:
            self.unpin(group, host)

    def touch(self, group: int, host: int) -> None:
        """The host page is given away after all others."""
        self.pools[group].touch(host)

    def drop(self, group: int, host: int) -> None:
        """Gives up what a host page holds."""
        self._leaving.pop((group, host), None)
        self.pools[group].drop(host)

    def pin(self, group: int, host: int) -> None:
        """The host page has to stay until it was read."""
        self.pools[group].pin(host, 1)

    def unpin(self, group: int, host: int) -> None:
        """Takes one `pin` back."""
        self.pools[group].pin(host, -1)

    def take_moves(self) -> tuple[list[PageMove], list[PageMove]]:
        """The moves to the host, and those back, that the next dispatch makes first, in this order."""
        leaving = [PageMove(group, page, host) for (group, host), page in self._leaving.items()]
        coming = [PageMove(group, page, host) for (group, page), host in self._coming.items()]
        for move in coming:
            self.unpin(move.group, move.host)
        self._leaving, self._coming = {}, {}
        return leaving, coming

    def bytes_of(self, moves: Sequence[PageMove]) -> int:
        """That moves copy."""
        return sum(self.sizes[move.group].page_bytes for move in moves)

    def check(self, known: Sequence[set[int]]) -> None:
        """Raises RuntimeError unless `known`, by group, are the host pages in use."""
        for pool, pages in zip(self.pools, known, strict=True):
            pool.check(pages)
        if any(host not in known[group] for group, host in self._leaving):
            raise RuntimeError("a page moves to a host page that is not in use")
        if any(host not in known[group] for (group, _), host in self._coming.items()):
            raise RuntimeError("a page comes back from a host page that is not in use")
