"""Numbers that several parts of a result contain: rates, percentiles, and the use of links."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.engine.outcome import LinkUse


def spread(values: np.ndarray) -> dict[str, float | None]:
    """Return mean and percentiles of the values, ignoring NaN; None if there are none."""
    known = values[~np.isnan(values)]
    if not known.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}


def ratio(part: float, whole: float) -> float | None:
    """Return ``part / whole``, or None if ``whole`` is 0."""
    return float(part / whole) if whole > 0 else None


def link_record(links: Sequence[LinkUse], run_s: float) -> dict[str, Any]:
    """Return what links have carried together in a run of ``run_s``; ``utilization`` is the mean of all of them."""
    busy_s = sum([link.busy_s for link in links])
    return {
        "bytes": sum([link.bytes for link in links]),
        "transfers": sum([link.transfers for link in links]),
        "busy_s": busy_s,
        "utilization": ratio(busy_s, run_s * sum([link.lanes for link in links])),
    }
