"""Numbers as text: what rounding must not hide."""

import pytest

from kvsim.results.rates import hundredths, percent


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "-"), (0.0, "0.00%"), (1.0, "100.00%"), (0.99996, "99.99%"), (0.99994, "99.99%"), (1 - 1e-12, "100.00%"),
        (0.00004, "<0.01%"), (0.00006, "0.01%"), (1e-12, "0.00%"), (0.12345, "12.35%"), (1.2, "120.00%"),
    ],
)  # fmt: skip
def test_less_than_all_is_not_100_percent_and_more_than_nothing_not_0(share: float | None, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(("number", "text"), [(0.0, "0.00"), (0.0042, "0.00420"), (0.42, "0.42"), (1234.5, "1,234.50")])
def test_two_decimals_do_not_hide_a_small_number(number: float, text: str) -> None:
    assert hundredths(number) == text
