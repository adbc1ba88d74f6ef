"""What each engine of several has done, and how evenly they share the load: ``engines`` and ``imbalance`` in ``result.json``."""

from typing import Any

import numpy as np

from kvsim.core.tier import LEVELS
from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import EngineUse, Outcome
from kvsim.results.rates import link_record, ratio, spread


def engine_records(outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, served: np.ndarray) -> list[dict[str, Any]] | None:
    """Return one object per engine; None for a single one.

    ``prompts`` and ``hits`` are the prompt and hit tokens of each request, ``served`` tells which ones count. Only ``requests``
    to ``hit_rate``, ``ttft_s`` and ``tpot_s`` are statistics over requests; everything else covers the whole run.
    """
    if outcome.engine is None or outcome.decoder is None or not outcome.engines:
        return None
    records = []
    for use in outcome.engines:
        own, decoded = served & (outcome.engine == use.engine), served & (outcome.decoder == use.engine)
        tokens, reused = int(prompts[own].sum()), hits[own].sum(axis=0)
        records.append(
            {
                "engine": use.engine,
                "host": use.host,
                "role": use.role,
                "requests": int(np.count_nonzero(own)),
                **({"decoded": int(np.count_nonzero(decoded))} if outcome.is_disaggregated else {}),
                "prompt_tokens": tokens,
                "hit_tokens": dict(zip(LEVELS, reused.tolist(), strict=True)),
                "hit_rate": ratio(int(reused.sum()), tokens),
                "capacity_pages": use.capacity_pages,
                "peak_pages": use.peak_pages,
                "evicted_pages": use.evicted_pages,
                "inserted_pages": use.inserted_pages,
                "busy_share": ratio(use.busy_s, outcome.simulated_s),
                "queue": {"mean": ratio(use.waited_s, outcome.simulated_s), "most": use.most_queued},
                "retractions": use.retractions,
                "failures": use.failures,
                "down_s": _down_s(outcome, use.engine),
                "ttft_s": spread(outcome.ttft_s[own]),
                "tpot_s": spread(outcome.tpot_s[decoded]),
                "links": _links(outcome, use),
            }
        )
    return records


def imbalance(
    outcome: Outcome, prompts: np.ndarray, hits: np.ndarray, served: np.ndarray
) -> dict[str, dict[str, float | None]] | None:
    """Return by role how much more than the mean of its engines the most loaded one did: 1 is even; None for a single engine.

    ``busy`` compares the time in steps, ``computed_tokens`` the prompt tokens that were computed, not hit, and
    ``output_tokens``, of decode engines, the tokens of the answers.
    """
    if outcome.engine is None or outcome.decoder is None or not outcome.engines:
        return None
    computed = prompts - hits.sum(axis=1)
    answers = np.array([request.output_tokens * request.samples for request in outcome.requests], np.int64)
    found = {}
    for role in dict.fromkeys([use.role for use in outcome.engines]):
        pool = [use for use in outcome.engines if use.role == role]
        at, tokens = (outcome.decoder, answers) if role == "decode" else (outcome.engine, computed)
        found[role] = {
            "busy": _over_mean([use.busy_s for use in pool]),
            "output_tokens" if role == "decode" else "computed_tokens": _over_mean(
                [float(tokens[served & (at == use.engine)].sum()) for use in pool]
            ),
        }
    return found


def _down_s(outcome: Outcome, engine: int) -> float:
    """Return for how many seconds of the run an engine was down."""
    outages = outcome.outages.get(engine, [])
    return sum([max(0.0, min(end_s, outcome.simulated_s) - start_s) for start_s, end_s in outages], 0.0)


def _links(outcome: Outcome, use: EngineUse) -> dict[str, dict[str, Any]]:
    """Return the traffic on the links of an engine's GPU. A link between GPUs counts for the engine at either end."""
    own: dict[str, list[LinkUse]] = {}
    for lane in outcome.link_lanes:
        if lane.is_of_engine and use.engine in (lane.owner, lane.receiver):
            own.setdefault(lane.name, []).append(lane)
    return {name: link_record(lanes, outcome.simulated_s) for name, lanes in own.items()}


def _over_mean(values: list[float]) -> float | None:
    return ratio(max(values) * len(values), sum(values))
