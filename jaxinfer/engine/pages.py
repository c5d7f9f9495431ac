"""Ownership of the pages of a cache. Plain Python: no JAX here.

A page is in one of four states:

  null    page 0: fills unused entries of page tables; it is never owned.
  free    without owner, contents meaningless.
  owned   by one or more sequences; those that share a page only read it.
  idle    without owner, but kept, as its contents may be reused. The page that is idle for longest is allocated when
          no page is free, and its `on_evict` callback is called; pages that are unlikely to be reused are evicted
          first.
"""

import random
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import neg

NULL_PAGE = 0
MAX_STARTS = 1024  # free pages that `allocate` tries as the start of a run of consecutive ones


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free or idle; nothing was taken."""


class PagePool:
    """Hands out the pages 1 .. num_pages - 1 and counts their owners.

    Pages that are allocated together are consecutive where such are free: memory reads them faster one after the other
    than scattered. `shuffle_seed` takes free pages at random, for tests: no answer depends on the order.
    """

    def __init__(self, num_pages: int, shuffle_seed: int | None = None):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: a pool needs the null page and at least one more")
        self.num_pages = num_pages
        self.num_evictions = 0
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # the lowest last, where a list is cheap to change
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)
        self._owners = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._on_evict: dict[int, Callable[[], None]] = {}
        self._unlikely: set[int] = set()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_owned(self) -> int:
        return self.num_pages - 1 - self.num_available

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def num_owners(self, page: int) -> int:
        return self._owners[page]

    def is_kept(self, page: int) -> bool:
        """True if its contents may be reused, so that it must not be written."""
        return page in self._on_evict

    def is_unlikely(self, page: int) -> bool:
        """True if the page's contents are unlikely to be reused, so that `on_evict` need not copy them to host
        memory."""
        return page in self._unlikely

    def allocate(self, count: int) -> list[int]:
        """Allocates pages with one owner, in ascending order: the first consecutive free ones, or else the first free
        ones, then idle ones, which are evicted.

        Raises OutOfPagesError and takes none where there are too few.
        """
        if count > self.num_available:
            raise OutOfPagesError(f"{count} pages needed, {self.num_available} of {self.num_pages - 1} available")
        pages = self._take_free(min(count, len(self._free)))
        pages += [self._evict() for _ in range(count - len(pages))]
        if self._random is None:
            pages.sort()
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each; an idle page is owned again."""
        for page in pages:
            if self._owners[page] == 0:
                if page not in self._idle:
                    raise ValueError(f"page {page} is shared, but it has no owner and is not kept")
                del self._idle[page]
                self._unlikely.discard(page)
            self._owners[page] += 1

    def release(self, pages: Sequence[int], *, evict_first: bool = False) -> None:
        """One owner less for each, the last page of a sequence first.

        In that order no idle page is reallocated before a page that continues it. With `evict_first`, those that become
        idle are reallocated before all that are idle already.
        """
        for page in reversed(pages):
            if self._owners[page] == 0:
                raise ValueError(f"page {page} is released, but no sequence owns it")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._on_evict:
                    self._idle[page] = None
                    if evict_first:
                        self._idle.move_to_end(page, last=False)
                        self._unlikely.add(page)
                else:
                    insort(self._free, page, key=neg)

    def keep(self, page: int, on_evict: Callable[[], None]) -> None:
        """Unowned, the contents of `page` stay for as long as pages last; `on_evict()` is called when they go."""
        if self._owners[page] == 0 or page in self._on_evict:
            raise ValueError(f"page {page} is kept, but it has {self._owners[page]} owners or is kept already")
        self._on_evict[page] = on_evict

    def touch(self, page: int) -> None:
        """An idle page is reallocated after all that are idle already."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def drop(self, page: int) -> None:
        """Gives up what a page holds, if it is idle: the page is free."""
        if page in self._idle:
            del self._idle[page]
            self._unlikely.add(page)
            insort(self._free, page, key=neg)
            self._on_evict.pop(page)()
            self._unlikely.remove(page)

    def drop_idle(self) -> int:
        """Gives up everything idle; returns how many pages became free."""
        count = len(self._idle)
        self._unlikely.update(self._idle)
        self._free = sorted([*self._free, *(self._evict() for _ in range(count))], reverse=True)
        return count

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless `tables`, the pages of every sequence, are exactly the owners there are."""
        owners = [0] * self.num_pages
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a sequence has a page twice: {sorted(table)}")
            for page in table:
                owners[page] += 1
        wrong = [page for page in range(self.num_pages) if owners[page] != self._owners[page]]
        if wrong:
            page = wrong[0]
            raise RuntimeError(f"page {page} has {owners[page]} owners, the pool counts {self._owners[page]}")
        unowned = [*self._free, *self._idle]
        if len(set(unowned)) != len(unowned) or any(owners[page] for page in unowned) or NULL_PAGE in unowned:
            raise RuntimeError("a page is free or idle twice, or while it is owned, or it is the null page")
        if len(unowned) + sum(count > 0 for count in owners) != self.num_pages - 1:
            raise RuntimeError(f"{self.num_pages - 1} pages, but {len(unowned)} unowned and {self.num_owned} owned")
        if any(page not in self._on_evict for page in self._idle) or any(page in self._on_evict for page in self._free):
            raise RuntimeError("an idle page is not kept, or a free one is kept")

    def _take_free(self, count: int) -> list[int]:
        """Takes so many free pages: the first that are consecutive, or else the first."""
        if self._random is not None:
            pages = self._random.sample(self._free, count)
            self._free = sorted(set(self._free).difference(pages), reverse=True)
            return pages
        free = self._free
        first = len(free) - count
        starts = range(first, max(first - MAX_STARTS, -1), -1) if count > 1 else ()
        first = next((start for start in starts if free[start] - free[start + count - 1] == count - 1), first)
        pages = free[first : first + count]
        del free[first : first + count]
        return pages

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._on_evict.pop(page)()
        self._unlikely.discard(page)
        self.num_evictions += 1
        return page
