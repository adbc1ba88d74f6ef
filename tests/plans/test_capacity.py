"""Capacities as people write them."""

import re

import pytest

from kvsim.plans.capacity import capacity_pages


def pages(capacity: object) -> int | None:
    return capacity_pages(capacity, page_tokens=16, page_bytes=1000)


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        ("6000pages", 6000),
        ("6000 pages", 6000),
        ("160tokens", 10),
        ("175tokens", 10),
        ("2500B", 2),
        ("1MB", 1000),
        ("1MiB", 1048),
        ("1.5MB", 1500),
        ("0.1TB", 100_000_000),
        ("unlimited", None),
        ("0", 0),
        ("0pages", 0),
        ("0GiB", 0),
        (0, 0),
    ],
)
def test_capacity_is_in_whole_pages(capacity: object, expected: int | None) -> None:
    assert pages(capacity) == expected


@pytest.mark.parametrize(
    ("capacity", "problem"),
    [
        (40, "40 has no unit; use 40pages, 40tokens or 40GiB"),
        ("40", "40 has no unit"),
        ("40Gib", "'Gib' is not a unit of capacity; did you mean GiB? use pages, tokens or one of B, KB"),
        ("-1pages", "'-1pages' is not a capacity; use for example 6000pages, 3000000tokens, 40GiB or unlimited"),
        ("1.5pages", "1.5pages is not a whole number of pages"),
        ("999B", "999B is less than one page (16 tokens, 1,000 bytes); use 0"),
        ("15tokens", "15tokens is less than one page"),
        ("0.0001pages", "0.0001pages is not a whole number of pages"),
        ("", "'' is not a capacity"),
        (None, "'' is not a capacity"),
        (True, "'True' is not a capacity"),
        ("nan", "'nan' is not a capacity"),
    ],
)
def test_a_bad_capacity_says_what_to_write(capacity: object, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        pages(capacity)
