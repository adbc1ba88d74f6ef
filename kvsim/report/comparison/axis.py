"""The setting along which runs are drawn and tabulated: a tier's capacity, or another number that was swept."""

import re
from collections.abc import Sequence

from kvsim.report.comparison.compare import Comparison
from kvsim.results.measures import tier_bytes

NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")
CAPACITY = ".capacity"


def axis_key(comparison: Comparison) -> str | None:
    """Return the swept setting with the most values among capacities, else among other numbers; None if there is none."""
    capacities = [key for key in comparison.keys if key.startswith("tiers.") and key.endswith(CAPACITY)]
    for keys in (capacities, [key for key in comparison.keys if key not in (*capacities, "seed")]):
        known = [key for key in keys if len({value for value in axis_values(comparison, key) if value is not None}) > 1]
        if known:
            return max(known, key=lambda key: len(set(axis_values(comparison, key))))
    return None


def axis_values(comparison: Comparison, key: str) -> list[float | None]:
    """Return each case's value of a setting as a number: bytes of a capacity; None where it is no number, or unlimited."""
    if is_capacity(key):
        return [tier_bytes(case.first, key.split(".")[1]) for case in comparison.cases]
    return [number(case.settings.get(key)) for case in comparison.cases]


def is_capacity(key: str) -> bool:
    """Return whether a setting is the capacity of a tier."""
    return key.startswith("tiers.") and key.endswith(CAPACITY)


def number(text: str | None) -> float | None:
    """Return the number that a text is; None for other texts."""
    return float(text) if text is not None and NUMBER.fullmatch(text) else None


def column_key(comparison: Comparison) -> str:
    """Return the setting for the columns of a pivot table: that of the axis, else that with the fewest values."""
    if key := axis_key(comparison):
        return key
    return min(reversed(comparison.keys), key=lambda key: len({case.settings.get(key) for case in comparison.cases}))


def in_order(comparison: Comparison, key: str) -> list[str]:
    """Return the values of a setting: by size where all are numbers or capacities, else as they come."""
    values: dict[str, float | None] = {}
    for case, value in zip(comparison.cases, axis_values(comparison, key), strict=True):
        values.setdefault(case.settings.get(key, ""), value)
    sizes: Sequence[float | None] = list(values.values())
    if is_capacity(key):
        return sorted(values, key=lambda text: (values[text] is None, values[text] or 0.0))
    return list(values) if None in sizes else sorted(values, key=lambda text: values[text] or 0.0)
