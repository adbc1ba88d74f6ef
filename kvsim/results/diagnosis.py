"""What holds requests up: the busiest resource while they wait, and what a disk's writes do to the drive."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.results.rates import digits, link_record, percent, ratio

GPU, ROOM, NONE = "gpu", "room", "none"
"""Bottlenecks besides links, which have their own names: the steps of the engines, room for KV on the GPUs, and nothing."""
HARDLY = 0.1
"""Requests that wait for at most this share of their time to first token are not held up."""
FULL = 0.75
"""Share of the GPU tier that running requests hold, beyond what they share, from which on it is called full."""
MOSTLY = 0.5
SATURATED = 0.95
"""Share of the run in which a link is busy that has all that it can carry."""
SHOWN = 0.01
"""Share of the time to first token from which on loads are mentioned."""
DAY_S = 86_400.0


class Waiting(NamedTuple):
    """What was the matter while requests waited in the queue."""

    room: float
    """Share of the time that they waited in which running ones held ``FULL`` of the GPU tier."""
    writes: float
    """Time in which an admitted one waited for slots whose pages were being written down, per engine, over the time in which
    any waited."""


def diagnosis(outcome: Outcome, page_bytes: int | None) -> dict[str, Any] | None:
    """Return what held the requests of a run up; None without a clock.

    ``busy`` has the share of the run in which each resource was busy: ``gpu`` is the engines' time in steps, of the time for
    which they were there. The bottleneck is

        none     if requests wait for at most a tenth of their time to first token
        a link   if they wait longer for loads than in the queue: the busiest one that leads to a GPU; or if, for most of the
                 time in which some request waits, one waits for slots whose pages are being written down: the busiest other one.
                 A link that writes pages down from the GPU is it, too, if it is busy for 95 % of the run and longer than the
                 GPU: pages keep their slots until they are written
        room     if running requests hold three quarters of the GPU tier for most of the time that requests wait in the queue
        gpu      otherwise
    """
    known = (outcome.status == FINISHED) & ~np.isnan(outcome.ttft_s)
    if not outcome.simulated_s or not known.any():
        return None
    queue_s, load_s, prefill_s = outcome.phases_s[known].mean(axis=0).tolist()
    phases_s = queue_s, load_s, prefill_s
    busy = _busy(outcome)
    waiting = _while_waiting(outcome, known)
    name = _bottleneck(phases_s, busy, waiting)
    return {
        "bottleneck": name,
        "busy": busy,
        "text": _text(name, phases_s, busy, waiting, parallel(outcome)),
        "drive_writes_per_day": _drive_writes(outcome, page_bytes),
    }


def parallel(outcome: Outcome) -> dict[str, float | None] | None:
    """Return what became of the time in steps with pipeline or expert parallelism, as shares of it; None without.

    ``stages`` is that in which a stage computes, on average, and None with a single stage: the rest is the pipeline's bubble.
    ``communication`` is that in which GPUs exchange activations instead, without the way from stage to stage.
    """
    busy_s, exchange_s, stages_s = map(sum, (outcome.engines_busy_s, outcome.engines_exchange_s, outcome.engines_stages_s))
    if not busy_s or not (exchange_s or stages_s):
        return None
    return {"stages": min(1.0, stages_s / busy_s) if stages_s else None, "communication": min(1.0, exchange_s / busy_s)}


def _busy(outcome: Outcome) -> dict[str, float]:
    engines, until_s = len(outcome.engines_busy_s), outcome.simulated_s
    engine_s = engines * until_s if outcome.scaling is None else outcome.scaling.engine_s(until_s)
    gpu = {GPU: min(1.0, (ratio(sum(outcome.engines_busy_s), engine_s) or 0.0))} if engines else {}
    links = {name: link_record([link], outcome.simulated_s)["utilization"] or 0.0 for name, link in outcome.links.items()}
    return gpu | links


def _while_waiting(outcome: Outcome, known: np.ndarray) -> Waiting:
    """Return what was the matter while requests waited in the queue.

    Pages that a request found on the GPU do not count as its own, because others may hold them, too.
    """
    arrival_s, start_s = outcome.arrival_s[known], (outcome.arrival_s + outcome.columns["queue_s"])[known]
    end_s = np.maximum(start_s, (outcome.arrival_s + outcome.e2e_s)[known])
    requests = map(outcome.requests.__getitem__, np.flatnonzero(known).tolist())
    own = np.array([request.pages_in_all(outcome.page_tokens) for request in requests]) - outcome.hit_pages[known, 0]
    times = np.unique(np.concatenate((arrival_s, start_s, end_s)))
    held = _sums(times, start_s, own) - _sums(times, end_s, own)
    ones = np.ones(len(own))
    waiting = (_sums(times, arrival_s, ones) - _sums(times, start_s, ones))[:-1]
    capacity = outcome.tiers[GPU].capacity_pages if GPU in outcome.tiers else None
    is_full = held[:-1] >= FULL * capacity if capacity is not None else np.zeros(len(times) - 1)
    spans_s = np.diff(times)
    waited_s, some_wait_s = float((spans_s * waiting).sum()), float((spans_s * (waiting > 0)).sum())
    writing = sum(outcome.engines_claiming_s) / max(len(outcome.engines_claiming_s), 1)
    return Waiting(
        room=ratio(float((spans_s * waiting * is_full).sum()), waited_s) or 0.0,
        writes=min(1.0, ratio(writing, some_wait_s) or 0.0),
    )


def _sums(times: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return, for each time, the sum of the values up to and at it."""
    return np.cumsum(np.bincount(np.searchsorted(times, at), values, len(times)))


def _bottleneck(phases_s: tuple[float, float, float], busy: Mapping[str, float], waiting: Waiting) -> str:
    queue_s, load_s, _ = phases_s
    if queue_s + load_s <= HARDLY * sum(phases_s):
        return NONE
    loads = [name for name in busy if name.endswith(f"-{GPU}")]
    writes = [name for name in busy if name != GPU and name not in loads]
    if load_s > queue_s and loads:
        return max(loads, key=busy.__getitem__)
    if waiting.writes > MOSTLY and writes:
        return max(writes, key=busy.__getitem__)
    from_gpu = max((name for name in writes if name.startswith(f"{GPU}-")), key=busy.__getitem__, default=GPU)
    if from_gpu != GPU and busy[from_gpu] >= max(SATURATED, busy.get(GPU, 0.0)):
        return from_gpu
    return ROOM if waiting.room > MOSTLY else GPU


def _text(
    name: str,
    phases_s: tuple[float, float, float],
    busy: Mapping[str, float],
    waiting: Waiting,
    shares: Mapping[str, float | None] | None,
) -> str:
    queue_s, load_s, _ = phases_s
    waits = [f"{digits(queue_s)} s in the queue"] + ([f"{digits(load_s)} s for loads"] if load_s >= SHOWN * sum(phases_s) else [])
    others = sorted((each for each in busy if each != name), key=lambda each: (each != GPU, -busy[each]))
    beside = ", ".join(f"{_called(each)} {percent(busy[each])} busy" for each in others)
    ttft = f"of a mean TTFT of {digits(sum(phases_s))} s, requests wait {' and '.join(waits)}"
    if name == NONE:
        head = "none: requests hardly wait"
    elif name == ROOM:
        head = f"room on the GPU: running requests hold it during {percent(waiting.room)} of the waiting"
    else:
        head = f"{_called(name)}, {percent(busy.get(name, 0.0))} busy"
        is_write = name != GPU and not name.endswith(f"-{GPU}")
        head += ", which must write pages down before others get their slots" if is_write else ""
    return "; ".join(part for part in (head, ttft, beside, _shared(shares or {})) if part)


def _shared(shares: Mapping[str, float | None]) -> str:
    """Say what stages of a pipeline, and communication, have of the time in steps."""
    stages, exchange = shares.get("stages"), shares.get("communication")
    parts = [f"a stage is busy for {percent(stages)}"] if stages else []
    parts += [f"communication takes {percent(exchange)}"] if exchange else []
    return f"of the time in steps, {' and '.join(parts)}" if parts else ""


def _called(name: str) -> str:
    return "GPU" if name == GPU else name


def _drive_writes(outcome: Outcome, page_bytes: int | None) -> float | None:
    """Return how often a day the disk tier is written as a whole at the rate of this run; None without one of limited size."""
    disk = outcome.tiers.get("disk")
    if disk is None or not disk.capacity_pages or not page_bytes:
        return None
    written = sum([link.bytes for name, link in outcome.links.items() if name.endswith("-disk")])
    return ratio(written * DAY_S, outcome.simulated_s * disk.capacity_pages * page_bytes)
