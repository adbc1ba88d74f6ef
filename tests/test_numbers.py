"""Declarations of numbers: what holds, and the one line for what does not."""

import re
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvsim.numbers import LARGEST, MOST, SECONDS, SMALLEST, Number, Real, Whole, check_number, check_settings, refusal, shown


@pytest.mark.parametrize("value", [0, 1, LARGEST, np.int64(5)])
def test_whole_numbers_hold(value: Any) -> None:
    assert Whole().holds(value)


@pytest.mark.parametrize(
    "value", [-1, LARGEST + 1, 10**30, 1.0, nan, inf, True, False, "1", None, [1], np.int64(-1), np.bool_(True)]
)
def test_what_is_not_a_whole_number_within_64_bits_does_not_hold(value: Any) -> None:
    assert not Whole().holds(value)


@pytest.mark.parametrize("value", [-1, 0, 0.5, MOST, -MOST, np.float32(0.5), np.int64(3)])
def test_real_numbers_hold(value: Any) -> None:
    assert Real().holds(value)


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e51, -1e51, 10**400, True, "1", None, np.float64(nan)])
def test_what_is_not_a_finite_number_does_not_hold(value: Any) -> None:
    assert not Real().holds(value)
    assert not Real(least=-MOST).holds(value)


def test_what_is_divided_by_is_not_so_small_that_the_result_is_infinite() -> None:
    rate = Real(above=0)
    assert rate.holds(SMALLEST) and not rate.holds(SMALLEST / 2) and not rate.holds(5e-324)
    assert refusal("rate", rate, 1e-300) == "rate must be at least 1e-50, not 1e-300"
    assert refusal("rate", rate, 0) == "rate must be above 0, not 0"
    assert Real(least=0).holds(1e-300) and SECONDS.holds(1e-300)


def test_bounds_are_included_or_not_as_declared() -> None:
    assert [Whole(1, 3).holds(value) for value in range(5)] == [False, True, True, True, False]
    half_open = Real(above=0, most=1)
    assert [half_open.holds(value) for value in (0, 1e-9, 1, 1.0001)] == [False, True, True, False]
    other = Real(least=0, below=1)
    assert [other.holds(value) for value in (-1e-9, 0, 0.9999, 1)] == [False, True, True, False]
    assert SECONDS.holds(1e12) and not SECONDS.holds(1.1e12)


@pytest.mark.parametrize(
    ("number", "value", "message"),
    [
        (Whole(), -1, "n must be 0 or more, not -1"),
        (Whole(1), 0, "n must be at least 1, not 0"),
        (Whole(1, 3), 4, "n must be from 1 to 3, not 4"),
        (Whole(1), 2**63, "n must be from 1 to 2**63 - 1, not 9223372036854775808"),
        (Whole(1), nan, "n must be a whole number of at least 1, not nan"),
        (Whole(), True, "n must be a whole number of at least 0, not True"),
        (Whole(1, 3), "2", "n must be a whole number from 1 to 3, not '2'"),
        (Real(above=0), 0.0, "n must be above 0, not 0.0"),
        (Real(least=0), -1, "n must be 0 or more, not -1"),
        (Real(least=1.5), 1, "n must be at least 1.5, not 1"),
        (Real(least=0, below=1), 1, "n must be at least 0 and below 1, not 1"),
        (Real(above=0, most=1), nan, "n must be a finite number above 0 and at most 1, not nan"),
        (Real(above=0), 1e51, "n must be above 0 and at most 1e+50, not 1e+51"),
        (Real(), -1e51, "n must be at least -1e+50, not -1e+51"),
        (Real(), inf, "n must be a finite number, not inf"),
        (Real(least=0), -inf, "n must be a finite number of at least 0, not -inf"),
        (Real(least=0), "1", "n must be a number of at least 0, not '1'"),
        (Real(), None, "n must be a number, not None"),
    ],
)
def test_a_refusal_says_what_was_expected(number: Number, value: Any, message: str) -> None:
    assert not number.holds(value)
    assert refusal("n", number, value) == message
    with pytest.raises(ValueError, match=f"^{re.escape(message)}; null sets none$"):
        check_number("n", number, value, hint="null sets none")


def test_long_values_are_shortened() -> None:
    assert shown(10**5000) == "10**5000 or more" and shown(-(10**5000)) == "-10**5000 or more"
    assert shown("x" * 50) == f"'{'x' * 39}..."


class Settings(NamedTuple):
    queues: int | None
    window_s: float


def test_settings_are_checked_by_name_and_null_only_where_it_is_allowed() -> None:
    check_settings(Settings(None, 3.0), Whole(1), "queues", or_null=True)
    check_settings(Settings(2, 3.0), Real(above=0), "queues", "window_s")
    with pytest.raises(ValueError, match=r"^queues must be a whole number of at least 1, not None$"):
        check_settings(Settings(None, 3.0), Whole(1), "queues")
    with pytest.raises(ValueError, match=r"^window_s must be a finite number above 0, not nan$"):
        check_settings(Settings(2, nan), Real(above=0), "queues", "window_s")
