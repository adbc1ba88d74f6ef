"""What the JSON files of runs may contain: types, against which a file is checked when it is read, and rows that name fields.

Numbers are finite, counts fit into 64 bits, and rates lie between 0 and 1. The fields of ``result.json`` are the rows of
``kvsim/results/fields.py``; parts of it that are written elsewhere have their shape here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import GenericAlias
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, defstruct

from kvsim.results.measures import Measure

MOST = 1e18
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=0, le=MOST)]
"""A time, a rate per second or any other number that is never negative."""
Finite = Annotated[float, Meta(ge=-MOST, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
BoundFile = Annotated[str, Meta(pattern=r"\A[a-z]+-[0-9a-f]{16}\Z")]
TierName = Annotated[str, Meta(pattern=r"\A[a-z]\w{0,30}\Z")]
MaybeCount, MaybeNumber, MaybeShare = Count | None, Number | None, Share | None
"""The same, or null where there is no such number."""

WRITTEN, OPTIONAL, LATER = "written", "optional", "later"
"""Whether a file has a field: always; unless it has no value; always, but for files of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a record: how it is computed, what it is read back as, and who uses it."""

    name: str
    kind: Any
    """The type against which it is checked when it is read."""
    meaning: str
    of: Callable[[Any], Any]
    """Its value, from what the record is made of; None if there is none."""
    presence: str = WRITTEN
    """WRITTEN, OPTIONAL or LATER."""
    better: int | None = None
    """As an objective of a sweep: 1 if more is better, -1 if less is; None if it is no objective."""
    is_outcome: bool = True
    """Whether it says what came of the run, rather than what was run and how fast: equal results agree in it."""
    is_logged: bool = True
    """Whether it is part of the summary that Weights & Biases gets."""
    measures: tuple[Measure, ...] = ()
    """Numbers that follow from it and by which runs are compared."""


def record_of(rows: Iterable[Field], basis: Any) -> dict[str, Any]:
    """Return the record that rows describe, without the optional fields that have no value."""
    found = {row.name: (row.of(basis), row.presence) for row in rows}
    return {name: value for name, (value, presence) in found.items() if value is not None or presence != OPTIONAL}


@cache
def shape_of(rows: tuple[Field, ...]) -> Any:
    """Return the type of a record that rows describe; further fields are ignored."""
    fields = [(row.name, row.kind) if row.presence == WRITTEN else (row.name, row.kind, None) for row in rows]
    return defstruct("Record", fields, kw_only=True)


def shape(optional: Any = (), **fields: Any) -> Any:
    """Return the type of an object with these fields; those named by ``optional`` may be left out."""
    return defstruct("Record", [(n, kind, None) if n in optional else (n, kind) for n, kind in fields.items()], kw_only=True)


def by(name: Any, kind: Any) -> Any:
    """Return the type of an object whose keys are of one type and whose values are of another."""
    return GenericAlias(dict, (name, kind))


def many(kind: Any) -> Any:
    """Return the type of a list."""
    return GenericAlias(list, (kind,))


TOKENS = by(TierName, Count)
SPREAD = shape(mean=MaybeNumber, p50=MaybeNumber, p90=MaybeNumber, p99=MaybeNumber)
LINK = shape(bytes=Count, transfers=Count, busy_s=Number, utilization=MaybeNumber)
SLO_CLASS = {"by": str, "class": str, "requests": Count, "attainment": MaybeShare}
SLO = shape(
    optional=("by", "by_class"),
    by=str,
    by_class=by(str, by(str, MaybeNumber)),
    ttft_s=MaybeNumber,
    tpot_s=MaybeNumber,
    attainment=MaybeShare,
    goodput_requests_per_s=MaybeNumber,
    classes=many(
        shape(
            optional=("goodput_requests_per_s",),
            **SLO_CLASS,
            goodput_requests_per_s=MaybeNumber,
            ttft_s_p99=MaybeNumber,
            tpot_s_p99=MaybeNumber,
        )
    ),
)
RATES = by(str, many(MaybeNumber))
TIMELINE = shape(
    optional=("engines", "free_pages"),
    hits=shape(
        optional=("known_rate",),
        axis=Literal["request", "arrival_s"],
        edges=many(Number),
        counted_from=MaybeNumber,
        prompt_tokens=many(Count),
        hit_rate=by(TierName, many(Number)),
        known_rate=many(Number),
    ),
    links=shape(edges_s=many(Number), utilization=RATES),
    engines=shape(
        load=shape(edges_s=many(Number), requests=by(str, many(Finite | None))),
        hits=shape(edges_s=many(Number), prompt_tokens=by(str, many(Count)), hit_rate=RATES),
    ),
    free_pages=shape(edges_s=many(Number), mean=by(TierName, many(Finite))),
)
ENDS = shape(low=Share, high=Share)
SAMPLE = shape(share=Share, draws=Count, requests=Count, subtrees=Count, hit_rate=ENDS, tiers=by(TierName, ENDS))
"""What is known of a result from samples of a trace."""
GPU_MEMORY = shape(
    optional=("stages", "adapters_bytes", "kv_copies"),
    adapters_bytes=Count,
    kv_copies=Count,
    stages=many(shape(layers=Count, weights_bytes=Count)),
    **dict.fromkeys(("gpus", "memory_bytes", "kv_bytes", "weights_bytes", "workspace_bytes", "states_bytes"), Count),
    gpu_memory_utilization=Share,
)
STEPS = {"kind": Literal["prefill", "both", "decode"], "least": Count, "leaps": Count, "steps": Count}
HARDWARE = shape(
    optional=("steps",),
    device=str,
    verified_pages=Count,
    wrong_words=Count,
    disk_faults=by(str, Count),
    steps=many(shape(**STEPS, measured_s=Number, expected_s=Number)),
)


class Bound(TypedDict):
    """A file of a sweep's folder ``bounds``."""

    hit_rate: Share | None
    page_hit_rate: Share | None
    hit_tokens: dict[TierName, Count]
    prompt_tokens: Count
    rejected: Count


class Failure(TypedDict):
    """``error.json``."""

    error: str
    is_crash: bool
    overrides: list[str]
    traceback: NotRequired[list[str]]


class Objective(TypedDict):
    """What a sweep optimizes."""

    name: str
    direction: Literal["minimize", "maximize"]


class SweepFile(TypedDict):
    """``sweep.json``."""

    command: str
    command_line: str | None
    swept: list[str]
    objectives: NotRequired[list[Objective]]
    notes: NotRequired[list[str]]


PROBED = shape(
    optional=("shed",),
    rate=Number,
    requests_per_s=Number,
    attainment=Share,
    goodput_requests_per_s=MaybeNumber,
    ttft_s_p99=MaybeNumber,
    tpot_s_p99=MaybeNumber,
    hit_rate=MaybeShare,
    rejected=Count,
    shed=Count,
    folder=str,
)
SATURATION = shape(
    schema=int,
    command=Literal["saturate"],
    command_line=str | None,
    config=dict[str, Any],
    choices=dict[str, str],
    versions=dict[str, str],
    seed=Seed,
    slo=shape(ttft_s=MaybeNumber, tpot_s=MaybeNumber, attainment=Share),
    rate=MaybeNumber,
    fails_at=MaybeNumber,
    highest=PROBED | None,
    wanted_rate=MaybeNumber,
    holds_wanted_rate=bool | None,
    gpus=Count,
    capacity_bytes=by(str, MaybeCount),
    price_per_hour=MaybeNumber,
    notes=list[str],
    runs=many(PROBED),
)
