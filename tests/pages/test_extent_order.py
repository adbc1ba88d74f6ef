"""A run order holds what an OrderedDict of single pages would hold, in the same order."""

from collections import OrderedDict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.pages.extent_order import RunOrder
from kvsim.pages.extents import Run, append_run
from tests.workloads import EXAMPLES, pages_of

PAGES = 24


def order_of(runs: RunOrder) -> list[tuple[int, object]]:
    """Every page with its value, oldest first."""
    pages = []
    for (start, length), tail_first, value in runs.oldest_first():
        ids = range(start, start + length)
        pages += [(page, value) for page in (reversed(ids) if tail_first else ids)]
    return pages


@st.composite
def paths(draw: st.DrawFn) -> list[Run]:
    """A path whose pages differ: a few runs, in any order of their ids."""
    bounds = sorted(draw(st.sets(st.integers(0, PAGES), min_size=2, max_size=7)))
    runs = [(start, stop - start) for start, stop in pairwise(bounds)]
    chosen = draw(st.permutations(draw(st.lists(st.sampled_from(runs), unique=True, min_size=1))))
    path: list[Run] = []
    for start, pages in chosen:
        append_run(path, start, pages)
    return path


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_it_is_an_ordered_dict_of_pages(data: st.DataObject) -> None:
    runs, plain = RunOrder(), OrderedDict[int, int]()
    others, plain_others = RunOrder(), OrderedDict[int, int]()
    for step in range(1, data.draw(st.integers(1, 25)) + 1):
        action = data.draw(st.sampled_from(["append", "touch", "remove", "pop", "move"]))
        path = data.draw(paths())
        tail_first = data.draw(st.booleans())
        pages = pages_of(path)[::-1] if tail_first else pages_of(path)
        if action == "append":
            runs.append(path, tail_first=tail_first, value=step // 3)
            for page in pages:
                plain.pop(page, None)
                plain[page] = step // 3
        elif action == "touch":
            here = [page for page in pages if page in plain]
            assert runs.touch(path, tail_first=tail_first) == len(here)
            for page in here:
                plain.move_to_end(page)
        elif action == "remove":
            assert runs.remove(path) == len([plain.pop(page) for page in pages if page in plain])
        elif action == "move":
            count = data.draw(st.integers(0, PAGES))
            oldest = [page for page in plain if page not in pages][:count]
            runs.move_oldest(count, others, keep=path)
            for page in oldest:
                plain_others.pop(page, None)
                plain_others[page] = plain.pop(page)
            assert order_of(others) == list(plain_others.items())
        else:
            count = data.draw(st.integers(0, PAGES))
            oldest = [plain.popitem(last=False)[0] for _ in range(min(count, len(plain)))]
            assert sorted(pages_of(runs.pop_oldest(count))) == sorted(oldest)
        assert order_of(runs) == list(plain.items())
        assert runs.pages == len(plain)
        looked_up = data.draw(paths())
        found = [value for (_, length), value in runs.pieces(looked_up) for _ in range(length)]
        assert found == [plain.get(page) for page in pages_of(looked_up)]
        assert runs.count(looked_up) == sum(page in plain for page in pages_of(looked_up))
        gaps = [page in plain for page in pages_of(looked_up)] + [False]
        assert runs.leading_pages(looked_up) == gaps.index(False)


def test_a_page_is_found_with_its_run() -> None:
    order = RunOrder()
    order.append([(10, 5)])
    assert 12 in order and 15 not in order and "12" not in order


def test_the_tail_is_the_oldest_unless_the_head_is_asked_to_be() -> None:
    order = RunOrder()
    order.append([(0, 4)])
    assert order.pop_oldest(1) == [(3, 1)]
    order.append([(10, 4)], tail_first=False)
    assert order.pop_oldest(4) == [(0, 3), (10, 1)]


def test_what_was_cut_is_one_run_again_when_it_comes_back_whole() -> None:
    order = RunOrder()
    order.append([(0, 8)])
    order.touch([(2, 3)])
    order.append([(0, 8)])
    assert [run for run, _, _ in order.oldest_first()] == [(0, 8)]
    order.append([(6, 2)])
    order.append([(3, 3)])
    assert [run for run, _, _ in order.oldest_first()] == [(0, 3), (3, 5)]
