"""Scores kvsim against real runs of a server: hits given the order of the server, hits by simulation, and times.

Each is compared with how far real runs are from one another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from kvsim.report.servers.measures import (
    STATISTICS,
    TIMES,
    Mask,
    hit_rate,
    statistic,
    succeeded,
    tells_hits,
    throughput,
    times_s,
    tokens_by_medium,
)
from kvsim.report.validation.repeated import interval_of
from kvsim.report.validation.spreads import mean
from kvsim.results.observed import NOT_TOLD, ObservedRun
from kvsim.results.tolerances import Tolerances

Score = dict[str, Any]
MOST_LISTED = 100


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The runs of a validation. All are of the same requests, in the order of the trace."""

    real: Sequence[ObservedRun]
    given: Sequence[ObservedRun]
    """For each real run, a replay of its requests as the server admitted them; empty if the server does not tell hits."""
    simulated: Sequence[ObservedRun]
    skipped: int = 0
    """Leading requests that are the warm-up, which scores leave out."""

    def counted(self, *runs: ObservedRun) -> Mask:
        """Return which requests count in a comparison of runs: they succeeded in all of them."""
        mask = np.logical_and.reduce([succeeded(run) for run in runs])
        mask[: self.skipped] = False
        return np.asarray(mask)


def score(runs: Compared, tolerances: Tolerances) -> Score:
    """Return the scores and checks of a validation: the part of ``validate.json`` that is computed."""
    everywhere = runs.counted(*runs.real, *runs.simulated)
    record: Score = {
        "requests": len(everywhere),
        "compared": int(everywhere.sum()),
        "given_order": given_order(runs),
        "simulated_order": simulated_order(runs, everywhere),
        "media": by_medium(runs, everywhere),
        "times": times(runs, everywhere),
    }
    checks = _checks(record, tolerances)
    return record | {"checks": checks, "holds": bool(checks) and all(check["holds"] for check in checks)}


# --- hits ----------------------------------------------------------------------------------------------------------------


def given_order(runs: Compared) -> Score | None:
    """Return how many requests found something else than in a replay of the real order, run by run; None without hits, or if
    nothing of a run can be compared."""
    pairs = list(zip(runs.given, runs.real, strict=True)) if runs.given else []
    masks = [runs.counted(*pair) for pair in pairs]
    if not pairs or not all(mask.any() for mask in masks):
        return None
    differing = [differences(*pair, mask) for pair, mask in zip(pairs, masks, strict=True)]
    rates = [[hit_rate(run, mask) or 0.0 for run in pair] for pair, mask in zip(pairs, masks, strict=True)]
    compared = [int(mask.sum()) for mask in masks]
    same = [1 - len(some) / number for some, number in zip(differing, compared, strict=True)]
    return {
        "compared": compared,
        "differing": [len(some) for some in differing],
        "first_differing": differing[0][:MOST_LISTED],
        "identical": mean(same),
        "hit_rate": _pair([rate for rate, _ in rates], [rate for _, rate in rates]),
        "between_real": between_real(runs),
    }


def simulated_order(runs: Compared, mask: Mask) -> Score | None:
    """Return how hits of the simulation differ from those of the real runs; None if the server tells none.

    Counters are of whole runs: where a real run has nothing else, whole runs are compared.
    """
    is_told = all(map(tells_hits, runs.real))
    rates = [[hit_rate(run, mask if is_told else succeeded(run)) for run in some] for some in (runs.simulated, runs.real)]
    known = [[rate for rate in some if rate is not None] for some in rates]
    if len(known[1]) < len(runs.real):
        return None
    differing = None
    if is_told:
        counts = [len(differences(one, other, runs.counted(one, other))) for one in runs.simulated for other in runs.real]
        differing = mean(counts)
    return {"differing": differing, "hit_rate": _pair(*known), "between_real": between_real(runs)}


def between_real(runs: Compared) -> float | None:
    """Return how many requests found something else in two real runs, on average; None for a single run or without hits."""
    if len(runs.real) < 2 or not all(map(tells_hits, runs.real)):
        return None
    return mean([len(differences(*pair, runs.counted(*pair))) for pair in combinations(runs.real, 2)])


def differences(one: ObservedRun, other: ObservedRun, mask: Mask) -> list[int]:
    """Return the requests of the mask whose cached tokens differ; one of which a server says nothing does not."""
    told = (one.cached_tokens != NOT_TOLD) & (other.cached_tokens != NOT_TOLD)
    found: list[int] = np.flatnonzero(mask & told & (one.cached_tokens != other.cached_tokens)).tolist()
    return found


def by_medium(runs: Compared, mask: Mask) -> dict[str, Score]:
    """Return cached tokens by medium, of those that both sides tell of; of whole runs if a real one has only counters."""
    is_told = all(run.tier_tokens for run in runs.real)
    totals = [
        [tokens_by_medium(run, mask if is_told else succeeded(run)) for run in some] for some in (runs.simulated, runs.real)
    ]
    if not all(totals[1]):
        return {}
    media = dict.fromkeys(medium for some in totals for one in some for medium, tokens in one.items() if tokens)
    return {medium: _pair(*[[one.get(medium, 0.0) for one in some] for some in totals]) for medium in media}


# --- times ---------------------------------------------------------------------------------------------------------------


def times(runs: Compared, mask: Mask) -> dict[str, Score]:
    """Return each time, in seconds, and throughput, per second, by name; those that some run lacks are left out."""
    tables = [[_times_of(run, mask) for run in some] for some in (runs.simulated, runs.real)]
    found = {}
    for name in tables[0][0]:
        values = [[table[name] for table in some] for some in tables]
        known = [[value for value in some if value is not None] for some in values]
        if [len(some) for some in known] == [len(some) for some in values]:
            found[name] = _pair(*known)
    return found


def _times_of(run: ObservedRun, mask: Mask) -> dict[str, float | None]:
    """Return all measures of time of a run; None for one that it lacks."""
    found = {f"{name}_{kind}": statistic(times_s(run, name)[mask], kind) for name in TIMES for kind in STATISTICS}
    return found | {f"{name}_per_s": rate for name, rate in throughput(run, mask).items()}


def _pair(simulated: Sequence[float], real: Sequence[float]) -> Score:
    """Return the values of kvsim's runs and of real ones, how far their means are apart, and how far real runs are.

    ``is_off``: what lies outside the spread of the runs (95 % interval, see ``spreads``); one real run has no spread.
    """
    means = mean(simulated), mean(real)
    difference = means[0] - means[1]
    is_off = interval_of("value", [simulated, real])[1] if len(real) > 1 else difference != 0
    return {
        "simulated": list(simulated),
        "real": list(real),
        "means": list(means),
        "difference": difference,
        "error": _relative(difference, means[1]),
        "spread": max(real) - min(real) if len(real) > 1 else None,
        "relative_spread": _relative(max(real) - min(real), means[1]) if len(real) > 1 else None,
        "is_off": is_off,
    }


def _relative(difference: float, value: float) -> float | None:
    return difference / value if value else 0.0 if not difference else None


# --- checks --------------------------------------------------------------------------------------------------------------


def _checks(record: Mapping[str, Any], tolerances: Tolerances) -> list[Score]:
    """Return the checks, in the shape of those of a validation on hardware.

    A check of the simulation holds, too, if what it measures lies within the spread of the real runs.
    """
    checks = []
    if (given := record["given_order"]) is not None:
        same, least = given["identical"], tolerances.identical
        checks.append(_check("identical, server's order", same, "at least", least, is_small=same >= least))
        checks.append(_of_pair("hit_rate, server's order", given["hit_rate"], "difference", tolerances.hit_rate, is_strict=True))
    if (simulated := record["simulated_order"]) is not None:
        checks.append(_of_pair("hit_rate", simulated["hit_rate"], "difference", tolerances.hit_rate))
    for name in ("ttft_p50", "ttft_p99"):
        if name in record["times"]:
            checks.append(_of_pair(name, record["times"][name], "error", getattr(tolerances, name)))
    return checks


def _of_pair(name: str, pair: Score, key: str, tolerance: float, *, is_strict: bool = False) -> Score:
    is_small = pair[key] is not None and abs(pair[key]) <= tolerance
    return _check(name, pair[key], "at most", tolerance, is_small=is_small, is_within=not (is_strict or pair["is_off"]))


def _check(
    name: str, measured: float | None, relation: str, tolerance: float, *, is_small: bool, is_within: bool = False
) -> Score:
    return {
        "name": name,
        "measured": measured,
        "relation": relation,
        "tolerance": tolerance,
        "is_small": is_small,
        "holds": is_small or is_within,
    }
