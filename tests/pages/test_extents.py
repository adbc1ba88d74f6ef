"""Extents of page ids: joined, split, cut."""

from random import Random

import pytest

from kvsim.pages.extents import (
    Extent,
    append_extent,
    count_pages,
    drop_last_pages,
    join_extents,
    last_pages,
    pages_in_common,
    parts_by,
    split_extents,
    union,
)


@pytest.mark.parametrize(("dropped", "left"), [(0, ((1, 2), (8, 3))), (1, ((1, 2), (8, 2))), (3, ((1, 2),)), (4, ((1, 1),))])
def test_the_last_pages_of_a_path_are_dropped(dropped: int, left: tuple[Extent, ...]):
    assert drop_last_pages(((1, 2), (8, 3)), dropped) == left


def test_paths_are_joined_in_normal_form():
    assert join_extents(((1, 2), (8, 3)), ((11, 4), (20, 1))) == ((1, 2), (8, 7), (20, 1))
    assert join_extents(((1, 2),), ((8, 3),)) == ((1, 2), (8, 3))
    assert join_extents(((1, 2),), ()) == join_extents((), ((1, 2),)) == ((1, 2),) and join_extents((), ()) == ()


def test_an_extent_that_continues_the_last_one_joins_it():
    extents: list[Extent] = []
    for start, pages in ((5, 2), (7, 1), (9, 1)):
        append_extent(extents, start, pages)
    assert extents == [(5, 3), (9, 1)]


@pytest.mark.parametrize(
    ("pages", "upper", "lower"),
    [
        (0, (), ((0, 3), (10, 2))),
        (2, ((0, 2),), ((2, 1), (10, 2))),
        (3, ((0, 3),), ((10, 2),)),
        (4, ((0, 3), (10, 1)), ((11, 1),)),
        (5, ((0, 3), (10, 2)), ()),
        (6, ((0, 3), (10, 2)), ()),
    ],
)
def test_extents_are_split_after_any_page(pages, upper, lower):
    assert split_extents(((0, 3), (10, 2)), pages) == (upper, lower)
    assert count_pages(upper + lower) == 5


@pytest.mark.parametrize(("pages", "left"), [(1, ((10, 1),)), (3, ((8, 3),)), (4, ((2, 1), (8, 3))), (5, ((1, 2), (8, 3)))])
def test_the_last_pages_of_a_path_are_kept(pages: int, left: tuple[Extent, ...]):
    assert last_pages(((1, 2), (8, 3)), pages) == left


def test_extents_that_overlap_or_touch_are_united():
    assert union([(7, 2), (1, 3), (4, 1), (2, 1), (8, 4)]) == [(1, 4), (7, 5)]


@pytest.mark.parametrize("seed", range(20))
def test_an_extent_is_cut_by_others(seed: int):
    random = Random(seed)
    others = union([(random.randrange(40), random.randint(1, 6)) for _ in range(random.randint(0, 6))])
    inside = {page for start, pages in others for page in range(start, start + pages)}
    start, pages = random.randrange(40), random.randint(1, 20)
    parts = parts_by((start, pages), others)
    assert [(page, is_in) for (first, count), is_in in parts for page in range(first, first + count)] == [
        (page, page in inside) for page in range(start, start + pages)
    ]


def test_pages_in_common_lead_both_paths() -> None:
    assert pages_in_common(((1, 3), (8, 2)), ((1, 3), (8, 5))) == 5
    assert pages_in_common(((1, 3), (8, 2)), ((1, 2), (8, 2))) == 2
    assert pages_in_common(((1, 3), (8, 2)), ((1, 3), (9, 1))) == 3
    assert pages_in_common(((1, 3),), ((2, 2),)) == pages_in_common((), ((1, 3),)) == 0
