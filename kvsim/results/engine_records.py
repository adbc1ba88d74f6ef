"""What each engine of several has done, and how evenly they share the load: ``engines`` and ``imbalance`` in ``result.json``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvsim.engine.columns import of_requests
from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import EngineUse, Outcome
from kvsim.results.rates import link_record, ratio, spread
from kvsim.results.schema import (
    LINK,
    OPTIONAL,
    SPREAD,
    TOKENS,
    Count,
    Field,
    MaybeCount,
    MaybeNumber,
    MaybeShare,
    Number,
    by,
    record_of,
    shape,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Share:
    """What the fields of one engine of several are computed from."""

    outcome: Outcome
    use: EngineUse
    own: np.ndarray
    """Indices of the requests that count and had their prompts computed there, ascending."""
    decoded: np.ndarray
    """Indices of those that count and had their answers decoded there."""
    lanes: list[LinkUse]
    """What the links of its GPU have carried."""
    prompts: np.ndarray
    hits: np.ndarray
    """Prompt and hit tokens of each request."""


def _of_use(name: str) -> Callable[[Share], Any]:
    return lambda share: getattr(share.use, name)


def _hit_tokens(share: Share) -> dict[str, int]:
    return dict(zip(share.outcome.tier_names, share.hits[share.own].sum(axis=0).tolist(), strict=True))


ENGINE: list[Field] = [
    Field(name="engine", kind=Count, of=_of_use("engine"), meaning="its number, from 0"),
    Field(name="host", kind=Count, of=_of_use("host"), meaning="number of its host, from 0"),
    Field(
        name="role", kind=Literal["both", "prefill", "decode"], of=_of_use("role"), meaning="`both`, `prefill` or `decode`"
    ),
    Field(
        name="requests", kind=Count, of=lambda share: len(share.own),
        meaning="requests that it admitted to compute their prompts, and that were served; after a failure, those whose hits "
        "were counted here",
    ),
    Field(
        name="decoded", kind=Count, presence=OPTIONAL,
        of=lambda share: len(share.decoded) if share.outcome.is_disaggregated else None,
        meaning="requests whose answers it completed; only where prefill and decode are apart",
    ),
    Field(
        name="prompt_tokens", kind=Count, of=lambda share: int(share.prompts[share.own].sum()),
        meaning="prompt tokens of `requests`"
    ),
    Field(name="hit_tokens", kind=TOKENS, of=_hit_tokens, meaning="those of them that were reused, by tier"),
    Field(
        name="hit_rate", kind=MaybeShare, meaning="hit tokens over prompt tokens",
        of=lambda share: ratio(int(share.hits[share.own].sum()), int(share.prompts[share.own].sum())),
    ),
    Field(name="capacity_pages", kind=MaybeCount, of=_of_use("capacity_pages"), meaning="of its GPU tier; null: unlimited"),
    Field(name="peak_pages", kind=Count, of=_of_use("peak_pages"), meaning="of its GPU tier"),
    Field(name="evicted_pages", kind=Count, of=_of_use("evicted_pages"), meaning="of its GPU tier"),
    Field(name="inserted_pages", kind=Count, of=_of_use("inserted_pages"), meaning="of its GPU tier"),
    Field(
        name="busy_share", kind=MaybeNumber, of=lambda share: ratio(share.use.busy_s, share.outcome.simulated_s),
        meaning="time in steps over `simulated_s`; a step that a failure interrupts does not count",
    ),
    Field(
        name="queue", kind=shape(mean=MaybeNumber, most=Count),
        of=lambda share: {"mean": ratio(share.use.waited_s, share.outcome.simulated_s), "most": share.use.most_queued},
        meaning="requests waiting: their `mean` number over `simulated_s`, and the `most` at a time. On a decode engine, "
        "those that wait for its pages before their prompts are computed",
    ),
    Field(name="retractions", kind=Count, of=_of_use("retractions"), meaning="retractions of its requests"),
    Field(name="failures", kind=Count, of=_of_use("failures"), meaning="its failures"),
    Field(
        name="down_s", kind=Number, of=lambda share: _down_s(share.outcome, share.use.engine), meaning="the seconds it was down"
    ),
    Field(
        name="ttft_s", kind=SPREAD, of=lambda share: spread(share.outcome.ttft_s[share.own]),
        meaning="of `requests`: `mean`, `p50`, `p90`, `p99`",
    ),
    Field(
        name="tpot_s", kind=SPREAD, of=lambda share: spread(share.outcome.tpot_s[share.decoded]),
        meaning="of the answers that it completed, likewise",
    ),
    Field(
        name="links", kind=by(str, LINK), of=lambda share: _links(share),
        meaning="the links of its GPU, as above; `gpu-gpu` counts for the engine at either end",
    ),
]  # fmt: skip
"""The fields of an engine, in order."""


def engine_records(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, served: np.ndarray) -> list[dict[str, Any]] | None:
    """Return one object per engine; None for a single one.

    ``prompts`` and ``hits`` are the prompt and hit tokens of each request, ``served`` tells which ones count. Only ``requests``
    to ``hit_rate``, ``ttft_s`` and ``tpot_s`` are statistics over requests; everything else covers the whole run.
    """
    if not outcome.engines:
        return None
    records = []
    count = 1 + max(use.engine for use in outcome.engines)
    owned, decoded, lanes = by_number(outcome.engine, served, count), by_number(outcome.decoder, served, count), _lanes(outcome)
    for use in outcome.engines:
        share = Share(
            outcome=outcome, use=use, own=owned[use.engine], decoded=decoded[use.engine], lanes=lanes.get(use.engine, []),
            prompts=prompts, hits=hits,
        )  # fmt: skip
        records.append(record_of(ENGINE, share))
    return records


def by_number(numbers: np.ndarray, counts: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the indices of the requests that ``counts`` says count, ascending, for each number from 0 to ``count`` - 1."""
    order = np.argsort(numbers, kind="stable")
    order = order[counts[order]]
    bounds = np.searchsorted(numbers[order], np.arange(count + 1))
    return [order[bounds[number] : bounds[number + 1]] for number in range(count)]


def imbalance(
    outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, served: np.ndarray
) -> dict[str, dict[str, float | None]] | None:
    """Return, by role, the load of the most loaded engine over the mean load: 1 is even; None for a single engine.

    ``busy`` compares the time in steps, ``computed_tokens`` the prompt tokens that were computed, not hit, and
    ``output_tokens``, of decode engines, the tokens of the answers.
    """
    if not outcome.engines:
        return None
    computed = prompts - hits.sum(axis=1)
    answers = of_requests(outcome, "output_tokens") * of_requests(outcome, "samples")
    found = {}
    for role in dict.fromkeys([use.role for use in outcome.engines]):
        pool = [use for use in outcome.engines if use.role == role]
        at, tokens = (outcome.decoder, answers) if role == "decode" else (outcome.engine, computed)
        shares = by_number(at, served, 1 + max(use.engine for use in pool))
        found[role] = {
            "busy": _over_mean([use.busy_s for use in pool]),
            "output_tokens" if role == "decode" else "computed_tokens": _over_mean(
                [float(tokens[shares[use.engine]].sum()) for use in pool]
            ),
        }
    return found


def _down_s(outcome: Outcome, engine: int) -> float:
    """Return for how many seconds of the run an engine was down."""
    outages = outcome.outages.get(engine, [])
    return sum([max(0.0, min(end_s, outcome.simulated_s) - start_s) for start_s, end_s in outages], 0.0)


def _lanes(outcome: Outcome) -> dict[int, list[LinkUse]]:
    """Return what the links of each engine's GPU have carried. A link between GPUs counts for the engine at either end."""
    lanes: dict[int, list[LinkUse]] = {}
    for lane in outcome.link_lanes:
        if lane.is_of_engine:
            for engine in dict.fromkeys((lane.owner, lane.receiver)):
                lanes.setdefault(engine, []).append(lane)
    return lanes


def _links(share: Share) -> dict[str, dict[str, Any]]:
    """Return the traffic on the links of an engine's GPU, by their names."""
    own: dict[str, list[LinkUse]] = {}
    for lane in share.lanes:
        own.setdefault(lane.name, []).append(lane)
    return {name: link_record(lanes, share.outcome.simulated_s) for name, lanes in own.items()}


def _over_mean(values: list[float]) -> float | None:
    return ratio(max(values) * len(values), sum(values))
