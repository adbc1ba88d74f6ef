"""Prefix-aware routing by hand, in pages of 4 tokens and prompts of one token more, and its tree against one of single pages."""

from random import Random

import pytest

from kvsim.policies.routing.context import RoutingContext
from kvsim.policies.routing.prefix_aware import PrefixAware
from kvsim.policies.routing.prefix_tree import PrefixTree, owners
from tests.policies.small_routing import SmallRouter, prompt, router
from tests.workloads import Words, make_request, pages_of


def loads(small: SmallRouter) -> list[int]:
    return [known.outstanding_requests for known in small.engines.values()]


def test_a_prompt_goes_where_most_of_it_was_sent() -> None:
    """Three prompts of 10 pages, on idle engines: the least loaded one each time. The fourth shares 8 pages with the second."""
    small = router(PrefixAware())
    assert [small.send(prompt((100 * at, 10)), float(at)) for at in range(3)] == [0, 1, 2]
    small.ended(prompt((0, 10)), 0, 3.0)
    assert small.send(prompt((100, 8), (150, 2)), 4.0) == 1
    assert small.send(prompt((150, 2), (160, 8)), 5.0) == 0, "these are no first pages: a page id stands for all before it, too"


@pytest.mark.parametrize(("pages", "chosen"), [(3, 0), (4, 1)])
def test_a_match_decides_above_the_threshold(pages: int, chosen: int) -> None:
    """Of 41 tokens, 12 (0.293) or 16 (0.390) match what engine 1 has; 0.3 is the threshold."""
    small = router(PrefixAware(cache_threshold=0.3))
    small.send(prompt((0, 10)), 0.0)
    small.send(prompt((100, 10)), 1.0)
    small.ended(prompt((0, 10)), 0, 2.0)
    assert small.send(prompt((100, pages), (200, 10 - pages)), 3.0) == chosen


def in_flight(small: SmallRouter, *counts: int) -> None:
    """Let the engines have these numbers of requests that have not ended."""
    for known, count in zip(small.engines.values(), counts, strict=True):
        while known.outstanding_requests != count:
            known.sent(prompt(), 1 if known.outstanding_requests < count else -1)


@pytest.mark.parametrize(
    ("counts", "chosen"), [((6, 2), 0), ((7, 2), 1), ((6, 1), 1), ((4, 1), 0), ((3, 0), 0), ((4, 0), 1), ((0, 9), 0)]
)
def test_an_uneven_load_decides_alone(counts: tuple[int, int], chosen: int) -> None:
    """Engine 0 has the prompt. The load is uneven if the counts differ by more than 3 and one is more than 3 times the other."""
    small = router(PrefixAware(balance_abs_threshold=3, balance_rel_threshold=3.0), engines=2)
    assert small.send(prompt((0, 10)), 0.0) == 0
    in_flight(small, *counts)
    assert small.send(prompt((0, 10)), 1.0) == chosen


def test_an_engine_that_has_started_gets_only_what_matches_nowhere_until_the_load_is_uneven() -> None:
    """Engine 1 starts when engine 0 has two sessions, whose turns stay there up to a difference of 64 requests."""
    small = router(PrefixAware(), engines=2)
    small.drain(1, 0.0)
    assert [small.send(prompt((100 * at, 10)), float(at)) for at in range(2)] == [0, 0]
    small.up(1, 2.0)
    assert small.send(prompt((0, 10), (50, 1)), 3.0) == 0
    assert small.send(prompt((200, 10)), 4.0) == 1
    in_flight(small, 65, 1)
    assert small.send(prompt((0, 10), (60, 1)), 5.0) == 0
    in_flight(small, 66, 1)
    assert small.send(prompt((0, 10), (70, 1)), 6.0) == 1


def test_a_prompt_that_is_sent_to_balance_the_load_is_remembered_there() -> None:
    """Engine 0 got the prefix first and stays its owner, until it fails."""
    small = router(PrefixAware(balance_abs_threshold=1, balance_rel_threshold=1.0), engines=2)
    request = prompt((0, 10))
    assert [small.send(request, float(at)) for at in range(3)] == [0, 0, 1], "2 - 0 > 1"
    assert small.send(prompt((0, 10), (50, 1)), 3.0) == 0, "2 - 1 = 1"
    for _ in range(3):
        small.ended(request, 0, 4.0)
    small.down(0, 5.0)
    small.up(0, 6.0)
    assert loads(small) == [0, 1]
    assert small.send(prompt((0, 10), (60, 1)), 7.0) == 1, "engine 0 has lost what it had"


@pytest.mark.parametrize(("fallback", "chosen"), [("least_loaded", 1), ("smallest_tree", 0)])
def test_without_a_match_load_or_the_size_of_trees_decides(fallback: str, chosen: int) -> None:
    """Engine 0 has 2 pages and two requests, engine 1 has 10 pages and one request."""
    small = router(PrefixAware(fallback=fallback), engines=2)
    assert small.send(prompt((0, 2)), 0.0) == 0
    assert small.send(prompt((100, 10)), 1.0) == 1
    in_flight(small, 2, 1)
    assert small.send(prompt((200, 4)), 2.0) == chosen


def test_a_tree_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tree_tokens=15 is less than a page of 16 tokens"):
        PrefixAware(max_tree_tokens=15).bind(RoutingContext(page_tokens=16))


class SlowTree:
    """The same tree, page by page. Of each engine's pages, the one sent longest ago that no other follows is forgotten first."""

    def __init__(self, engines: int, most: int) -> None:
        self.most = most
        self.first: list[dict[int, float]] = [{} for _ in range(engines)]
        self.last: list[dict[int, float]] = [{} for _ in range(engines)]
        self.before: dict[int, int] = {}

    def longest(self, pages: list[int]) -> tuple[int, int]:
        held = [next((at for at, page in enumerate(pages) if page not in last), len(pages)) for last in self.last]
        longest = max(held)
        if not longest:
            return 0, -1
        owners = [engine for engine, many in enumerate(held) if many == longest]
        return longest, min(owners, key=lambda engine: self.first[engine][pages[longest - 1]])

    def add(self, pages: list[int], engine: int, now: float) -> None:
        first, last = self.first[engine], self.last[engine]
        if len(pages) > self.most:
            return
        for before, page in zip([-1, *pages], pages, strict=False):
            self.before[page] = before
            first.setdefault(page, now)
            last[page] = now
        while len(last) > self.most:
            followed = {self.before[page] for page in last}
            forgotten = min((page for page in last if page not in followed), key=lambda page: last[page])
            del first[forgotten], last[forgotten]

    def forget(self, engine: int) -> None:
        self.first[engine].clear()
        self.last[engine].clear()


def check(tree: PrefixTree) -> None:
    """An engine owns all that precedes what it owns; it knows the sum of its pages, and its queue has every end once."""
    for engine, remembered in tree._engines.items():
        own = [node for node in tree._tree.root.descendants() if engine in owners(node)]
        assert remembered.pages == sum(node.pages for node in own)
        queued = [node for _, _, node in remembered.queue]
        for node in own:
            children = [child for child in node.children.values() if engine in owners(child)]
            assert node.parent in (tree._tree.root, *own)
            assert owners(node)[engine].children == len(children)
            assert queued.count(node) == owners(node)[engine].is_queued >= (not children)
        assert set(queued) <= set(own)
    assert all(owners(node) for node in tree._tree.root.descendants())


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_is_that_of_single_pages(seed: int) -> None:
    random, words = Random(seed), Words()
    engines, most = random.randint(1, 4), random.randint(3, 14)
    tree, slow = PrefixTree(range(engines), most), SlowTree(engines, most)
    for step in range(120):
        word = "".join(random.choice("aab") for _ in range(random.randint(1, 8)))
        request, engine, now = make_request(words.pages(word), index=step), random.randrange(engines), float(step)
        assert tree.longest(request.runs) == slow.longest(pages_of(request.runs))
        if random.random() < 0.03:
            tree.forget(engine)
            slow.forget(engine)
        else:
            tree.add(request, engine, now)
            slow.add(pages_of(request.runs), engine, now)
        check(tree)
        assert [tree.pages(number) for number in range(engines)] == [len(last) for last in slow.last]


def test_images_and_persistence_make_no_difference_to_the_tree() -> None:
    tree, words = PrefixTree([0], 4), Words()
    lasting = make_request(words.pages("abcd"), persistent=True, images=((1, 3),))
    tree.add(lasting, 0, 0.0)
    assert tree.longest(lasting.runs) == (4, 0)
    tree.add(make_request(words.pages("wxyz")), 0, 1.0)
    assert tree.longest(lasting.runs) == (0, -1)
