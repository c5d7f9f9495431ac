"""The prefix tree against a model: a dictionary from the tokens before and in a page to the page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix import PrefixPlace, PrefixTree

Path = tuple[bytes, ...]
PAGE = 4
KEYS = st.lists(st.sampled_from([b"a", b"b"]), max_size=6)
SALTS = st.sampled_from(["", "tenant"])


def single_tree(pool: PagePool) -> PrefixTree:
    """A tree of one group, without a window."""
    return PrefixTree([pool], [CacheGroup(pool.num_pages)], PAGE)


def share(tree: PrefixTree, keys: list[bytes], salt: str = "") -> list[list[int]]:
    """The tables of a match."""
    return tree.restore(tree.match(keys, salt))


class Tree(RuleBasedStateMachine):
    """Sequences that match what they can, take pages for the rest, make them known and go."""

    @initialize(num_pages=st.integers(2, 16))
    def start(self, num_pages):
        self.pool = PagePool(num_pages)
        self.tree = single_tree(self.pool)
        self.model: dict[tuple[str, Path], int] = {}
        self.sequences: list[tuple[str, list[bytes], list[int]]] = []

    def known(self, salt: str, keys: list[bytes]) -> list[int]:
        pages = []
        for end in range(1, len(keys) + 1):
            page = self.model.get((salt, tuple(keys[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def allocate(self, count: int) -> list[int]:
        """A page that is given away is no longer known."""
        pages = self.pool.allocate(count)
        self.model = {path: page for path, page in self.model.items() if page not in pages}
        return pages

    @rule(keys=KEYS, salt=SALTS, reuses=st.booleans())
    def admit(self, keys, salt, reuses):
        expected = self.known(salt, keys)
        assert self.tree.num_known(keys, salt) == len(expected)
        (pages,) = share(self.tree, keys, salt) if reuses else [[]]
        assert pages == (expected if reuses else [])
        if len(keys) - len(pages) > self.pool.num_available:
            self.pool.release(pages)
            return
        pages += self.allocate(len(keys) - len(pages))
        self.sequences.append((salt, keys, pages))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def insert(self, data):
        """Pages become known from the beginning, perhaps not all; those known for the same beginning replace them."""
        salt, keys, pages = data.draw(st.sampled_from(self.sequences))
        count = data.draw(st.integers(0, len(keys)))
        before = list(pages)
        self.tree.insert(keys[:count], [pages], salt)
        for end in range(1, count + 1):
            assert pages[end - 1] == self.model.setdefault((salt, tuple(keys[:end])), before[end - 1])
        assert pages[count:] == before[count:]
        for page in set(before) - set(pages):
            assert self.pool.num_owners(page) == 0

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data):
        _, _, pages = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(pages)

    @rule()
    def drop_idle(self):
        self.pool.drop_idle()
        self.model = {path: page for path, page in self.model.items() if self.pool.num_owners(page)}

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(pages for _, _, pages in self.sequences)
        self.tree.check()
        assert self.tree.num_pages == len(self.model)
        assert {page for page in range(self.pool.num_pages) if self.pool.is_kept(page)} == set(self.model.values())
        assert set(self.tree._roots) == {salt for salt, _ in self.model}


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# Examples.


def known_tree(num_pages: int = 9, salt: str = "") -> tuple[PagePool, PrefixTree, list[int]]:
    """A tree that knows the pages of b"a", b"b", b"c", which a sequence still owns."""
    pool = PagePool(num_pages)
    tree = single_tree(pool)
    pages = pool.allocate(3)
    tree.insert([b"a", b"b", b"c"], [pages], salt)
    return pool, tree, pages


def test_the_longest_known_beginning_is_matched():
    pool, tree, pages = known_tree()
    assert share(tree, [b"a", b"b", b"x", b"c"]) == [pages[:2]]
    assert [pool.num_owners(page) for page in pages] == [2, 2, 1]
    assert share(tree, [b"b", b"c"]) == share(tree, []) == [[]]


def test_salts_do_not_share():
    _, tree, pages = known_tree(salt="one")
    assert share(tree, [b"a"]) == share(tree, [b"a"], "two") == [[]]
    assert share(tree, [b"a"], "one") == [pages[:1]]


def test_pages_computed_twice_become_free():
    pool, tree, pages = known_tree()
    second = pool.allocate(4)
    mine = list(second)
    tree.insert([b"a", b"b", b"c", b"d"], [mine])
    assert mine == [*pages, second[3]]
    assert [pool.num_owners(page) for page in second] == [0, 0, 0, 1]
    assert tree.num_pages == 4


def test_it_shrinks_from_its_leaves():
    pool, tree, pages = known_tree(num_pages=4)
    pool.release(pages)
    for known in (2, 1, 0):
        pool.allocate(1)
        assert tree.num_known([b"a", b"b", b"c"]) == known
        tree.check()
    assert pool.num_evictions == 3


def test_what_was_used_last_is_kept_longest():
    pool, tree, pages = known_tree(num_pages=5)
    other = pool.allocate(1)
    tree.insert([b"z"], [other])
    pool.release(pages)
    pool.release(other)
    pool.release(share(tree, [b"a", b"b", b"c"])[0])
    pool.allocate(1)
    assert tree.num_known([b"z"]) == 0
    assert tree.num_known([b"a", b"b", b"c"]) == 3


def test_a_salt_is_forgotten_with_its_last_page():
    """One salt per user: what is remembered of users must not grow for ever."""
    pool = PagePool(4)
    tree = single_tree(pool)
    for user in range(1000):
        pages = pool.allocate(1)
        tree.insert([b"a"] if user % 2 else [], [pages], str(user))
        pool.release(pages)
        assert len(tree._roots) <= 3
    tree.check()


def test_keys_and_salts_may_be_any():
    """A page that leaves the tree is taken for no root, whatever the bytes of its tokens are."""
    pool = PagePool(4)
    tree = single_tree(pool)
    pages = pool.allocate(2)
    tree.insert([b"\xb1\x00", b"\xff\x00"], [pages], "\ud800")
    pool.release(pages)
    pool.drop_idle()
    assert (tree._roots, tree.num_pages) == ({}, 0)


# Groups of layers with windows.

WINDOW = 6  # a token after n others sees n - 5 and on: of pages of 4 tokens, the last two


def tree_with_window(num_pages: int = 9, keys: str = "abcd") -> tuple[PrefixTree, list[PagePool], list[list[int]]]:
    """A tree that knows the pages of some keys in a group without a window and in one with, which a sequence owns."""
    pools = [PagePool(num_pages), PagePool(num_pages)]
    tree = PrefixTree(pools, [CacheGroup(num_pages), CacheGroup(num_pages, WINDOW)], PAGE)
    tables = [pool.allocate(len(keys)) for pool in pools]
    tree.insert(list_of(keys), tables)
    return tree, pools, tables


def list_of(keys: str) -> list[bytes]:
    return [key.encode() for key in keys]


def test_a_match_has_the_pages_of_the_last_window_only():
    tree, pools, (full, window) = tree_with_window()
    assert share(tree, list_of("abcd")) == [full, [0, 0, *window[2:]]]
    assert share(tree, list_of("ax")) == [full[:1], window[:1]]
    assert [pools[0].num_owners(page) for page in full] == [3, 2, 2, 2]
    assert [pools[1].num_owners(page) for page in window] == [2, 1, 2, 2]


def test_a_match_has_the_sinks_too():
    """Of a group that keeps its first page beside the window; without it, nothing goes on after the window."""
    pool = PagePool(9)
    tree = PrefixTree([pool], [CacheGroup(9, WINDOW, num_sinks=1)], PAGE)
    pages = pool.allocate(4)
    tree.insert(list_of("abcd"), [list(pages)])
    assert tree.match(list_of("abcd")).tables == [[pages[0], 0, *pages[2:]]]
    assert [pool.num_owners(page) for page in pages] == [2, 1, 2, 2]
    pool.release([pages[0], *pages[2:]])
    pool.release(pages[:1])
    pool.drop(pages[0])
    assert tree.num_known(list_of("abcd")) == 0
    tree.check()


def test_the_longest_match_is_one_whose_last_window_is_there():
    tree, pools, (full, window) = tree_with_window(num_pages=5)
    pools[1].release([window[2]])  # a sequence that has slid on, whose page is then given away
    window[2] = 0
    pools[1].allocate(1)
    assert tree.num_known(list_of("abcd")) == 2
    assert share(tree, list_of("abcd")) == [full[:2], window[:2]]
    tree.check()


def test_pages_of_a_window_go_without_those_of_other_groups():
    tree, pools, (full, window) = tree_with_window(num_pages=5)
    pools[1].release(window)
    pools[1].allocate(4)
    assert tree.num_known(list_of("abcd")) == 0
    assert tree.num_pages == 4
    tree.check()
    pools[0].release(full)
    pools[0].allocate(4)
    assert (tree.num_pages, tree._roots) == (0, {})


def test_a_place_goes_on_where_it_was_and_starts_again_where_its_pages_are_gone():
    pool = PagePool(4)
    tree = PrefixTree([pool], [CacheGroup(4, 1)], PAGE)
    place, table = PrefixPlace(), pool.allocate(2)
    tree.insert(list_of("ab"), [table], "", place)
    pool.release(table)
    pool.allocate(3)  # everything known is given away
    assert tree._roots == {}
    tree.insert(list_of("ab"), [[0, 0]], "", place)
    assert tree._roots == {}, "a path without pages is no beginning of anything"
    pool.release([1])
    (page,) = pool.allocate(1)
    tree.insert(list_of("abc"), [[0, 0, page]], "", place)
    tree.check()
    assert share(tree, list_of("abcd")) == [[0, 0, 0]]


def test_what_was_computed_twice_is_shared_by_group():
    tree, pools, (full, window) = tree_with_window()
    mine = [pools[0].allocate(4), [0, 0, *pools[1].allocate(2)]]
    assert tree.insert(list_of("abcd"), mine)
    assert mine == [full, [0, 0, *window[2:]]]
    tree.check()


# States at ends of pages: a group of which the last page alone is needed.


def tree_with_states(num_places: int = 4) -> tuple[PrefixTree, list[PagePool], list[int], list[int]]:
    """A tree that knows b"a" to b"d", with states after the second and the last, whose places nobody owns."""
    pools = [PagePool(6), PagePool(num_places)]
    tree = PrefixTree(pools, [CacheGroup(6), CacheGroup(num_places, window=2)], PAGE)
    place, pages = PrefixPlace(), pools[0].allocate(4)
    states = [0, *pools[1].allocate(1), 0, *pools[1].allocate(1)]
    tree.insert(list_of("abcd"), [pages, states], "", place)
    pools[1].release([state for state in states if state])
    tree.touch(place, 1)
    return tree, pools, pages, states


def test_a_match_ends_at_the_deepest_state():
    tree, _, pages, states = tree_with_states()
    assert share(tree, list_of("abcd")) == [pages, [0, 0, 0, states[3]]]
    assert share(tree, list_of("abcx")) == [pages[:2], [0, states[1]]]
    assert share(tree, list_of("ax")) == [[], []]
    assert [tree.num_stored(list_of(keys)) for keys in ("abcd", "abcx", "ax", "x", "")] == [4, 3, 1, 0, 0]


def test_the_state_of_a_beginning_is_kept_longer_than_that_of_its_end():
    tree, pools, _, states = tree_with_states(num_places=3)
    assert pools[1].allocate(1) == [states[3]]
    assert tree.num_known(list_of("abcd")) == 2
    tree.check()


def test_a_state_goes_with_its_pages():
    tree, pools, pages, states = tree_with_states()
    pools[0].release(pages)
    pools[0].allocate(3)
    assert tree.num_known(list_of("abcd")) == 2
    assert (pools[1].num_idle, pools[1].num_available) == (1, 3)
    assert not pools[1].is_kept(states[3])
    tree.check()


# Planted faults.


def test_pages_that_go_before_those_after_them_are_noticed():
    pool, _, pages = known_tree(num_pages=4)
    pool.release(pages[::-1])
    with pytest.raises(RuntimeError, match="before the pages that continue it"):
        pool.allocate(1)


def test_check_sees_an_end_that_outlives_its_beginning():
    pool, tree, pages = known_tree()
    pool.share(pages[2:])
    with pytest.raises(RuntimeError, match="more owners"):
        tree.check()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tree: setattr(tree._roots[""].children[b"a"], "pages", [2]), "known twice"),
        (lambda tree: setattr(tree._roots[""].children[b"a"], "key", b"b"), "another key"),
        (lambda tree: setattr(tree._roots[""].children[b"a"], "pages", [7]), "does not keep it"),
        (lambda tree: setattr(tree, "num_pages", 4), "4 were counted"),
        (lambda tree: tree._roots.update(more=type(tree._roots[""])(b"", 1, None)), "a salt without pages"),
    ],
)
def test_check_sees_what_is_spoilt(spoil, message):
    _, tree, _ = known_tree()
    tree.check()
    spoil(tree)
    with pytest.raises(RuntimeError, match=message):
        tree.check()
