"""What became of requests under a policy that may refuse some: ``admission`` in ``result.json``."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.core.requests import values_of
from kvsim.engine.outcome import SHED, Outcome
from kvsim.results.rates import ratio
from kvsim.results.schema import Count, MaybeShare, many, shape
from kvsim.results.slo import CLASSES, NOT_TOLD, class_order

SHED_CLASS = {"by": str, "class": str, "requests": Count, "shed": Count}
ADMISSION = shape(shed=Count, share=MaybeShare, unsent=Count, classes=many(shape(**SHED_CLASS)))


def admission(outcome: Outcome, counted: np.ndarray) -> dict[str, Any] | None:
    """Return the record of a run whose policy may refuse requests; None for any other run. ``counted`` tells which count."""
    if not outcome.has_admission:
        return None
    shed = outcome.status == SHED
    unsent = np.array([any(shed[before] for before in request.predecessors) for request in outcome.requests], dtype=bool) & shed
    number = int(np.count_nonzero(shed & counted))
    return {
        "shed": number,
        "share": ratio(number, int(np.count_nonzero(counted))),
        "unsent": int(np.count_nonzero(unsent & counted)),
        "classes": list(_classes(outcome, shed, counted)),
    }


def _classes(outcome: Outcome, shed: np.ndarray, counted: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield a record for each class of requests, in order of name, for each division that the trace has."""
    for by, attribute in CLASSES.items():
        names = list(map(str, values_of(outcome.requests, attribute)))
        if set(names) <= set(NOT_TOLD):
            continue
        found: dict[str, list[int]] = {}
        for index in np.flatnonzero(counted).tolist():
            found.setdefault(names[index], []).append(index)
        for name in sorted(found, key=class_order(by)):
            yield {"by": by, "class": name, "requests": len(found[name]), "shed": int(np.count_nonzero(shed[found[name]]))}
