"""The table of eviction policies: when to use each, when not, its paper, and what came out in ``experiments``."""

import csv
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
STUDY = "lru_or_not"
BASELINE = "lru"
NAMES = {"conversation": "Mooncake", "synthetic": "synthetic"}
"""The traces of the study, as the table calls them."""


@cache
def advice() -> dict[str, dict[str, Any]]:
    """When to use each policy and when not."""
    return dict(yaml.safe_load((DOCS / "eviction_advice.yaml").read_text()))


@cache
def rates() -> dict[tuple[str, str, int], float]:
    """Hit rates of the study, by trace, policy and pages."""
    with (DOCS.parent / "experiments" / STUDY / "results.csv").open() as file:
        return {(row["trace"], row["policy"], int(row["pages"])): float(row["hit_rate"]) for row in csv.DictReader(file)}


def gains(policy: str) -> Iterator[str]:
    """On each trace, the points of hit rate above LRU's from the smallest to the largest capacity."""
    for trace, name in NAMES.items():
        capacities = sorted(pages for place, one, pages in rates() if place == trace and one == policy)
        points = [100 * (rates()[trace, policy, pages] - rates()[trace, BASELINE, pages]) for pages in capacities]
        if points:
            yield f"{name} {', '.join(f'{value:+z.1f}' for value in points)}"


def result(policy: str) -> str:
    """What came out for a policy, with links to the studies."""
    found = []
    if policy == BASELINE:
        found.append(f"[what the others are compared with](../studies/{STUDY}/results.md)")
    found += [f"[{shown}](../studies/{STUDY}/results.md)" for shown in gains(policy) if policy != BASELINE]
    if study := advice()[policy].get("study"):
        found.append(f"[{study['found']}](../studies/{study['link']})")
    return "<br>".join(found) or "not studied yet"


def table(policies: list[str], paper: Callable[[str], str]) -> str:
    """A row for each policy."""
    lines = ["| policy | use when | not when | paper | our result |", "|---|---|---|---|---|"]
    for name in policies:
        row = advice()[name]
        lines.append(f"| [`{name}`](#eviction-{name}) | {row['use']} | {row['not']} | {paper(name)} | {result(name)} |")
    return "\n".join(lines)
