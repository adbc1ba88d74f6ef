"""Store at the k-th offer: prompts are copied below when their pages have been offered often enough."""

from collections import OrderedDict
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.store_threshold import StoreThreshold
from tests.core.small import small_cache
from tests.workloads import make_request


def test_pages_are_stored_at_the_kth_offer() -> None:
    cache = small_cache(gpu=9, cpu=9, placement=partial(StoreThreshold, k=3))
    for count, stored in ((1, ""), (2, ""), (3, "abc")):
        cache.use("abc")
        assert cache.on("cpu") == stored, count


def test_a_prompt_is_stored_up_to_its_first_page_that_was_offered_too_seldom() -> None:
    cache = small_cache(gpu=9, cpu=9, placement=partial(StoreThreshold, k=2))
    cache.use("abc")
    cache.use("abxy")
    assert cache.on("cpu") == "ab"


def test_a_store_that_does_not_fit_is_dropped_whole() -> None:
    cache = small_cache(gpu=9, cpu=4, placement=StoreThreshold)
    cache.use("ab")
    cache.use("vwxyz")
    assert cache.on("cpu") == "ab" and cache.counts.no_room_pages == 5
    cache.use("abcd")
    assert cache.on("cpu") == "abcd"


class PlainTable:
    """The offer table page by page, as an ordered map."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.counts: OrderedDict[int, int] = OrderedDict()

    def offer(self, pages: list[int]) -> None:
        known = [page for page in pages if page in self.counts]
        for page in known:
            self.counts[page] += 1
            self.counts.move_to_end(page)
        for page in [page for page in pages if page not in self.counts][: self.capacity - len(known)]:
            self.counts[page] = 1
        while len(self.counts) > self.capacity:
            self.counts.popitem(last=False)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 12)), max_size=40),
    capacity=st.integers(1, 15),
    k=st.integers(2, 4),
)
def test_the_table_counts_like_one_that_holds_single_pages(prompts: list[tuple[int, int, int]], capacity: int, k: int) -> None:
    policy, plain = StoreThreshold(k=k, tracker_pages=capacity), PlainTable(capacity)
    policy.bind(PolicyContext(tier=1))
    for branch, shared, pages in prompts:
        path = [*range(shared), *range(100 * (branch + 1) + 20 * shared, 100 * (branch + 1) + 20 * shared + pages)]
        policy.on_request(make_request(path), 0.0)
        plain.offer(path)
        counted = {extent[0] + at: offers for extent, _, offers in policy._table.known.oldest_first() for at in range(extent[1])}
        assert counted == {page: min(count, k) for page, count in plain.counts.items()}


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("k", -1, "k must be 0 or more, not -1"),
        ("tracker_pages", 0, "tracker_pages must be at least 1, not 0"),
    ],
)
def test_settings_out_of_range_are_refused(setting: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreThreshold(**{setting: value})
