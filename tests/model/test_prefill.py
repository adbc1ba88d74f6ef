"""Pairs of query and key, against a count query by query."""

from hypothesis import given
from hypothesis import strategies as st

from kvsim.model.prefill import PrefillFlops, attention_pairs


@given(tokens=st.integers(0, 60), start=st.integers(0, 60), window=st.integers(1, 40), windowed=st.integers(0, 4))
def test_pairs_are_those_of_each_query_in_each_layer(tokens, start, window, windowed):
    keys = [start + number + 1 for number in range(tokens)]
    expected = sum((4 - windowed) * count + windowed * min(window, count) for count in keys) / 4
    assert attention_pairs(tokens, start, windowed / 4, window) == expected


def test_flops_are_those_of_tokens_pairs_and_the_prefix():
    assert PrefillFlops(10.0, 3.0, 7.0, 0.0, 0.0).of(2, 5) == 2 * 10 + (6 + 7) * 3 + 5 * 7
