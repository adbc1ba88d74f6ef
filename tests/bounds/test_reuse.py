"""Who used each page before, and who uses it next."""

from hypothesis import given
from hypothesis import strategies as st

from kvsim.bounds.reuse import next_uses, previous_uses
from tests.workloads import paths_of


def page_by_page(words: list[str]) -> list[list[int]]:
    """The last request before each that used the same beginning, for each depth; -1 for none."""
    last: dict[str, int] = {}
    rows = []
    for number, word in enumerate(words):
        beginnings = [word[:end] for end in range(1, len(word) + 1)]
        rows.append([last.get(beginning, -1) for beginning in beginnings])
        last.update(dict.fromkeys(beginnings, number))
    return rows


def test_a_page_was_used_last_by_the_request_that_shares_it() -> None:
    """``abcd`` shares ``ab`` with the second word and ``c`` with the first; its ``d`` is new."""
    uses, first = previous_uses(paths_of(["abc", "ab", "abcd"]))
    assert list(zip(*(column.tolist() for column in uses), strict=True)) == [(1, 0, 0, 2), (2, 1, 0, 2), (2, 0, 2, 3)]
    assert list(zip(*(column.tolist() for column in first), strict=True)) == [(0, 0, 0, 3), (2, 3, 3, 1)]


def test_the_next_use_comes_later_the_deeper_the_page() -> None:
    """Of ``abcd``, ``a`` is used by the next request, ``bc`` by the one after it, ``d`` never."""
    uses = next_uses(paths_of(["abcd", "a", "abc"]))
    assert list(zip(*(column.tolist() for column in uses), strict=True)) == [(0, 1, 0, 1), (0, 2, 1, 3), (1, 2, 0, 1)]


words = st.lists(st.text("ab", max_size=7), max_size=40)


@given(words)
def test_previous_uses_are_those_found_page_by_page(words: list[str]) -> None:
    found = [[-2] * len(word) for word in words]
    paths = paths_of(words)
    uses, first = previous_uses(paths)
    for request, other, begin, end in zip(*(column.tolist() for column in uses), strict=True):
        found[request][begin:end] = [other] * (end - begin)
    for request, depth, start, pages in zip(*(column.tolist() for column in first), strict=True):
        found[request][depth : depth + pages] = [-1] * pages
        ids = [page for begin, length in paths[request] for page in range(begin, begin + length)]
        assert ids[depth : depth + pages] == list(range(start, start + pages))
    assert found == page_by_page(words)


@given(words)
def test_next_uses_are_previous_uses_backwards(words: list[str]) -> None:
    found = [[-1] * len(word) for word in words]
    for request, other, begin, end in zip(*(column.tolist() for column in next_uses(paths_of(words))), strict=True):
        found[request][begin:end] = [other] * (end - begin)
    last = len(words) - 1
    backwards = page_by_page(words[::-1])[::-1]
    assert found == [[last - other if other >= 0 else -1 for other in row] for row in backwards]
    assert all(row == sorted(row, key=lambda other: other if other >= 0 else len(words)) for row in found)
