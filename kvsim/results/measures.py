"""The numbers by which runs are compared: what a row of ``results/fields.py`` says of one, and those that need a formula."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsim.results.rates import UNKNOWN, size

Record = Mapping[str, Any]
"""The content of ``result.json``."""
Value = float | int | None


@dataclass(frozen=True)
class Measure:
    """A number of a run: its title in tables, its format, and which values are better (1: high, -1: low, 0: neither)."""

    key: str
    title: str
    of: Callable[[Record], Value]
    text: Callable[[Any], str]
    better: int = 0
    place: int = 99
    """Where it stands in tables of runs: lower numbers further left, of equal ones in the order of the fields."""
    on_terminal: bool = False
    """Whether tables on a terminal have it, too; a page has all that have values, CSV all."""


class Path:
    """Reads a number of a result by its path, such as ``ttft_s.p99``."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, result: Record) -> Value:
        value: Any = result
        for part in self.path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found: Value = value
        return found


class TierRate:
    """Computes the rate of hits in a tier; None for a run without it. Without a tier, it stands for all those of the runs."""

    def __init__(self, tier: str = "") -> None:
        self.tier = tier

    def __call__(self, result: Record) -> Value:
        known = self.tier in result["tiers"] and result["prompt_tokens"]
        return result["hit_tokens"][self.tier] / result["prompt_tokens"] if known else None


def memory_bytes(result: Record) -> int | None:
    """Return the bytes of KV that all tiers hold together; None if one is unlimited or the page size was not recorded."""
    pages = [tier["capacity_pages"] for tier in result["tiers"].values()]
    return None if None in pages or "page_bytes" not in result else sum(pages) * int(result["page_bytes"])


def tier_bytes(result: Record, tier: str) -> int | None:
    """Return the bytes of KV that a kind of tier holds; 0 if the run has none, None if it is unlimited or the size unknown."""
    pages = result["tiers"].get(tier, {"capacity_pages": 0})["capacity_pages"]
    return None if pages is None or "page_bytes" not in result else pages * int(result["page_bytes"])


def moved_bytes(result: Record) -> int | None:
    """Return the bytes moved over all links; None for a run without links."""
    return sum(link["bytes"] for link in result["links"].values()) if result["links"] else None


def busiest_over_mean(result: Record) -> float | None:
    """Return the time in steps of the busiest engine over the mean of its role, the largest of all roles; None for one engine."""
    found = [measures["busy"] for measures in result.get("imbalance", {}).values() if measures["busy"] is not None]
    return max(found, default=None)


def gigabytes(n_bytes: float | None) -> str:
    """Format bytes in GB."""
    return UNKNOWN if n_bytes is None else f"{n_bytes / 1e9:,.2f}"


def byte_size(n_bytes: float | None) -> str:
    """Format the size of a tier."""
    return "unlimited" if n_bytes is None else size(int(n_bytes))
