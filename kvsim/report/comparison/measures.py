"""The numbers by which runs are compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvsim.report.summary import UNKNOWN, count, digits, percent
from kvsim.results.rates import size
from kvsim.results.result import TIERS, RunRecord

Value = float | int | None


@dataclass(frozen=True)
class Measure:
    """A number of a run: its title in tables, its format, and which values are better (1: high, -1: low, 0: neither)."""

    key: str
    title: str
    of: Callable[[RunRecord], Value]
    text: Callable[[Any], str]
    better: int = 0


def _at(*path: str) -> Callable[[RunRecord], Value]:
    def read(result: RunRecord) -> Value:
        value: Any = result
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        found: Value = value
        return found

    return read


def _tier_rate(tier: str) -> Callable[[RunRecord], Value]:
    def rate(result: RunRecord) -> Value:
        known = tier in result["tiers"] and result["prompt_tokens"]
        return result["hit_tokens"][tier] / result["prompt_tokens"] if known else None

    return rate


def memory_bytes(result: RunRecord) -> int | None:
    """Return the bytes of KV that all tiers hold together; None if one is unlimited or the page size was not recorded."""
    pages = [tier["capacity_pages"] for tier in result["tiers"].values()]
    return None if None in pages or "page_bytes" not in result else sum(pages) * int(result["page_bytes"])


def tier_bytes(result: RunRecord, tier: str) -> int | None:
    """Return the bytes of KV that a kind of tier holds; 0 if the run has none, None if it is unlimited or the size unknown."""
    pages = result["tiers"].get(tier, {"capacity_pages": 0})["capacity_pages"]
    return None if pages is None or "page_bytes" not in result else pages * int(result["page_bytes"])


def moved_bytes(result: RunRecord) -> int | None:
    """Return the bytes moved over all links; None for a run without links."""
    return sum(link["bytes"] for link in result["links"].values()) if result["links"] else None


def imbalance(result: RunRecord) -> float | None:
    """Return the time in steps of the busiest engine over the mean of its role, the largest of all roles; None for one engine."""
    found = [measures["busy"] for measures in result.get("imbalance", {}).values() if measures["busy"] is not None]
    return max(found, default=None)


def _gigabytes(n_bytes: float | None) -> str:
    return UNKNOWN if n_bytes is None else f"{n_bytes / 1e9:,.2f}"


def _bytes(n_bytes: float | None) -> str:
    return "unlimited" if n_bytes is None else size(int(n_bytes))


MEASURES = (
    Measure("capacity_bytes", "total capacity", memory_bytes, _bytes),
    Measure("hit_rate", "hit rate", _at("hit_rate"), percent, 1),
    *(Measure(f"hit_rate_{tier}", f"from {tier}", _tier_rate(tier), percent) for tier in TIERS),
    Measure("page_hit_rate", "page hit rate", _at("page_hit_rate"), percent, 1),
    Measure("goodput_requests_per_s", "goodput (requests/s)", _at("slo", "goodput_requests_per_s"), digits, 1),
    Measure("slo_attainment", "SLO attainment", _at("slo", "attainment"), percent, 1),
    Measure("ttft_s_mean", "TTFT mean (s)", _at("ttft_s", "mean"), digits, -1),
    Measure("ttft_s_p99", "TTFT p99 (s)", _at("ttft_s", "p99"), digits, -1),
    *(
        Measure(f"{name}_s_mean", f"{name} mean (s)", _at("phases_s", name, "mean"), digits)
        for name in ("queue", "load", "prefill")
    ),
    Measure("tpot_s_mean", "TPOT mean (s)", _at("tpot_s", "mean"), digits, -1),
    Measure("prompt_tokens_per_s", "prompt tokens/s", _at("throughput", "prompt_tokens_per_s"), digits, 1),
    Measure("moved_bytes", "moved (GB)", moved_bytes, _gigabytes, -1),
    Measure("imbalance", "busiest engine / mean", imbalance, digits, -1),
    Measure("rejected", "rejected", _at("rejected"), count, -1),
)
BY_KEY = {measure.key: measure for measure in MEASURES}
