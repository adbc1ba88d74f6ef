"""From the runs of a leaderboard to its order: gains over the baseline, with their noise, costs, and what a bound leaves."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from statistics import fmean
from typing import Any

from kvsim.results.statistics import student_t
from kvsim.sweeps.paired import PARTS, Difference

STUDENT_95 = student_t(PARTS - 1)
"""Standard errors to each side of a gain that hold 95 % of what as few parts of a trace tell: more than those of a normal one."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A policy on one trace with one capacity."""

    policy: str = ""
    trace: str = ""
    capacity: str = ""
    value: float | None = None
    """The measure; None if the run failed."""
    gain: float | None = None
    """Better than the baseline by this, in the measure's unit; below 0 is worse."""
    noise: float | None = None
    """Half the width of the gain's 95 % interval; None if the trace is too short to tell."""
    us_per_request: float | None = None
    """Wall time of the run by its requests."""
    cost: float | None = None
    """That, as a multiple of the baseline's."""
    most: float | None = None
    """The gain of the bound; None without one that gains anything."""
    headroom: float | None = None
    """The gain by that."""
    folder: str | None = None
    reason: str = ""
    """Why the run failed."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A policy's place."""

    policy: str
    gain: float | None
    """Mean over all cells; None if some are missing, which puts a policy last."""
    noise: float | None
    worst: float | None
    best: float | None
    cost: float | None
    """Geometric mean of the costs."""
    headroom: float | None
    """Sum of the gains by the sum of the bound's: a mean of shares would be ruled by cells with next to nothing to gain."""
    missing: int
    reason: str


def noise_of(difference: Difference) -> float | None:
    """Return half the width of the 95 % interval."""
    return None if difference.standard_error is None else STUDENT_95 * difference.standard_error


def standings(cells: Iterable[Cell]) -> list[Standing]:
    """Return the policies, best mean gain first; equal ones by name, incomplete ones last."""
    of_policy: dict[str, list[Cell]] = {}
    for cell in cells:
        of_policy.setdefault(cell.policy, []).append(cell)
    found = [_standing(policy, own) for policy, own in of_policy.items()]
    return sorted(found, key=lambda one: (one.gain is None, -(one.gain or 0.0), one.policy))


def _standing(policy: str, cells: Sequence[Cell]) -> Standing:
    gains = [cell.gain for cell in cells if cell.gain is not None]
    costs = [cell.cost for cell in cells if cell.cost]
    rooms = [(cell.gain, cell.most) for cell in cells if cell.gain is not None and cell.most is not None]
    is_whole = len(gains) == len(cells)
    return Standing(
        policy=policy,
        gain=fmean(gains) if is_whole else None,
        noise=_mean_noise(cells) if is_whole else None,
        worst=min(gains, default=None),
        best=max(gains, default=None),
        cost=exp(fmean(map(log, costs))) if costs else None,
        headroom=sum(gain for gain, _ in rooms) / sum(most for _, most in rooms) if rooms else None,
        missing=len(cells) - len(gains),
        reason=next((cell.reason for cell in cells if cell.reason), ""),
    )


def _mean_noise(cells: Sequence[Cell]) -> float | None:
    """Return the noise of the mean gain: the capacities of a trace see the same requests, so theirs adds up; traces' do not."""
    of_trace: dict[str, list[float]] = {}
    for cell in cells:
        if cell.noise is None:
            return None
        of_trace.setdefault(cell.trace, []).append(cell.noise)
    return sqrt(sum(sum(noises) ** 2 for noises in of_trace.values())) / len(cells)


def verdict(places: Sequence[Standing], baseline: str, look_ahead: Collection[str] = ()) -> tuple[str, str]:
    """Return the policy to take, the best one whose mean gain is above its noise, or the baseline; and half a sentence on it.

    Policies that ``look_ahead`` know the future, which nobody can deploy.
    """
    failed = next((one for one in places if one.policy == baseline and one.missing), None)
    if failed is not None:
        return baseline, f"{baseline}, with which all are compared, failed: {failed.reason}"
    for one in places:
        if one.policy == baseline or one.policy in look_ahead or one.gain is None or one.gain <= (one.noise or 0.0):
            continue
        if one.noise is None:
            return one.policy, f"{one.policy} has the largest gain over {baseline}, on traces too short to tell how much is noise"
        return one.policy, f"{one.policy} has the largest gain over {baseline} that is above its noise"
    return baseline, f"No policy gains more over {baseline} than the noise of these traces"


def as_record(rows: Sequence[Cell | Standing]) -> list[Mapping[str, Any]]:
    """Return rows as they are recorded."""
    return [asdict(row) for row in rows]
