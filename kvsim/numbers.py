"""What a number must be: whole or not, finite, within bounds. Settings and fields of traces declare theirs here.

A declaration says whether a value holds and, if it does not, what was expected. The unit is part of a number's name::

    check_settings(self, Whole(1), "limit", or_null=True, hint="null reads all requests")
    check_settings(self, Real(above=0, most=1), "attainment")
"""

from collections.abc import Mapping
from math import inf
from numbers import Integral
from numbers import Real as AnyReal
from typing import Any, NamedTuple, TypeGuard

LARGEST = 2**63 - 1
"""The largest whole number: what 64 bits hold."""
MOST = 1e50
"""The largest real number; ``-MOST`` is the smallest. The product of six is finite still, so an extreme setting has an extreme
result, but no infinite one."""
SMALLEST = 1 / MOST
"""The smallest number that must be above 0: what is divided by it is as finite as what is multiplied by ``MOST``."""
MOST_SECONDS = 1e12
"""The longest time and the latest moment: 30,000 years, at which a 64-bit float still tells 0.1 ms."""
LONGEST_TEXT = 40
"""Characters of a wrong value in a message."""


class Whole(NamedTuple):
    """A whole number from ``least`` to ``most``, both included."""

    least: int = 0
    most: int = LARGEST

    def holds(self, value: Any) -> TypeGuard[int]:
        """Whether the value is such a number. True, 1.0 and "1" are not."""
        return (type(value) is int or _is_a(Integral, value)) and self.least <= value <= self.most

    def expected(self, value: Any) -> str:
        """Say what a wrong value must be: ``at least 1``, or ``a whole number of at least 1`` if it is not whole."""
        is_whole = _is_a(Integral, value)
        if self.least < -LARGEST and self.most == LARGEST:
            return "within 64 bits" if is_whole else "a whole number"
        lower = f"at least {self.least}"
        if self.most < LARGEST or is_whole and value > self.most:
            bounds = f"from {self.least} to {'2**63 - 1' if self.most == LARGEST else self.most}"
        else:
            bounds = "0 or more" if is_whole and self.least == 0 else lower
        return bounds if is_whole else f"a whole number {'of ' * (bounds == lower)}{bounds}"


class Real(NamedTuple):
    """A finite number, whole or not: at least ``least`` or above ``above``, and at most ``most`` or below ``below``."""

    least: float = -MOST
    most: float = MOST
    above: float = -inf
    below: float = inf

    def holds(self, value: Any) -> TypeGuard[float]:
        """Whether the value is such a number. NaN, infinities, True and "1" are not."""
        if not _is_a(AnyReal, value):
            return False
        number = value if isinstance(value, int) else float(value)
        above = self.above < number if self.above else number >= SMALLEST
        return above and self.least <= number <= self.most and number < self.below

    def expected(self, value: Any) -> str:
        """Say what a wrong value must be: ``above 0``, or ``a finite number above 0`` if it is none.

        An upper limit that is there only to keep results finite is named only to those who exceed it.
        """
        is_number = _is_a(AnyReal, value)
        is_finite = is_number and -inf < value < inf
        parts = []
        if self.above == 0 and is_finite and 0 < value < SMALLEST:
            parts.append(f"at least {SMALLEST:g}")
        elif self.above > -inf:
            parts.append(f"above {self.above:g}")
        elif self.least > -MOST or is_finite and value < -MOST:
            parts.append(f"at least {self.least:g}")
        if self.below < inf:
            parts.append(f"below {self.below:g}")
        elif self.most < MOST_SECONDS or is_finite and value > self.most:
            parts.append(f"at most {self.most:g}")
        is_closed = len(parts) == 2 and self.above == -inf and self.below == inf
        bounds = f"from {self.least:g} to {self.most:g}" if is_closed else " and ".join(parts)
        if is_finite:
            return "0 or more" if bounds == "at least 0" else bounds
        kind = "a finite number" if is_number else "a number"
        return f"{kind} {'of ' * bounds.startswith('at')}{bounds}".rstrip()


Number = Whole | Real

SECONDS = Real(least=0, most=MOST_SECONDS)
"""A time in seconds; 0 is allowed."""


def refusal(name: str, number: Number, value: object, hint: str = "") -> str:
    """Return the line for a value that does not hold: what it must be, what it is, and the hint."""
    return f"{name} must be {number.expected(value)}, not {shown(value)}{f'; {hint}' if hint else ''}"


def check_number(name: str, number: Number, value: object, *, or_null: bool = False, hint: str = "") -> None:
    """Raise ValueError, with one line that begins with ``name``, unless the value holds, or is None and may be."""
    if not (number.holds(value) or or_null and value is None):
        raise ValueError(refusal(name, number, value, hint))


def check_settings(settings: object, number: Number, *names: str, or_null: bool = False, hint: str = "") -> None:
    """Raise ValueError for the first of the named attributes of ``settings`` that does not hold, as ``check_number`` does.

    For ``__post_init__`` of a class of settings; ``construct`` adds the class's place in the configuration to the message.
    """
    for name in names:
        check_number(name, number, getattr(settings, name), or_null=or_null, hint=hint)


def check_finite(key: str, value: object) -> None:
    """Raise ValueError for the first number in a setting, or in its lists and mappings, that is not finite, with its full key.

    What classes declare is narrower; this is for what no class has looked at.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_finite(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            check_finite(f"{key}[{at}]", item)
    elif _is_a(AnyReal, value):
        check_number(key, Real(), value)


def shown(value: object) -> str:
    """Format a wrong value in a message; very long ones are shortened."""
    if isinstance(value, int) and abs(value) >= 10**LONGEST_TEXT:
        return f"{'-' * (value < 0)}10**{int(value.bit_length() * 0.30103)} or more"
    text = str(value) if isinstance(value, int | float | None) else repr(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
