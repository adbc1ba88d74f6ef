"""Suggestions for misspelled names."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` if one of ``names`` is close to ``name``, else an empty string."""
    matches = get_close_matches(name, list(names), n=1, cutoff=0.7)
    return f"; did you mean {matches[0]}?" if matches else ""
