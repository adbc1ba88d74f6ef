"""Rows of numbers by tier, in one array."""

import numpy as np
import pytest

from kvsim.engine.columns import COLUMNS
from kvsim.engine.tier_rows import TierRows

HITS = next(column for column in COLUMNS if column.name == "hit_pages")


def filled(rows: dict[int, tuple[int, ...]], requests: int = 4) -> TierRows:
    known = TierRows(requests)
    for row, numbers in rows.items():
        known[row] = numbers
    return known


def test_a_row_is_what_was_set_last() -> None:
    known = filled({2: (1, 2, 3), 0: (4, 5, 6)})
    known[2] = (7, 8, 9)
    assert [known[row] for row in range(len(known))] == [(4, 5, 6), (0, 0, 0), (7, 8, 9), (0, 0, 0)]


def test_what_a_row_leaves_out_is_missing() -> None:
    known = filled({1: (1, 2)})
    known[3] = (3, 4, 5)
    known[3] = (6,)
    assert known.array(3).tolist() == [[0, 0, 0], [1, 2, 0], [0, 0, 0], [6, 0, 0]]


@pytest.mark.parametrize(("rows", "expected"), [({}, [[0, 0], [0, 0]]), ({1: (3,)}, [[0, 0], [3, 0]])])
def test_tiers_without_a_number_have_what_is_missing(rows: dict[int, tuple[int, ...]], expected: list[list[int]]) -> None:
    found = HITS.array(filled(rows, 2), requests=2, tiers=2)
    assert found.tolist() == expected
    assert found.dtype == np.int64


def test_a_column_takes_no_more_than_its_numbers() -> None:
    """What was recorded is not copied when the run ends."""
    known = HITS.blank(1000)
    known[999] = (1, 2, 3)
    found = HITS.array(known, requests=1000, tiers=3)
    assert found.base is not None
    assert np.shares_memory(found, known.array(3))
