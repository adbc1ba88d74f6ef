"""Service level objectives: which requests meet them, and how many of those a second are served (goodput).

Goodput as in Zhong et al.: DistServe (OSDI 2024): requests per second that meet every objective.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.core.requests import values_of
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.numbers import Real, check_settings
from kvsim.results.rates import ratio, span_s, spread

CLASSES = {"type": "kind", "tenant": "tenant", "priority": "priority"}
"""What divides requests into classes, and the field of a request that names its class."""
NOT_TOLD = ("", "0")
"""Names for the class of a request that has none in the trace."""


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Objectives for each request; None: none."""

    ttft_s: float | None = None
    """Longest accepted time from arrival to first token, in seconds."""
    tpot_s: float | None = None
    """Longest accepted mean time per output token after the first, in seconds. Answers of one token meet it."""

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0), "ttft_s", "tpot_s", or_null=True, hint="it is the longest time of a request")

    @property
    def is_set(self) -> bool:
        """Whether there is any objective."""
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, outcome: Outcome) -> np.ndarray:
        """Return whether each request meets every objective; a rejected one meets none."""
        met: np.ndarray = outcome.status != REJECTED
        if self.ttft_s is not None:
            met &= outcome.ttft_s <= self.ttft_s
        if self.tpot_s is not None:
            met &= (outcome.tpot_s <= self.tpot_s) | np.isnan(outcome.tpot_s)
        return met


def attained(outcome: Outcome, slo: Slo, counted: np.ndarray) -> dict[str, Any] | None:
    """Return ``slo`` of ``result.json``; None without objectives. ``counted`` tells which requests count, rejected ones too."""
    if not slo.is_set:
        return None
    met = slo.met(outcome)
    served = counted & (outcome.status != REJECTED)
    return {
        "ttft_s": slo.ttft_s,
        "tpot_s": slo.tpot_s,
        "attainment": _attainment(met, counted),
        "goodput_requests_per_s": ratio(int(np.count_nonzero(met & counted)), span_s(outcome, served)),
        "classes": list(_classes(outcome, met, counted)),
    }


def _attainment(met: np.ndarray, counted: np.ndarray) -> float | None:
    return ratio(int(np.count_nonzero(met & counted)), int(np.count_nonzero(counted)))


def _classes(outcome: Outcome, met: np.ndarray, counted: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield a record for each class of requests, in order of name, for each division that the trace has."""
    for by, field in CLASSES.items():
        names = list(map(str, values_of(outcome.requests, field)))
        if set(names) <= set(NOT_TOLD):
            continue
        of_name: dict[str, list[int]] = {}
        for index in np.flatnonzero(counted).tolist():
            of_name.setdefault(names[index], []).append(index)
        for name in sorted(of_name, key=lambda name: (len(name), name) if by == "priority" else (0, name)):
            chosen = np.zeros(len(names), dtype=bool)
            chosen[of_name[name]] = True
            served = chosen & (outcome.status != REJECTED)
            yield {
                "by": by,
                "class": name,
                "requests": len(of_name[name]),
                "attainment": _attainment(met, chosen),
                "ttft_s_p99": spread(outcome.ttft_s[served])["p99"],
                "tpot_s_p99": spread(outcome.tpot_s[served])["p99"],
            }
