"""Service level objectives: which requests meet them, and how many of those a second are served (goodput).

Goodput as in Zhong et al.: DistServe (OSDI 2024): requests per second that meet every objective.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from kvsim.core.request import Request
from kvsim.core.requests import values_of
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.numbers import Real, check_number, check_settings
from kvsim.results.rates import ratio, span_s, spread

CLASSES = {"type": "kind", "tenant": "tenant", "priority": "priority"}
"""What divides requests into classes, and the field of a request that names its class."""
OBJECTIVES = ("ttft_s", "tpot_s")
LIMIT, HINT = Real(above=0), "it is the longest time of a request"
SHOWN = 8
"""Classes of a trace that an error lists."""
NOT_TOLD = ("", "0")
"""Names for the class of a request that has none in the trace."""


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Objectives for each request; None: none."""

    ttft_s: float | None = None
    """Longest accepted time from arrival to first token, in seconds."""
    tpot_s: float | None = None
    """Longest accepted mean time per output token after the first, in seconds. Answers of one token meet it."""
    by: str | None = None
    """What divides requests into classes with objectives of their own, a key of ``CLASSES``; None: nothing does."""
    classes: list[dict[str, Any]] = field(default_factory=list)
    """The ``class`` by its name, with its ``OBJECTIVES``; what one leaves out is as for all requests, null is none."""

    def __post_init__(self) -> None:
        check_settings(self, LIMIT, *OBJECTIVES, or_null=True, hint=HINT)
        if self.by is not None and self.by not in CLASSES:
            raise ValueError(f"by must be one of {', '.join(CLASSES)}, not {self.by}")
        if (self.by is None) != (not self.classes):
            raise ValueError("by and classes belong together: by says what divides requests, classes their objectives")
        for at, own in enumerate(self.classes):
            if "class" not in own or len(own) < 2 or set(own) - {"class", *OBJECTIVES}:
                raise ValueError(f"classes[{at}] must have class, and ttft_s or tpot_s or both, not {own}")
            for objective in OBJECTIVES:
                check_number(f"classes[{at}].{objective}", LIMIT, own.get(objective), or_null=True, hint=HINT)
        if len(self.by_class) < len(self.classes):
            raise ValueError("classes has a class twice: leave one out")

    @property
    def by_class(self) -> dict[str, dict[str, float | None]]:
        """The objectives of classes with their own, by name."""
        return {str(own["class"]): {key: limit_s for key, limit_s in own.items() if key != "class"} for own in self.classes}

    @property
    def is_set(self) -> bool:
        """Whether there is any objective."""
        return any(self.limit_s(name, objective) is not None for name in ("", *self.by_class) for objective in OBJECTIVES)

    def limit_s(self, name: str, objective: str) -> float | None:
        """Return an objective of a class; of one without its own, and of no class, that of all requests."""
        common: float | None = getattr(self, objective)
        return self.by_class.get(name, {}).get(objective, common)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if the trace has no request of a class that has objectives."""
        if self.by is None:
            return
        there = set(map(str, values_of(requests, CLASSES[self.by])))
        if missing := [name for name in self.by_class if name not in there]:
            known = f"; it has {', '.join(sorted(there)[:SHOWN])}" if there - set(NOT_TOLD) else ""
            raise ValueError(f"classes: the trace has no request whose {self.by} is {missing[0]}{known}")

    def met(self, outcome: Outcome) -> np.ndarray:
        """Return whether each request meets every objective; a rejected or shed one meets none."""
        met: np.ndarray = outcome.status == FINISHED
        ttft_s, tpot_s = [self._limits_s(outcome, objective) for objective in OBJECTIVES]
        met &= (ttft_s == inf) | (outcome.ttft_s <= ttft_s)
        met &= (outcome.tpot_s <= tpot_s) | np.isnan(outcome.tpot_s)
        return met

    def _limits_s(self, outcome: Outcome, objective: str) -> np.ndarray:
        """Return an objective of each request, in seconds; infinite where there is none."""
        if self.by is None:
            limit_s = self.limit_s("", objective)
            return np.full(len(outcome.requests), inf if limit_s is None else limit_s)
        found = dict[str, float]()
        limits_s = []
        for name in map(str, values_of(outcome.requests, CLASSES[self.by])):
            if name not in found:
                limit_s = self.limit_s(name, objective)
                found[name] = inf if limit_s is None else limit_s
            limits_s.append(found[name])
        return np.array(limits_s)


def attained(outcome: Outcome, slo: Slo, counted: np.ndarray) -> dict[str, Any] | None:
    """Return ``slo`` of ``result.json``; None without objectives. ``counted`` tells which requests count, rejected and shed
    ones too."""
    if not slo.is_set:
        return None
    met = slo.met(outcome)
    seconds = span_s(outcome, counted)
    own = {} if slo.by is None else {"by": slo.by, "by_class": slo.by_class}
    return {
        "ttft_s": slo.ttft_s,
        "tpot_s": slo.tpot_s,
        **own,
        "attainment": _attainment(met, counted),
        "goodput_requests_per_s": ratio(int(np.count_nonzero(met & counted)), seconds),
        "classes": list(_classes(outcome, met, counted, seconds)),
    }


def class_order(by: str) -> Callable[[str], tuple[int, int, str]]:
    """Return the key by which the names of classes are sorted: priorities as numbers."""
    if by != "priority":
        return lambda name: (0, 0, name)
    return lambda name: (int(name), 0, name)


def _attainment(met: np.ndarray, counted: np.ndarray) -> float | None:
    return ratio(int(np.count_nonzero(met & counted)), int(np.count_nonzero(counted)))


def _classes(outcome: Outcome, met: np.ndarray, counted: np.ndarray, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a record for each class of requests, in order of name, for each division that the trace has.

    Goodputs are over the ``seconds`` of all requests, so that those of the classes of a division add up.
    """
    for by, attribute in CLASSES.items():
        names = list(map(str, values_of(outcome.requests, attribute)))
        if set(names) <= set(NOT_TOLD):
            continue
        of_name: dict[str, list[int]] = {}
        for index in np.flatnonzero(counted).tolist():
            of_name.setdefault(names[index], []).append(index)
        for name in sorted(of_name, key=class_order(by)):
            chosen = np.zeros(len(names), dtype=bool)
            chosen[of_name[name]] = True
            served = chosen & (outcome.status == FINISHED)
            yield {
                "by": by,
                "class": name,
                "requests": len(of_name[name]),
                "attainment": _attainment(met, chosen),
                "goodput_requests_per_s": ratio(int(np.count_nonzero(met & chosen)), seconds),
                "ttft_s_p99": spread(outcome.ttft_s[served])["p99"],
                "tpot_s_p99": spread(outcome.tpot_s[served])["p99"],
            }
