"""What a trace is like."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.trace.base import Trace
from kvsim.trace.statistics import PUBLISHED, Stretches, trace_statistics, unlimited_hit_pages


def request(index, tokens, *runs, session=-1):
    pages = sum(length for _, length in runs)
    return Request(
        index=index,
        arrival_s=2.0 * index,
        prompt_tokens=tokens,
        output_tokens=10 * index,
        runs=runs,
        prompt_pages=pages,
        session=session,
    )


REQUESTS = [request(0, 10, (0, 3)), request(1, 10, (0, 3), session=4), request(2, 16, (0, 2), (3, 2)), request(3, 3, (9, 1))]


def test_an_unlimited_cache_hits_what_an_earlier_prompt_began_with():
    assert unlimited_hit_pages(REQUESTS) == [0, 3, 2, 0]


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


def test_published_numbers_have_names_that_ours_have():
    ours = trace_statistics(Trace(name="tiny", requests=REQUESTS, page_tokens=4, block_tokens=None))
    assert all(set(numbers) <= set(ours) for numbers in PUBLISHED.values())


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=25))
def test_stretches_agree_with_a_set(runs):
    stretches, reference = Stretches(), set()
    for start, pages in runs:
        known = stretches.known(start, pages)
        assert known == next((i for i in range(pages) if start + i not in reference), pages)
        new = [page for page in range(start, start + pages) if page not in reference]
        for page in new:
            stretches.add(page, 1)
        reference.update(new)
        assert stretches.known(start, pages) == pages
