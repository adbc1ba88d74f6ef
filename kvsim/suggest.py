"""Suggestions for misspelled names."""

import re
from collections.abc import Iterable

MOST_SUGGESTED = 3
CHOICES = re.compile(r"must be (?:one of )?(?P<choices>[\w.-]+(?:(?:, | or )[\w.-]+)+), not '?(?P<given>[\w.-]+)'?$")


def closest(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` if some of ``names`` are close to ``name``, else an empty string."""
    found = nearest(name, names)
    listed = " or ".join(part for part in (", ".join(found[:-1]), *found[-1:]) if part)
    return f"; did you mean {listed}?" if found else ""


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that are equally close to a misspelled one, at most three.

    A name is close if few edits lead to it: one up to four letters, two up to eight, above that a third of the letters.
    Failing that, names that begin with ``name`` or contain it are close.
    """
    names = list(dict.fromkeys(names))
    letters = _letters(name)
    allowed = max(min(len(letters) - 1, 1 if len(letters) <= 4 else 2), len(letters) // 3 if len(letters) > 8 else 0)
    similar = [other for other in names if abs(len(_letters(other)) - len(letters)) <= allowed]
    edits = {other: distance(letters, _letters(other)) for other in similar}
    fewest = min(edits.values(), default=allowed + 1)
    if fewest <= allowed:
        return [other for other in similar if edits[other] == fewest][:MOST_SUGGESTED]
    begun = [other for other in names if len(letters) >= 2 and _letters(other).startswith(letters)]
    inside = [other for other in names if len(letters) >= 3 and letters in _letters(other)]
    return (begun or inside)[:MOST_SUGGESTED]


def hint(message: str) -> str:
    """Return a suggestion for an error message that ends with ``must be A, B or C, not X``; empty for other messages."""
    found = CHOICES.search(message)
    return closest(found["given"], re.split(r", | or ", found["choices"])) if found else ""


def distance(one: str, other: str) -> int:
    """Return the number of letters to insert, delete, replace or swap with the next (Damerau, 1964) between two words."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        next_row = [i]
        for j, target in enumerate(other, 1):
            cost = min(row[j] + 1, next_row[-1] + 1, row[j - 1] + (letter != target))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == target:
                cost = min(cost, before[j - 2] + 1)
            next_row.append(cost)
        before, row = row, next_row
    return row[-1]


def _letters(name: str) -> str:
    """The name in lower case, with underscores for hyphens and spaces."""
    return name.lower().replace("-", "_").replace(" ", "_")
