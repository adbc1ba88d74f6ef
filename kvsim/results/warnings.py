"""What a reader of a result should know before trusting it: ``warnings`` in ``result.json``."""

from math import sqrt

import numpy as np

from kvsim.engine.outcome import FINISHED, Outcome

GROWTH = 0.03
"""A queue that grows without end grows by at least this share of the requests that arrive."""
ENDLESS = "the queue grew without end"
"""How the warning of it begins."""
MOST_OWN = 0.25
"""Largest share of a tier's pages that no tier above has, for the tier to be called without effect."""


def warnings(outcome: Outcome) -> list[str]:
    """Return a sentence for each finding, about the whole run."""
    return [*_no_states(outcome), *_endless_queue(outcome), *_idle_tiers(outcome)]


def _no_states(outcome: Outcome) -> list[str]:
    """Say whether a hybrid model reused nothing although keys and values were cached, since no state was saved beside them."""
    lost = outcome.checkpoints.get("tokens_lost_to_missing_state", 0)
    if not lost or outcome.hit_pages.any():
        return []
    saved = outcome.checkpoints.get("saved", 0)
    why = (
        "no state is saved with checkpoint=none: leave it out, or choose another one"
        if not saved
        else f"none of the {saved:,} saved states was there when it was needed: give states more room, or set another checkpoint"
    )
    return [
        f"nothing was reused: keys and values of {lost:,} prompt tokens were cached, but this model begins from states, and {why}"
    ]


def _endless_queue(outcome: Outcome) -> list[str]:
    """Say whether the queue grows for as long as requests arrive, so that waiting times depend on the length of the trace.

    It does if it is never empty in the second half of the time of arrivals, and if the mean number of requests in it rises from
    the second quarter to the third and to the fourth: altogether by ``GROWTH`` of the requests that arrive in half of the time,
    and by the square root of their number, the standard deviation of Poisson arrivals. Of simulated queues with 2,000 Poisson
    arrivals at one server, this is true of 96% at 1.1 times the capacity if service takes constant time (of 89% if it takes
    exponential time), and of none at 0.9 times; with 6,000 arrivals, of all and of none.
    """
    queue_s = outcome.columns["queue_s"]
    known = (outcome.status == FINISHED) & ~np.isnan(queue_s)
    arrivals, starts = np.sort(outcome.arrival_s[known]), np.sort((outcome.arrival_s + queue_s)[known])
    if not arrivals.size or arrivals[0] == arrivals[-1]:
        return []
    quarters = np.linspace(arrivals[0], arrivals[-1], 5)
    came, served = (int(np.count_nonzero((times >= quarters[2]) & (times <= quarters[4]))) for times in (arrivals, starts))
    _, second, third, last = _waiting(arrivals, starts, quarters)
    is_rising = second < third < last and last - second >= max(GROWTH * came, sqrt(came))
    if not is_rising or _is_ever_empty(arrivals, starts, quarters[2], quarters[4]):
        return []
    half_s = quarters[4] - quarters[2]
    return [
        f"{ENDLESS}: {second:,.0f} requests waited in the second quarter of the time of arrivals, "
        f"{last:,.0f} in the last. In its second half {came / half_s:.3g} requests/s arrived and {served / half_s:.3g} were "
        "admitted, so times to first token depend on the length of the trace"
    ]


def _waiting(arrivals: np.ndarray, starts: np.ndarray, bounds: np.ndarray) -> list[float]:
    """Return the mean number of waiting requests between consecutive times. Both arrays are sorted.

    The time that requests wait in all does not depend on which of them starts first.
    """
    waited_s = [np.clip(end - arrivals, 0.0, None).sum() - np.clip(end - starts, 0.0, None).sum() for end in bounds.tolist()]
    mean: list[float] = (np.diff(waited_s) / np.diff(bounds)).tolist()
    return mean


def _is_ever_empty(arrivals: np.ndarray, starts: np.ndarray, begin_s: float, end_s: float) -> bool:
    """Whether no request waits at some time after the start of one in this span of time."""
    at = starts[(starts >= begin_s) & (starts <= end_s)]
    waiting = np.searchsorted(arrivals, at, side="right") - np.searchsorted(starts, at, side="right")
    return bool((waiting <= 0).any())


def _idle_tiers(outcome: Outcome) -> list[str]:
    """Return a warning for each tier below the GPU that, at the end, held hardly any page that no tier above had."""
    found = []
    for name, tier in outcome.tiers.items():
        if tier.held_pages and tier.own_pages is not None and tier.own_pages <= MOST_OWN * tier.held_pages:
            hits = int(outcome.hit_pages[:, outcome.tier_names.index(name)].sum())
            used = f"its pages were hit {hits:,} times" if hits else "none of its pages was ever hit"
            copies = f"{tier.held_pages - tier.own_pages:,} of the" if tier.own_pages else "all"
            found.append(
                f"tiers.{name} has next to no effect: {used}, and {copies} {tier.held_pages:,} pages that it held at the end "
                "were also in a tier above. Make it larger than the tiers above, or choose a placement that writes pages when "
                "they are evicted, such as write_back"
            )
    return found
