"""What is recorded of each request takes as few bytes as hold it."""

import pytest

from kvsim.engine.columns import COLUMNS

NARROW = {"retractions": (4, 2**31 - 1), "engine": (4, 2**31 - 1), "decoder": (4, 2**31 - 1), "status": (1, 1)}
ONE_BY_ONE = [column for column in COLUMNS if column.is_recorded and not column.is_by_tier]


@pytest.mark.parametrize("column", ONE_BY_ONE, ids=lambda column: column.name)
def test_a_column_keeps_its_numbers_in_its_bytes(column):
    n_bytes, most = NARROW.get(column.name, (8, 0.1))
    rows = column.blank(3)
    rows[1] = most
    found = column.array(rows, 3, 1)
    assert found.itemsize == n_bytes and found[1] == most
    assert str(found[0]) == str(found[2]) == str(column.missing)
    assert column.array(None, 3, 1).dtype == column.array([most] * 3, 3, 1).dtype == found.dtype
