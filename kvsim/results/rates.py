"""Numbers that several parts of a result contain: rates, percentiles, the use of links; and numbers as text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import Outcome

UNKNOWN = "-"
"""A number that does not exist, as shown."""


def spread(values: np.ndarray) -> dict[str, float | None]:
    """Return mean and percentiles of the values, ignoring NaN; None if there are none."""
    known = values[~np.isnan(values)]
    if not known.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}


def span_s(outcome: Outcome, counted: np.ndarray) -> float:
    """Return the seconds from the first arrival of these requests to the last end of those that were served; 0 without a clock.

    The first one may have been rejected or shed: clients such as ``vllm bench serve`` time a run from the first request sent.
    """
    ends = counted & ~np.isnan(outcome.e2e_s)
    if not ends.any():
        return 0.0
    return float((outcome.arrival_s + outcome.e2e_s)[ends].max() - np.fmin.reduce(outcome.arrival_s[counted]))


def ratio(part: float, whole: float) -> float | None:
    """Return ``part / whole``, or None if ``whole`` is 0."""
    return float(part / whole) if whole > 0 else None


def link_record(links: Sequence[LinkUse], run_s: float) -> dict[str, Any]:
    """Return what links have carried together in a run of ``run_s``; ``utilization`` is the mean of all of them.

    The run ends with the last request. A link that is still busy then is judged by the time until its last transfer has ended.
    """
    busy_s = sum([link.busy_s for link in links])
    until_s = max([run_s, *(float(link.intervals[:, 1].max()) for link in links if link.intervals.size)])
    return {
        "bytes": sum([link.bytes for link in links]),
        "transfers": sum([link.transfers for link in links]),
        "busy_s": busy_s,
        "utilization": ratio(busy_s, until_s * sum([link.lanes for link in links])),
    }


def size(n_bytes: int) -> str:
    """Format bytes with three digits in the largest binary unit that they reach."""
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def count(number: float | None) -> str:
    """Format a count with thousands separators."""
    return UNKNOWN if number is None else f"{number:,}" if isinstance(number, int) else f"{number:,.1f}"


def percent(share: float | None) -> str:
    """Format a fraction as a percentage: less than all is never 100%, more than nothing never 0%."""
    if share is None:
        return UNKNOWN
    if 0.99995 <= share < 1 - 1e-9:
        return "99.99%"
    return "<0.01%" if 1e-9 < share < 0.00005 else f"{share:.2%}"


def digits(number: float | None) -> str:
    """Format a measured number with three significant digits, or without decimals from 100 on; the heading has the unit."""
    if number is None:
        return UNKNOWN
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}" if number >= 1e-4 else f"{number:.2g}"


def hundredths(number: float) -> str:
    """Format a number with two decimals, or with three significant digits where these would hide it."""
    return digits(number) if 0 < number < 0.1 else f"{number:,.2f}"
