"""Does early rejection predict better if it knows the wait for room on the GPU, and does that serve more requests in time?

``admission=predicted_ttft`` with Mooncake's prediction, which has the queue and the prefill, and with the time until running
requests give back enough memory (``waits_for_room``). Mooncake's conversations, arrivals spread over each interval of its clock:
Llama 3 70B on four engines of four H200s at twice the recorded rate, and Llama 3 8B on 20 GiB of one at half of it. An error is
the difference from the time to first token that the request then had. Requests are in time if that is within 10 or 5 s.

Claims:

1. if every request is admitted, half of the predictions with the wait err by at most half as much as those without;
2. if those that would be late are refused, the largest tenth of the errors begins at least 15% lower with the wait;
3. with the same factor of 1, more requests are in time with the wait;
4. a factor below 1 without the wait never has as many in time as the best factor with it.

Exits with 1 if a claim fails.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

import kvsim
from kvsim.core.request import Request
from kvsim.policies.admission.base import ClusterLoad
from kvsim.policies.admission.predicted_ttft import PredictedTtft
from kvsim.report.study import CONVERSATION, Claim, Study, highest, lowest, opening, section

FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Place(NamedTuple):
    """What serves the trace, and at which load."""

    name: str
    objective_s: float
    rate: float
    overrides: tuple[str, ...]


PLACES = (
    Place(
        "Llama 3 70B, 4 engines", 10.0, 2.0,
        ("model=llama3_70b", "hardware.gpus=4", "hardware.tensor_parallel=4", "tiers.gpu.capacity=auto", "cluster.engines=4",
         "routing=kv_aware"),
    ),
    Place("Llama 3 8B, 20 GiB", 5.0, 0.5, ("tiers.gpu.capacity=20GiB",)),
)  # fmt: skip


class Cell(NamedTuple):
    place: Place
    factor: float | None
    """None admits every request."""
    waits_for_room: bool


class Row(NamedTuple):
    """Of requests that were served: errors of both predictions, in seconds, without and with the wait for room."""

    requests: int
    in_time: int
    shed: int
    mean_ttft_s: float
    mean_errors_s: tuple[float, float]
    p50_errors_s: tuple[float, float]
    p90_errors_s: tuple[float, float]


PREDICTED: dict[int, tuple[float, float]] = {}
"""Both predictions of each request of the run that is under way in this process."""


@dataclass(kw_only=True, eq=False)
class Noted(PredictedTtft):
    """``predicted_ttft``, whose both predictions are noted; it may admit every request all the same."""

    admits_all: bool = False

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        waits, both = self.waits_for_room, list[float]()
        for self.waits_for_room in (False, True):
            both.append(self.predicted_s(request, load))
        self.waits_for_room = waits
        PREDICTED[request.index] = both[0], both[1]
        return self.admits_all or super().admits(request, load)

    def on_answered(self, request: Request, now: float) -> None:
        waits, self.waits_for_room = self.waits_for_room, True
        super().on_answered(request, now)
        self.waits_for_room = waits


def run(options: Namespace, cell: Cell) -> Row:
    place = cell.place
    trace = kvsim.load_trace(
        "mooncake", path=options.conversation, page_tokens=16, limit=options.limit, spread=True, rate=place.rate
    )
    PREDICTED.clear()
    policy = Noted(factor=cell.factor or 1.0, waits_for_room=cell.waits_for_room, admits_all=cell.factor is None)
    outcome = kvsim.simulate(trace, *place.overrides, f"slo.ttft_s={place.objective_s}", admission=policy).outcome
    times = outcome.ttft_s
    served = [index for index in PREDICTED if not np.isnan(times[index])]
    errors = np.array([PREDICTED[index] for index in served]) - times[served][:, None]

    def both(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> tuple[float, float]:
        return float(values[0]), float(values[1])

    return Row(
        requests=len(trace.requests),
        in_time=int(np.count_nonzero(times <= place.objective_s)),
        shed=len(trace.requests) - len(served),
        mean_ttft_s=float(np.nanmean(times)),
        mean_errors_s=both(errors.mean(axis=0)),
        p50_errors_s=both(np.percentile(np.abs(errors), 50, axis=0)),
        p90_errors_s=both(np.percentile(np.abs(errors), 90, axis=0)),
    )


def cells() -> list[Cell]:
    some = [Cell(place, None, False) for place in PLACES]
    return some + [Cell(place, factor, waits) for place in PLACES for waits in (False, True) for factor in FACTORS]


def share(errors_s: tuple[float, float]) -> float:
    """The error with the wait as a share of that without."""
    return errors_s[1] / errors_s[0] if errors_s[0] else 1.0


def claims(rows: dict[Cell, Row]) -> list[Claim]:
    names = {place.name: place for place in PLACES}
    every = {name: rows[Cell(place, None, False)].p50_errors_s for name, place in names.items()}
    shed = {name: rows[Cell(place, 1.0, False)].p90_errors_s for name, place in names.items()}
    halves = {name: share(own) for name, own in every.items()}
    tenths = {name: share(own) for name, own in shed.items()}
    in_time = {(cell.place.name, cell.waits_for_room, cell.factor): row.in_time for cell, row in rows.items() if cell.factor}
    more = {name: float(in_time[name, True, 1.0] - in_time[name, False, 1.0]) for name in names}
    best = {(name, waits): max(in_time[name, waits, factor] for factor in FACTORS) for name in names for waits in (False, True)}
    ahead = {name: float(best[name, True] - best[name, False]) for name in names}
    (half_at, half), (tenth_at, tenth) = highest(halves), highest(tenths)
    (least_at, least), (ahead_at, least_ahead) = lowest(more), lowest(ahead)
    return [
        Claim(
            "if all are admitted, half of the predictions err at most half as much", f"{half:.2f} times ({half_at})", half <= 0.5
        ),
        Claim(
            "if those that would be late are refused, the 90th percentile of errors is at least 15% lower",
            f"{100 * (tenth - 1):+.2f}% ({tenth_at})",
            tenth <= 0.85,
        ),
        Claim("with a factor of 1 more are in time", f"at least {least:+,.0f} requests ({least_at})", least > 0),
        Claim("with the best factor of each, too", f"at least {least_ahead:+,.0f} requests ({ahead_at})", least_ahead > 0),
    ]


def page(options: Namespace, rows: dict[Cell, Row]) -> Iterator[str]:
    count = next(iter(rows.values())).requests
    text = [
        f"`admission=predicted_ttft` on {count:,} of Mooncake's conversations, with and without `admission.waits_for_room`.",
        "Made by `python experiments/early_rejection/run.py`; all numbers are in [results.csv](results.csv).",
    ]
    yield from opening("Early rejection and the wait for room", text, "Requests in time by the factor, both ways", claims(rows))
    head = ("place", "requests are", "p50, without", "p50, with", "p90, without", "p90, with", "mean, without", "mean, with")
    yield from section("Errors of both predictions, in seconds", head, errors(rows), "In the same runs, those without the wait.")
    head = (
        "place",
        "factor",
        "in time, without",
        "in time, with",
        "refused, without",
        "refused, with",
        "mean TTFT, without (s)",
        "with (s)",
    )
    yield from section("Requests in time", head, served(rows))


def errors(rows: dict[Cell, Row]) -> Iterator[tuple[str, ...]]:
    for place in PLACES:
        for factor, what in ((None, "all admitted"), (1.0, "refused if late")):
            row = rows[Cell(place, factor, False)]
            pairs = (*row.p50_errors_s, *row.p90_errors_s)
            yield place.name, what, *(f"{value:.2f}" for value in pairs), *(f"{value:+.2f}" for value in row.mean_errors_s)


def served(rows: dict[Cell, Row]) -> Iterator[tuple[str, ...]]:
    for place in PLACES:
        for factor in FACTORS:
            both = [rows[Cell(place, factor, waits)] for waits in (False, True)]
            counts = [f"{row.in_time:,}" for row in both] + [f"{row.shed:,}" for row in both]
            yield place.name, f"{factor}", *counts, *(f"{row.mean_ttft_s:.2f}" for row in both)


def table(rows: dict[Cell, Row]) -> Iterator[tuple[object, ...]]:
    ends = ("without_s", "with_s")
    names = [f"{name}_{end}" for name in ("mean_error", "p50_error", "p90_error") for end in ends]
    yield ("place", "factor", "waits_for_room", "requests", "in_time", "shed", "mean_ttft_s", *names)
    for cell, row in rows.items():
        pairs = (*row.mean_errors_s, *row.p50_errors_s, *row.p90_errors_s)
        yield (
            cell.place.name,
            cell.factor or "",
            cell.waits_for_room,
            row.requests,
            row.in_time,
            row.shed,
            row.mean_ttft_s,
            *pairs,
        )


def figure(rows: dict[Cell, Row]) -> go.Figure:
    chart = go.Figure()
    for colour, place in zip(("#2f6fa7", "#b2593b"), PLACES, strict=True):
        for waits, dash in ((False, "dot"), (True, "solid")):
            shares = [
                100 * rows[Cell(place, factor, waits)].in_time / rows[Cell(place, factor, waits)].requests for factor in FACTORS
            ]
            name = f"{place.name}, {'with' if waits else 'without'} the wait"
            chart.add_scatter(x=list(FACTORS), y=shares, name=name, mode="lines+markers", line={"color": colour, "dash": dash})
    chart.update_xaxes(title="admission.factor")
    chart.update_yaxes(title="requests in time (%)")
    return chart.update_layout(template="plotly_white", width=900, height=480)


STUDY = Study(
    file=__file__, question=__doc__, traces={"conversation": CONVERSATION}, limit=3000,
    cells=cells, run=run, claims=claims, table=table, page=page, figure=figure,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(STUDY.main())
