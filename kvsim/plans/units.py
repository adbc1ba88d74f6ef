"""Numbers that users write with a unit, such as ``7GB/s`` and ``200ms``, for settings whose names say what they are in."""

import re
from fractions import Fraction
from typing import Any

from kvsim.errors import UsageError
from kvsim.plans.capacity import BYTES
from kvsim.suggest import closest

SECONDS = {
    "ns": Fraction(1, 10**9), "us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60),
    "h": Fraction(3600),
}  # fmt: skip
RATES = {f"{unit}/s": Fraction(n_bytes) for unit, n_bytes in BYTES.items()}
SIZES = {unit: Fraction(n_bytes) for unit, n_bytes in BYTES.items()}
KINDS: tuple[tuple[str, str, dict[str, Fraction], str], ...] = (
    ("bytes_per_s", "rate", RATES, "7GB/s"),
    ("per_s", "", {}, ""),
    ("_s", "time", SECONDS, "200ms"),
    ("_bytes", "size", SIZES, "80GiB"),
)
"""By the end of a setting's name, the first that fits: what it is, its units, and an example."""
BEGINS = re.compile(r"[-+]?\.?[0-9]")
QUANTITY = re.compile(r"([-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?) ?([A-Za-z][A-Za-z/]*)")
"""A number, as in YAML, and a unit."""


def with_numbers(node: Any, key: str = "") -> Any:
    """Return a configuration in which quantities with a unit are numbers, in the unit of their setting's name.

    Raises UsageError.
    """
    if isinstance(node, dict):
        return {name: with_numbers(value, f"{key}.{name}" if key else str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [with_numbers(value, key) for value in node]
    return quantity(node, key) if isinstance(node, str) and BEGINS.match(node) else node


def quantity(text: str, key: str) -> Any:
    """Return the number that a text is in the unit of its setting; a text that is none of a quantity stays as it is."""
    kind = next((kind for kind in KINDS if key.endswith(kind[0])), None)
    if kind is None or not kind[2]:
        return text
    _, what, units, example = kind
    parts = QUANTITY.fullmatch(text.strip())
    if parts is None:
        return text
    number, unit = parts.groups()
    if unit not in units:
        hint = closest(unit, units) or ";"
        raise UsageError(f"{key}: {text:.40} is not a {what}{hint} use a number, or one of {', '.join(units)}, such as {example}")
    value = Fraction(number) * units[unit]
    return int(value) if value.denominator == 1 else float(value)
