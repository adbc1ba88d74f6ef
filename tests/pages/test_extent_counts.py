"""Counts of pages by extents, against a dictionary of pages."""

from collections import Counter
from itertools import pairwise, takewhile
from random import Random

import pytest

from kvsim.pages.extent_counts import PageCounts
from kvsim.pages.extents import Extent
from tests.workloads import pages_of


def leading(extents: list[Extent], counted: Counter[int]) -> int:
    """The same question, page by page."""
    pages = pages_of(extents)
    return next((at for at, page in enumerate(pages) if not counted[page]), len(pages))


def test_a_path_is_held_up_to_its_first_page_without_a_count() -> None:
    counts = PageCounts()
    assert counts.add([(0, 4), (10, 3)]) == 7
    assert counts.leading([(0, 4), (10, 5)]) == 7
    assert counts.leading([(0, 6)]) == 4
    assert counts.leading([(0, 2), (10, 1), (4, 1)]) == 3
    assert counts.leading([(4, 2)]) == counts.leading([(9, 2)]) == counts.leading([(99, 1)]) == counts.leading([]) == 0


def test_a_page_counted_twice_stays_after_one_removal() -> None:
    counts = PageCounts()
    counts.add([(0, 4)])
    assert counts.add([(0, 2), (7, 1)]) == 1
    assert counts.counted() == [(0, 2, 2), (2, 2, 1), (7, 1, 1)]
    assert counts.leading([(0, 5)]) == 4
    assert counts.remove([(0, 4)]) == 2
    assert counts.counted() == [(0, 2, 1), (7, 1, 1)]
    assert counts.pages == 3


def test_neighbours_with_one_count_are_one() -> None:
    counts = PageCounts()
    counts.add([(4, 4)])
    counts.add([(0, 4)])
    counts.add([(8, 1)])
    assert counts.counted() == [(0, 9, 1)]


@pytest.mark.parametrize("extents", [[(5, 1)], [(0, 6)], [(2, 1), (2, 1)]])
def test_what_was_not_added_cannot_be_removed(extents: list[Extent]) -> None:
    counts = PageCounts()
    counts.add([(0, 5)])
    with pytest.raises(AssertionError, match="removed more often than"):
        counts.remove(extents)


@pytest.mark.parametrize("seed", range(10))
def test_random_paths_against_a_dictionary(seed: int) -> None:
    random = Random(seed)
    counts, counted = PageCounts(), Counter[int]()
    held: list[list[Extent]] = []
    for _ in range(200):
        extents = [(random.randrange(60), random.randint(1, 12)) for _ in range(random.randint(1, 3))]
        assert counts.leading(extents) == leading(extents, counted)
        of_pages = [counted[page] for page in pages_of(extents)]
        assert counts.last(extents) == of_pages[-1]
        assert counts.trailing(extents) == len(list(takewhile(of_pages[-1].__eq__, reversed(of_pages))))
        if all(of_pages):
            assert counts.shares(extents) == pytest.approx(sum(1 / count for count in of_pages))
        before = +counted
        if held and random.random() < 0.5:
            gone = held.pop(random.randrange(len(held)))
            counted.subtract(pages_of(gone))
            assert counts.remove(gone) == len(before) - len(+counted)
        else:
            held.append(extents)
            counted.update(pages_of(extents))
            assert counts.add(extents) == len(+counted) - len(before)
        assert counts.pages == len(+counted)
        found = counts.counted()
        assert {page: count for start, pages, count in found for page in range(start, start + pages)} == dict(+counted)
        assert all(a[0] + a[1] < b[0] or a[2] != b[2] for a, b in pairwise(found))
