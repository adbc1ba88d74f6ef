"""Which subtree a request belongs to, and samples of whole subtrees."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.trace.subtrees import COMMON_SHARE, FEWEST_USERS, Subtrees
from tests.workloads import make_requests, pages_of

FAMILIES = [f"s{letter}{turn}" for turn in "xyz" for letter in "abcd"]
"""Twelve prompts below one system prompt; four families of three."""


def slow_subtrees(requests: Sequence[Request]) -> tuple[list[frozenset[int]], int]:
    """The requests of each subtree, as a set for each request, and the number of common pages, page by page."""
    paths = [pages_of(request.runs) for request in requests]
    users = {page: sum(page in path for path in paths) for path in paths for page in path}
    common = {page for page, count in users.items() if count >= FEWEST_USERS and count > COMMON_SHARE * len(requests)}
    own = [[page for page in path if page not in common][:1] for path in paths]
    same = [
        frozenset(other for other, first in enumerate(own) if first == mine) if mine else frozenset([at])
        for at, mine in enumerate(own)
    ]
    return same, len(common)


def test_subtrees_begin_below_the_pages_that_many_requests_share() -> None:
    subtrees = Subtrees(make_requests(FAMILIES))
    assert subtrees.common_pages == 1, "the system prompt's"
    assert [subtrees.of_request[at] for at in range(4)] * 3 == subtrees.of_request.tolist()
    assert len(set(subtrees.of_request[:4].tolist())) == 4
    assert subtrees.pages.tolist() == [4] * 4, "a family has its own page and three turns"


def test_a_prompt_of_common_pages_only_is_a_subtree_by_itself() -> None:
    subtrees = Subtrees(make_requests([*FAMILIES, "s", "s"]))
    assert len(subtrees.keys) == 6
    assert sorted(subtrees.pages.tolist()) == [0, 0, 4, 4, 4, 4]


def test_a_page_of_few_requests_is_not_common() -> None:
    assert Subtrees(make_requests(FAMILIES[: FEWEST_USERS - 1])).common_pages == 0


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=40))
def test_subtrees_agree_with_those_found_page_by_page(words: list[str]) -> None:
    requests = make_requests(words)
    subtrees, (same, common) = Subtrees(requests), slow_subtrees(requests)
    assert subtrees.common_pages == common
    numbers = subtrees.of_request.tolist()
    assert [frozenset(at for at, number in enumerate(numbers) if number == mine) for mine in numbers] == same
    all_pages = {page for request in requests for page in pages_of(request.runs)}
    assert subtrees.pages.sum() == len(all_pages) - common


@pytest.mark.parametrize(("share", "number"), [(1.0, 1), (0.25, 4), (0.1, 3)])
def test_samples_have_no_subtree_in_common(share: float, number: int) -> None:
    subtrees = Subtrees(make_requests([f"{chr(200 + at)}" for at in range(500)]))
    drawn = np.concatenate(list(subtrees.draws(share, number, seed=7)))
    assert len(drawn) == len(set(drawn.tolist()))
    assert len(drawn) == 500 if share * number == 1 else 100 < len(drawn) < 200


def test_over_all_seeds_a_subtree_is_in_each_sample_as_often_as_its_share_says() -> None:
    """2,000 seeds: the standard deviation of a count of 400 is 18."""
    subtrees = Subtrees(make_requests(FAMILIES))
    counts = np.zeros((2, len(subtrees.keys)))
    for seed in range(2_000):
        for place, drawn in enumerate(subtrees.draws(0.2, 2, seed=seed)):
            counts[place, drawn] += 1
    assert np.abs(counts - 400).max() < 4 * 18


def test_requests_of_a_sample_are_in_order_of_arrival() -> None:
    subtrees = Subtrees(make_requests(FAMILIES))
    chosen = subtrees.requests_in(subtrees.of_request[[1, 3]])
    assert chosen.tolist() == [1, 3, 5, 7, 9, 11]
