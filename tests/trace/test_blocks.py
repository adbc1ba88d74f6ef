"""Trace blocks become pages of any fitting size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import UsageError
from kvsim.pages.extents import every_last
from kvsim.trace.blocks import BlockPages
from tests.workloads import pages_of


def test_a_block_becomes_consecutive_pages_cut_where_the_prompt_ends():
    pages = BlockPages(8, 2, partial_tail=False)
    assert pages.lookup([(0, 2)], 13) == (((0, 6),), 6)
    assert pages.lookup([(0, 1), (7, 1)], 16) == (((0, 4), (8, 4)), 8)


def test_blocks_that_no_page_needs_get_no_id():
    pages = BlockPages(8, 8, partial_tail=False)
    assert pages.lookup([(0, 1), (5, 1)], 15) == (((0, 1),), 1)
    assert pages.lookup([(0, 1), (6, 1)], 16) == (((0, 2),), 2)


def test_names_of_ids_that_lie_a_page_apart_are_consecutive():
    (start, pages), (lone, one) = every_last(((10, 12), (50, 2)), 4)
    assert (pages, one) == (3, 1)
    assert every_last(((10, 4),), 4) == [(start, 1)]
    assert every_last(((18, 4),), 4) == [(start + 2, 1)]
    assert lone not in range(start, start + pages)


@pytest.mark.parametrize(("block_tokens", "page_tokens"), [(512, 48), (64, 96), (512, 0), (64, -1)])
def test_a_page_size_that_does_not_fit_the_blocks_is_refused(block_tokens, page_tokens):
    with pytest.raises(UsageError, match=f"page_tokens={page_tokens} does not fit the trace's blocks of {block_tokens} tokens"):
        BlockPages(block_tokens, page_tokens, partial_tail=False)


def page_names(blocks, tokens, block_tokens, page_tokens, partial_tail):
    """What each page stands for: the blocks up to its end, and where it ends."""
    ends = [*range(page_tokens, tokens + 1, page_tokens)]
    if partial_tail and tokens % page_tokens:
        ends.append(-(-tokens // page_tokens) * page_tokens)
    names = []
    for end in ends:
        covered = min(-(-end // block_tokens), len(blocks))
        names.append((tuple(blocks[:covered]), end if page_tokens < block_tokens else 0))
    return names


stretches = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(stretches, st.integers(0, 3)), max_size=10),
    st.sampled_from([(4, 1), (4, 2), (4, 4), (1, 4), (2, 6), (1, 1)]),
    st.booleans(),
)
def test_pages_are_equal_exactly_where_prompts_are_equal_up_to_the_page_end(prompts, sizes, partial_tail):
    block_tokens, page_tokens = sizes
    pages = BlockPages(block_tokens, page_tokens, partial_tail=partial_tail)
    named = {}
    for stretch, missing in prompts:
        blocks = pages_of(stretch)
        tokens = len(blocks) * block_tokens - missing % block_tokens
        extents, count = pages.lookup(stretch, tokens)
        names = page_names(blocks, tokens, block_tokens, page_tokens, partial_tail)
        assert len(pages_of(extents)) == count == len(names)
        for page, name in zip(pages_of(extents), names, strict=True):
            assert named.setdefault(name, page) == page
    assert len(set(named.values())) == len(named)
