"""The highest rate of requests at which a configuration meets its objectives: a search with few runs."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

from kvsim.plans.command_settings import SaturateSettings

MOST_DOUBLINGS = 10
"""The search stops at 1,024 times, or a 1,024th of, the rate that it began with."""
SAME = 1.02
"""Arrivals per second that differ by less than this factor are the same load."""
RISE = 0.002
"""Rise of the attainment with the rate, above which the outcome is called not monotone."""
FLAT_RUNS = 4
"""Runs at ever lower rates with the same attainment, after which the search for one that holds ends."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A run at one rate."""

    rate: float
    """The trace's ``rate``."""
    requests_per_s: float
    """Arrivals per second."""
    attainment: float
    record: Any = None
    """What else is known of the run."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of a search."""

    probes: list[Probe]
    """All runs, by rate."""
    highest: Probe | None
    """The run at the highest rate that holds; None if none does."""
    lowest_above: Probe | None
    """The run at the lowest rate that fails; None if none does."""
    notes: list[str]


def highest_rate(probe: Callable[[float], Probe], settings: SaturateSettings, start: float) -> Found:
    """Search for the highest rate whose attainment is at least ``settings.attainment``, from the rate ``start``.

    Doubles or halves the rate until one holds and the next one fails, then bisects on a logarithmic scale. A closed loop may
    hold at any rate: the search ends when twice the rate no longer brings more arrivals per second.
    """
    probes, notes = [probe(start)], list[str]()
    holds, fails = _bracket(probe, settings, probes, notes)
    while holds and fails and fails.rate > holds.rate * (1 + settings.tolerance):
        if len(probes) >= settings.most_runs:
            notes.append(f"stopped after saturate.most_runs={settings.most_runs} runs, before the tolerance was reached")
            break
        probes.append(probe(_rounded(sqrt(holds.rate * fails.rate))))
        if probes[-1].attainment >= settings.attainment:
            holds = probes[-1]
        else:
            fails = probes[-1]
    probes.sort(key=lambda one: one.rate)
    return Found(probes=probes, highest=holds, lowest_above=fails, notes=[*notes, *_rises(probes, settings.attainment)])


def _bracket(
    probe: Callable[[float], Probe], settings: SaturateSettings, probes: list[Probe], notes: list[str]
) -> tuple[Probe | None, Probe | None]:
    """Return a run that holds and one at a higher rate that fails; None for what was not found."""
    last = probes[0]
    is_rising = last.attainment >= settings.attainment
    for _ in range(MOST_DOUBLINGS):
        if len(probes) >= settings.most_runs:
            notes.append(f"stopped after saturate.most_runs={settings.most_runs} runs")
            break
        before, last = last, probe(_rounded(last.rate * 2 if is_rising else last.rate / 2))
        probes.append(last)
        if (last.attainment >= settings.attainment) != is_rising:
            return (before, last) if is_rising else (last, before)
        more, less = (last, before) if is_rising else (before, last)
        if more.requests_per_s < SAME * less.requests_per_s:
            notes.append(
                f"rates of {less.rate:g} and {more.rate:g} bring nearly the same load ({less.requests_per_s:.3g} and "
                f"{more.requests_per_s:.3g} requests/s): in a closed loop, turns come after answers and pauses, whatever the "
                "rate. The objectives "
                + ("hold at the most load that these sessions make" if is_rising else "fail at the least load that they make")
            )
            break
        if not is_rising and _is_flat(probes[-FLAT_RUNS:]):
            notes.append(
                f"{last.attainment:.2%} meet the objectives at a rate of {last.rate:g}, and lower rates do not change that"
            )
            break
    else:
        way = "up" if is_rising else "down"
        notes.append(f"searched {way} to a rate of {last.rate:g}, at which {last.attainment:.2%} meet the objectives")
    return (last, None) if is_rising else (None, last)


def _is_flat(last: list[Probe]) -> bool:
    """Whether most requests meet the objectives at all of the last rates, and at each about as many."""
    attained = [probe.attainment for probe in last]
    return len(last) == FLAT_RUNS and max(attained) - min(attained) < RISE and min(attained) > 0.5


def _rounded(rate: float) -> float:
    """Return a rate with five significant digits, to be named and repeated."""
    return float(f"{rate:.5g}")


def _rises(probes: list[Probe], target: float) -> list[str]:
    """Say where a higher rate attains more than a lower one that fails: there may be other rates that hold."""
    return [
        f"not monotone: attainment is {lower.attainment:.2%} at a rate of {lower.rate:g} and {higher.attainment:.2%} at "
        f"{higher.rate:g}, so other rates may hold or fail, too"
        for lower, higher in pairwise(probes)
        if lower.attainment < target and higher.attainment > lower.attainment + RISE
    ]
