"""An extent order holds what an OrderedDict of single pages would hold, in the same order."""

from collections import OrderedDict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.pages.extent_order import ExtentOrder
from kvsim.pages.extents import Extent, append_extent
from tests.workloads import EXAMPLES, pages_of

PAGES = 24


def order_of(extents: ExtentOrder) -> list[tuple[int, object]]:
    """Every page with its value, oldest first."""
    pages = []
    for (start, length), tail_first, value in extents.oldest_first():
        ids = range(start, start + length)
        pages += [(page, value) for page in (reversed(ids) if tail_first else ids)]
    return pages


@st.composite
def paths(draw: st.DrawFn) -> list[Extent]:
    """A path whose pages differ: a few extents, in any order of their ids."""
    bounds = sorted(draw(st.sets(st.integers(0, PAGES), min_size=2, max_size=7)))
    extents = [(start, stop - start) for start, stop in pairwise(bounds)]
    chosen = draw(st.permutations(draw(st.lists(st.sampled_from(extents), unique=True, min_size=1))))
    path: list[Extent] = []
    for start, pages in chosen:
        append_extent(path, start, pages)
    return path


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_it_is_an_ordered_dict_of_pages(data: st.DataObject) -> None:
    extents, plain = ExtentOrder(), OrderedDict[int, int]()
    others, plain_others = ExtentOrder(), OrderedDict[int, int]()
    for step in range(1, data.draw(st.integers(1, 25)) + 1):
        action = data.draw(st.sampled_from(["append", "touch", "mark", "remove", "pop", "move"]))
        path = data.draw(paths())
        tail_first = data.draw(st.booleans())
        pages = pages_of(path)[::-1] if tail_first else pages_of(path)
        if action == "append":
            extents.append(path, tail_first=tail_first, value=step // 3)
            for page in pages:
                plain.pop(page, None)
                plain[page] = step // 3
        elif action == "touch":
            here = [page for page in pages if page in plain]
            assert extents.touch(path, tail_first=tail_first) == len(here)
            for page in here:
                plain.move_to_end(page)
        elif action == "mark":
            extents.mark(path, step // 3)
            plain.update({page: step // 3 for page in pages if page in plain})
        elif action == "remove":
            assert extents.remove(path) == len([plain.pop(page) for page in pages if page in plain])
        elif action == "move":
            count = data.draw(st.integers(0, PAGES))
            oldest = [page for page in plain if page not in pages][:count]
            extents.move_oldest(count, others, keep=path)
            for page in oldest:
                plain_others.pop(page, None)
                plain_others[page] = plain.pop(page)
            assert order_of(others) == list(plain_others.items())
        else:
            count = data.draw(st.integers(0, PAGES))
            oldest = [plain.popitem(last=False)[0] for _ in range(min(count, len(plain)))]
            assert sorted(pages_of(extents.pop_oldest(count))) == sorted(oldest)
        assert order_of(extents) == list(plain.items())
        assert extents.pages == len(plain)
        looked_up = data.draw(paths())
        found = [value for (_, length), value in extents.pieces(looked_up) for _ in range(length)]
        assert found == [plain.get(page) for page in pages_of(looked_up)]
        assert extents.count(looked_up) == sum(page in plain for page in pages_of(looked_up))
        gaps = [page in plain for page in pages_of(looked_up)] + [False]
        assert extents.leading_pages(looked_up) == gaps.index(False)


def test_a_page_is_found_with_its_extent() -> None:
    order = ExtentOrder()
    order.append([(10, 5)])
    assert 12 in order and 15 not in order and "12" not in order


def test_the_tail_is_the_oldest_unless_the_head_is_asked_to_be() -> None:
    order = ExtentOrder()
    order.append([(0, 4)])
    assert order.pop_oldest(1) == [(3, 1)]
    order.append([(10, 4)], tail_first=False)
    assert order.pop_oldest(4) == [(0, 3), (10, 1)]


def test_what_was_cut_is_one_extent_again_when_it_comes_back_whole() -> None:
    order = ExtentOrder()
    order.append([(0, 8)])
    order.touch([(2, 3)])
    order.append([(0, 8)])
    assert [extent for extent, _, _ in order.oldest_first()] == [(0, 8)]
    order.append([(6, 2)])
    order.append([(3, 3)])
    assert [extent for extent, _, _ in order.oldest_first()] == [(0, 3), (3, 5)]
