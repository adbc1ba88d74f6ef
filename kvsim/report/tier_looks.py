"""How tiers look in pictures and on a terminal: one table, by name."""

from typing import NamedTuple


class Look(NamedTuple):
    """The colour of a tier in pictures; on a terminal its mark, what replaces that in ASCII, and the mark's colour."""

    colour: str
    mark: str
    ascii_mark: str
    style: str


LOOKS = {
    "gpu": Look("#3d8fd1", "█", "#", "blue"),
    "cpu": Look("#e69f00", "▓", "=", "yellow"),
    "disk": Look("#0a9e74", "▒", "-", "green"),
    "remote": Look("#8c7ae6", "░", "+", "magenta"),
    "computed": Look("", "·", ".", "dim"),
}
"""Known tiers, and what no tier had."""
OTHERS = (Look("#cc79a7", "░", "+", "magenta"), Look("#8c7ae6", "▚", "*", "cyan"), Look("#a0785a", "▞", "o", "red"))
"""For tiers of other names."""


def look_of(tier: str) -> Look:
    """Return how a tier looks: the same in every run, whatever other tiers there are."""
    return LOOKS[tier] if tier in LOOKS else OTHERS[sum(tier.encode()) % len(OTHERS)]
