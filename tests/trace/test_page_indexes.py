"""Page ids for keys and for foreign ids."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvsim.pages.extents import Extent
from kvsim.trace.chain_index import ChainIndex
from kvsim.trace.page_hasher import PageHasher
from kvsim.trace.page_index import PageIndex
from tests.workloads import pages_of

# --- PageIndex ---


prompts = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


def assert_normalised(extents):
    assert all(pages > 0 for _, pages in extents)
    assert all(left[0] + left[1] != right[0] for left, right in pairwise(extents))


@given(prompts)
def test_a_key_index_agrees_with_a_dictionary_of_pages(token_lists):
    index, reference = PageIndex(), {}
    for tokens in token_lists:
        keys = PageHasher(1).keys(tokens)
        extents = index.lookup(keys)
        assert pages_of(extents) == [reference.setdefault(key, len(reference)) for key in keys]
        assert_normalised(extents)
        assert index.pages == len(reference)


# --- ChainIndex ---


def test_an_id_behind_another_page_is_another_page():
    index = ChainIndex()
    assert index.lookup([(100, 3)]) == ((0, 3),)
    assert index.lookup([(101, 2)]) == ((3, 2),)
    assert index.lookup([(100, 1), (102, 1), (101, 1)]) == ((0, 1), (5, 2))
    assert index.lookup([(100, 4)]) == ((0, 3), (7, 1))


def test_a_path_that_grows_stays_one_extent_while_nothing_comes_between():
    index = ChainIndex()
    assert index.lookup([(9, 2)]) == ((0, 2),)
    assert index.lookup([(9, 5)]) == ((0, 5),)
    assert index.lookup([(40, 1)]) == ((5, 1),)
    assert index.lookup([(9, 6)]) == ((0, 5), (6, 1))


def test_scopes_share_nothing():
    index = ChainIndex()
    assert index.lookup([(0, 2)], scope=0) == ((0, 2),)
    assert index.lookup([(0, 2)], scope=1) == ((2, 2),)
    assert index.lookup([(0, 2)], scope=0) == ((0, 2),)


def page_by_page(reference, sequence, scope):
    parent = -1 - scope
    path = []
    for foreign in sequence:
        parent = reference.setdefault((parent, foreign), len(reference))
        path.append(parent)
    return path


def cut_into_extents(sequence, cuts):
    """Extents of a sequence, cut at some places where they need not be."""
    extents: list[Extent] = []
    for position, foreign in enumerate(sequence):
        if extents and sum(extents[-1]) == foreign and not cuts >> position & 1:
            extents[-1] = (extents[-1][0], extents[-1][1] + 1)
        else:
            extents.append((foreign, 1))
    return extents


stretches = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=6)


@given(st.lists(st.tuples(stretches, st.integers(0, 2), st.integers(0, 255)), max_size=15))
def test_a_chain_index_agrees_with_a_dictionary_of_parent_and_id(sequences):
    index, reference = ChainIndex(), {}
    for stretch, scope, cuts in sequences:
        sequence = pages_of(stretch)
        known = len(reference)
        path = page_by_page(reference, sequence, scope)
        extents = index.lookup(cut_into_extents(sequence, cuts), scope)
        assert pages_of(extents) == path
        assert_normalised(extents)
        assert index.pages == len(reference)
        assert [page for page in path if page >= known] == list(range(known, len(reference)))


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from((0, 3, 90, 2**62 - 2, 2**64, 2**127)), st.integers(1, 5)), max_size=4), max_size=12
    )
)
def test_ids_in_any_order_and_of_any_size_agree_with_a_dictionary_of_pages(sequences):
    index, reference = ChainIndex(), {}
    for extents in sequences:
        found = index.lookup(extents)
        assert_normalised(found)
        pages = [first + at for first, length in extents for at in range(length)]
        assert pages_of(found) == page_by_page(reference, pages, 0)


def test_new_ids_that_ascend_take_arrays_alone():
    index = ChainIndex()
    for at in range(0, 4_000, 4):
        assert index.lookup([(0, 2), (10 + at, 3)]) == ((0, 2), (2 + 3 * (at // 4), 3)) or at == 0
    assert not index._branches and len(index._starts) == 1_001
    assert index.lookup([(0, 2), (10, 3)]) == ((0, 5),)
