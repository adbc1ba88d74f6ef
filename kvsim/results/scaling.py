"""What engines cost that a policy starts and stops: ``scaling`` in ``result.json``."""

from collections.abc import Mapping
from typing import Any

from kvsim.engine.outcome import Outcome
from kvsim.results.rates import ratio
from kvsim.results.schema import Count, MaybeNumber, MaybeShare, Number, many, shape

SCALING = shape(
    engine_s=Number, gpu_s=Number, of_all=MaybeShare, mean_engines=MaybeNumber, most_engines=Count, starts=Count, stops=Count,
    start_s=Number, changes=many(many(Number)),
)  # fmt: skip


def scaling(outcome: Outcome, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a run whose engines a policy starts and stops; None for any other run.

    Engines count from the decision to start them until they have stopped, and until the last request has ended at most.
    """
    found, until_s = outcome.scaling, outcome.simulated_s
    if found is None:
        return None
    hardware = config.get("hardware")
    gpus = hardware.get("gpus") if isinstance(hardware, Mapping) else None
    engine_s = found.engine_s(until_s)
    changes = [change for change in found.changes if change[0] <= until_s]
    return {
        "engine_s": engine_s,
        "gpu_s": engine_s * (gpus or 1),
        "of_all": None if not until_s else min(1.0, engine_s / (found.engines * until_s)),
        "mean_engines": ratio(engine_s, until_s),
        "most_engines": max(sum(counts) for _, *counts in changes),
        "starts": found.starts,
        "stops": found.stops,
        "start_s": found.start_s,
        "changes": [list(change) for change in changes],
    }
