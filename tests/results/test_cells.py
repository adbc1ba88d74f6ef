"""Text in CSV files that a spreadsheet would take for a formula is marked as text, and read back as it was."""

import csv
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.results.cells import FORMULAS, as_text, from_text
from kvsim.results.frame import columns_of

FORMULA_LIKE = ['=HYPERLINK("http://x")', "=cmd|' /C calc'!A0", "+a", "-a", "@SUM(1)", "\t=1", "\r=1"]


@pytest.mark.parametrize("text", FORMULA_LIKE)
def test_a_formula_is_text(text: str) -> None:
    assert as_text(text) == f"'{text}" and from_text(as_text(text)) == text


@pytest.mark.parametrize("value", ["chat", "'quoted'", "-1", "+2.5", "-1e-5", -1, 2.5, None, True, "", "a=b"])
def test_other_cells_stay_as_they_are(value: Any) -> None:
    assert as_text(value) is value


@given(st.text(alphabet="'=+-@\t\ra1. ", max_size=6))
def test_text_is_read_back_as_it_was(text: str) -> None:
    assert from_text(as_text(text)) == text
    assert not as_text(text).startswith(FORMULAS) or float(text) == float(text)


def test_columns_are_read_back() -> None:
    file = io.StringIO()
    csv.writer(file).writerows([["type", "n"], *[[as_text(text), at] for at, text in enumerate(FORMULA_LIKE)]])
    found = columns_of(io.StringIO(file.getvalue(), newline=""))
    assert found["type"].tolist() == FORMULA_LIKE and np.array_equal(found["n"], range(len(FORMULA_LIKE)))
