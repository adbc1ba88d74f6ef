"""Parses the capacities that users write, such as ``40GiB`` or ``6000pages``, and checks them."""

import re
from collections.abc import Mapping

from kvsim.errors import UsageError
from kvsim.numbers import LARGEST, shown
from kvsim.suggest import closest

BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
EXAMPLES = "6000pages, 3000000tokens, 40GiB or unlimited"
SIZE = r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([A-Za-z]*)"
"""A number and its unit."""
MOST_NUMBERED_SLOTS = 10_000_000


def capacity_pages(capacity: object, *, page_tokens: int, page_bytes: int) -> int | None:
    """Return how many whole pages fit into a capacity such as ``40GiB``, ``6000pages``, ``3000000tokens`` or ``0``.

    Returns None for ``unlimited``. Bytes count KV only. 0 may have a unit, for scripts that vary a number. Raises ValueError for
    anything else, and for a capacity above 0 that is smaller than one page.
    """
    text = "" if capacity is None else str(capacity).strip()
    if text == "unlimited":
        return None
    if text == "0":
        return 0
    if text == "auto":
        raise ValueError("auto is the size of a GPU tier, what the weights leave of the memory; give this tier a size")
    if isinstance(capacity, bool) or not (parts := re.fullmatch(SIZE, text)):
        raise ValueError(f"{shown(text)} is not a capacity; use for example {EXAMPLES}")
    number, unit = parts.groups()
    pages = _whole_pages(number, unit, page_tokens, page_bytes)
    if pages > LARGEST:
        raise ValueError(f"{text} is more than 2**63 - 1 pages; use unlimited")
    if pages == 0 and float(number):
        raise ValueError(
            f"{text} is less than one page ({page_tokens} tokens, {page_bytes:,} bytes); use 0 to leave the tier out"
        )
    return pages


def capacity_states(capacity: object, *, state_bytes: int) -> int | None:
    """Return how many whole states fit into a capacity such as ``10GiB``, ``64states`` or ``0``; None for ``unlimited``.

    Raises ValueError for anything else, and for a capacity above 0 that is smaller than one state.
    """
    text = "" if capacity is None else str(capacity).strip()
    if text == "unlimited":
        return None
    if text == "0":
        return 0
    parts = re.fullmatch(SIZE, text)
    if isinstance(capacity, bool) or parts is None or parts[2] not in (*BYTES, "states"):
        raise ValueError(
            f"{shown(text)} is not a capacity for states; use shared, unlimited, 0, or for example 64states or 10GiB"
        )
    number, unit = parts.groups()
    if unit == "states" and "." in number:
        raise ValueError(f"{text} is not a whole number of states")
    states = int(number) if unit == "states" else _whole_pages(number, unit, 1, state_bytes)
    if states > LARGEST:
        raise ValueError(f"{text} is more than 2**63 - 1 states; use unlimited")
    if states == 0 and float(number):
        raise ValueError(f"{text} is less than one state, which takes {state_bytes:,} bytes; use 0 to store no states")
    return states


def bytes_of(text: object, name: str = "workspace") -> int:
    """Return the bytes of a size such as ``2GiB`` or ``0``. Raises ValueError for anything else, with this name."""
    parts = re.fullmatch(SIZE, str(text).strip())
    if isinstance(text, bool) or parts is None or parts[2] not in BYTES and str(text).strip() != "0":
        raise ValueError(f"{name} must be a size such as 2GiB, or 0, not {shown(text)}")
    return _whole_pages(parts[1], parts[2] or "B", 1, 1)


def _whole_pages(number: str, unit: str, page_tokens: int, page_bytes: int) -> int:
    if unit in BYTES:
        whole, _, fraction = number.partition(".")
        scale: int = 10 ** len(fraction)
        return int(whole + fraction) * BYTES[unit] // (scale * page_bytes)
    if unit in ("pages", "tokens") and "." not in number:
        return int(number) // (1 if unit == "pages" else page_tokens)
    if not unit:
        raise ValueError(f"{number} has no unit; use {number}pages, {number}tokens or {number}GiB")
    if unit in ("pages", "tokens"):
        raise ValueError(f"{number}{unit} is not a whole number of {unit}")
    hint = _either(unit) or closest(unit, ("pages", "tokens", *BYTES)) or ";"
    raise ValueError(f"{unit!r} is not a unit of capacity{hint} use pages, tokens or one of {', '.join(BYTES)}")


def _either(unit: str) -> str:
    """Suggest both units that a prefix alone, such as G, may stand for."""
    both = [f"{unit.upper()}iB", f"{unit.upper()}B"]
    return f"; did you mean {' or '.join(both)}?" if all(name in BYTES for name in both) else ""


def check_numbered(capacities: Mapping[str, int | None]) -> None:
    """Raise UsageError if a tier, given by name, has too many pages to number each of its slots in a printed tree."""
    for name, pages in capacities.items():
        if pages is None or pages > MOST_NUMBERED_SLOTS:
            size = "unlimited" if pages is None else f"{pages:,} pages"
            raise UsageError(
                f"print_tree numbers every slot, but tiers.{name}.capacity is {size}: "
                f"set it to at most {MOST_NUMBERED_SLOTS:,} pages"
            )
