"""What a trace is like."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.trace.base import Trace
from kvsim.trace.statistics import (
    WINDOWS_S,
    Prefix,
    Stretches,
    UserClass,
    WorkingSet,
    reuse_statistics,
    trace_statistics,
    uses_by_page,
)
from tests.workloads import paths_of


def request(index, tokens, *extents, session=-1, arrival_s=None):
    pages = sum(length for _, length in extents)
    return Request(
        index=index,
        arrival_s=2.0 * index if arrival_s is None else arrival_s,
        prompt_tokens=tokens,
        output_tokens=10 * index,
        runs=extents,
        prompt_pages=pages,
        session=session,
    )


REQUESTS = [request(0, 10, (0, 3)), request(1, 10, (0, 3), session=4), request(2, 16, (0, 2), (3, 2)), request(3, 3, (9, 1))]


def test_a_trace_in_numbers():
    """Hits of 10 (a partial page counts its own tokens) and 8 of 39 prompt tokens, 5 of 11 pages."""
    numbers = trace_statistics(Trace(name="tiny", requests=REQUESTS, page_tokens=4, block_tokens=None))
    assert numbers == {
        "requests": 4,
        "sessions": 1,
        "duration_s": 6.0,
        "prompt_tokens_mean": 9.75,
        "prompt_tokens_p50": 10.0,
        "prompt_tokens_p99": pytest.approx(15.82),
        "output_tokens_mean": 15.0,
        "output_tokens_p50": 15.0,
        "output_tokens_p99": pytest.approx(29.7),
        "pages": 11,
        "unique_pages": 6,
        "page_hit_rate": 5 / 11,
        "hit_rate": 18 / 39,
        "runs_per_request": 1.25,
    }


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=25))
def test_stretches_agree_with_a_set(extents):
    stretches, reference = Stretches(), set()
    for start, pages in extents:
        known = stretches.known(start, pages)
        assert known == next((i for i in range(pages) if start + i not in reference), pages)
        new = [page for page in range(start, start + pages) if page not in reference]
        for page in new:
            stretches.add(page, 1)
        reference.update(new)
        assert stretches.known(start, pages) == pages


def trace_of(requests):
    return Trace(name="tiny", requests=requests, page_tokens=4, block_tokens=None)


def test_reuse_in_numbers():
    """Pages 0 1 2 are used at once again, at distances 1 to 3; then 0 1 at 1 and 2; 9 once.

    Five pages are reused: distances 1, 1, 2, 2, 3. The partial page 2 has 2 tokens: 8 + 2 + 8 tokens are hit, 16 of them
    with two pages.
    """
    reuse = reuse_statistics(trace_of(REQUESTS))
    assert reuse.reused_pages == 5
    assert reuse.reuse_distance == {0.1: 1, 0.25: 1, 0.5: 2, 0.75: 2, 0.9: 3, 0.99: 3}
    assert reuse.lru_pages == {0.5: 2, 0.8: 2, 0.9: 3, 0.95: 3}
    assert (reuse.requests_that_share, reuse.shared_tokens) == (2, 18)
    assert reuse.users[:3] == [UserClass(1, 1, 3, 3), UserClass(2, 2, 1, 2), UserClass(3, 4, 2, 6)]
    assert reuse.prefixes == [Prefix(2, 3, 4), Prefix(3, 2, 1)]
    assert reuse.working_sets == []


def test_a_page_counts_once_in_a_window():
    """Minutes: pages 0 1 2 and again 0; then 0 1; nothing for a minute; then 5. On average (3 + 2 + 0 + 1) / 4."""
    arrivals = ((0.0, (0, 3)), (59.0, (0, 1)), (60.0, (0, 2)), (190.0, (5, 1)))
    reuse = reuse_statistics(trace_of([request(i, 16, extent, arrival_s=at) for i, (at, extent) in enumerate(arrivals)]))
    assert reuse.working_sets == [WorkingSet(60.0, 1.5, 3)]


WORDS = st.lists(st.text("ab", max_size=7), min_size=1, max_size=30)


@given(WORDS)
def test_reuse_is_what_counting_page_by_page_finds(words):
    requests = [
        request(i, 4 * len(word) + 1, *extents) for i, (word, extents) in enumerate(zip(words, paths_of(words), strict=True))
    ]
    prompts = [[page for start, length in r.runs for page in range(start, start + length)] for r in requests]
    users = {page: sum(page in prompt for prompt in prompts) for prompt in prompts for page in prompt}
    starts, stops, uses = (column.tolist() for column in uses_by_page(requests))
    found = {page: n for first, last, n in zip(starts, stops, uses, strict=True) for page in range(first, last)}
    assert found == users
    reuse = reuse_statistics(trace_of(requests))
    for fewest, most, unique, pages in reuse.users:
        inside = [n for n in users.values() if fewest <= n and (most is None or n <= most)]
        assert (unique, pages) == (len(inside), sum(inside))
    assert reuse.reused_pages == sum(n - 1 for n in users.values())
    stack, distances = [], []
    for prompt in prompts:
        distances += [stack.index(page) + 1 for page in prompt if page in stack]
        stack = prompt + [page for page in stack if page not in prompt]
    for share, distance in reuse.reuse_distance.items():
        assert sum(d <= distance for d in distances) >= share * len(distances)
        assert not distance or sum(d < distance for d in distances) < share * len(distances)
    beginnings = {(depth, users[page]) for prompt in prompts for depth, page in enumerate(prompt, 1)}
    assert {(prefix.pages, prefix.requests) for prefix in reuse.prefixes} <= beginnings
    assert sum(prefix.reused_pages for prefix in reuse.prefixes) <= reuse.reused_pages


def test_a_trace_of_a_thousand_years_takes_no_more_memory_than_its_requests():
    far = 3.2e10
    requests = [request(index, 5, (index, 1), arrival_s=at) for index, at in enumerate((0.0, 1.0, far))]
    sets = reuse_statistics(Trace(name="long", requests=requests, page_tokens=4, block_tokens=None)).working_sets
    assert [found.most_pages for found in sets] == [2] * len(WINDOWS_S)
    assert [found.mean_pages for found in sets] == [pytest.approx(3 / (far // found.window_s + 1)) for found in sets]
