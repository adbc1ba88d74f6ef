"""Fits a machine to the steps of a server: the efficiencies and overheads of a roofline, and curves on top of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvsim.calibration.server.batches import SLOTS
from kvsim.calibration.server.least_squares import Vector, least_squares
from kvsim.calibration.server.rows import Rows
from kvsim.calibration.server.step_times import Point, expected_s
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec

NOISE = 0.01
"""An error of a reading that says nothing, relative. Readings count the less, the larger their own standard error is."""
LARGEST_ERROR = 0.1
"""Standard error of a reading that is taken for larger, or is unknown."""
MILLISECOND = 1e-3
MEGABYTE = 1e6
OVERHEADS = (
    "prefill_launch_s",
    "step_overhead_s",
    "prefill_overhead_s",
    "chunk_launch_s",
    "decode_launch_s",
    "request_overhead_s",
    "request_token_s",
)
UNITS = {"request_token_s": 1e-6}
"""Seconds of a unit of an overhead, where it is not a millisecond."""
LONGEST_OVERHEAD = 1000.0

MANY_LAUNCHES = tuple(share / 20 for share in range(2, 20))
FEW_LAUNCHES = (0.2, 0.4, 0.6, 0.8)
"""Launches that a search tries beside the one that it begins with, as shares of the shortest time of a request."""
SHORT_SEARCH = 12
"""Steps of the search with each of them."""


class Parameter(NamedTuple):
    """A number to fit. Its unit is chosen so that 1 is a usual value."""

    start: float
    low: float
    high: float
    spread: float
    """Far from its start by this much, it costs as much as one reading that is off by ``NOISE``: what was not measured stays."""


RESTED = Parameter(0.97, 0.5, 1.0, 0.1)
"""``ComputeCurves.rested_prefill_share``. At 1, the time constant would have no slope."""
WARMING = Parameter(0.25, 0.02, 5.0, 1.0)
"""``ComputeCurves.warming_s``."""
SHARED, CACHE = Parameter(0.9, 0.2, 1.0, 0.5), Parameter(50.0, 1.0, 1000.0, 25.0)
"""``ComputeCurves.repeated_context_share``, and ``repeated_context_bytes`` in megabytes: the cache of an H100 has 50.
With a share of 1, the latter would have no slope."""
SMOOTHNESS = 0.2
"""Neighbours that differ by this much cost as much as one reading that is off by ``NOISE``."""
TILES = (1, 128)
"""Candidates for ``ComputeCurves.prefill_tile_tokens``."""


class Form(NamedTuple):
    """A family of machines."""

    name: str
    parameters: Sequence[Parameter]
    launch: int
    """Which of them is the launch of a step with prefill."""
    launches: Sequence[float]
    """Others to try."""
    machine: Callable[[Vector], HardwareSpec]
    neighbours: Sequence[tuple[int, int]] = ()
    """Pairs of parameters that should differ little."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A machine, and how far its times are from what was read."""

    name: str
    hardware: HardwareSpec
    expected_s: Sequence[float]
    errors: Sequence[float]
    """Relative, one for each point; above 0 if the machine is slower than the server."""
    cost: float
    """What the fit has made as small as it can."""

    def summary(self, points: Sequence[Point], *, is_held_out: bool) -> "Summary":
        """Return the errors of the batches that were fitted, or of the others."""
        found = [
            abs(error) for error, point in zip(self.errors, points, strict=True) if point.reading.batch.is_held_out == is_held_out
        ]
        if not found:
            return Summary(0, inf, inf)
        return Summary(len(found), median(found), max(found))


class Summary(NamedTuple):
    """Absolute relative errors of some batches; infinite if there are none."""

    batches: int
    median: float
    most: float


def fit_all(points: Sequence[Point], model: ModelSpec, start: HardwareSpec, *, pads_chunks: bool = False) -> list[Fit]:
    """Fit a roofline, and curves that begin there, to the points that are not held out. The better one is first.

    ``pads_chunks``: see ``ComputeCurves``. No batch has chunks of different lengths, so that is not fitted.
    """
    roofline = fit(roofline_form(start), points, model)
    forms = [curves_form(start, roofline.hardware, points, model, tile, pads_chunks=pads_chunks) for tile in TILES]
    tiled = [fit(form, points, model) for form in forms]
    curves = min(tiled, key=lambda one: one.cost)
    return best_first([roofline, curves], points)


def best_first(fits: Sequence[Fit], points: Sequence[Point]) -> list[Fit]:
    """Order by the mean square of the errors of held-out points; without any, of those fitted.

    All points count alike. A model is further off than most readings, so in multiples of their noise a few of them would decide.
    """
    has_held_out = any(point.reading.batch.is_held_out for point in points)
    judges = [at for at, point in enumerate(points) if point.reading.batch.is_held_out == has_held_out]
    return sorted(fits, key=lambda one: float(np.sum(np.square([one.errors[at] for at in judges]))))


def noise_of(points: Sequence[Point]) -> Vector:
    """Return how large an error of each reading says nothing, relative."""
    return np.array([np.hypot(NOISE, min(point.reading.error, LARGEST_ERROR)) for point in points])


def fit(form: Form, points: Sequence[Point], model: ModelSpec) -> Fit:
    """Fit the machines of one form to the points that are not held out, by their relative errors."""
    fitted = [point for point in points if not point.reading.batch.is_held_out]
    start = np.array([one.start for one in form.parameters])
    spread = np.array([one.spread for one in form.parameters])
    one, other = np.array(form.neighbours, dtype=int).reshape(-1, 2).T
    logs = np.log([point.reading.seconds for point in fitted])
    noise = noise_of(fitted)

    def residuals(values: Vector) -> Vector:
        expected = expected_s(fitted, model, form.machine(values))
        differences = (values[one] - values[other]) / SMOOTHNESS
        return np.concatenate([(np.log(expected) - logs) / noise, (values - start) / spread, differences])

    low, high = np.array([one.low for one in form.parameters]), np.array([one.high for one in form.parameters])
    shortest_s = min([point.reading.seconds for point in fitted if point.is_request], default=0.0)

    def cost(values: Vector) -> float:
        return float(np.sum(np.square(residuals(values))))

    begins = [start, *[with_launch(form, start, share * shortest_s) for share in form.launches]]
    held = [least_squares(residuals, begin, *held_at(begin, form.launch, low, high), SHORT_SEARCH) for begin in begins]
    end = least_squares(residuals, min(held, key=cost), low, high)
    hardware = form.machine(end)
    expected = expected_s(points, model, hardware)
    errors = [seconds / point.reading.seconds - 1 for seconds, point in zip(expected, points, strict=True)]
    return Fit(name=form.name, hardware=hardware, expected_s=expected, errors=errors, cost=cost(end))


def held_at(values: Vector, place: int, low: Vector, high: Vector) -> tuple[Vector, Vector]:
    """Return bounds that leave one of the values as it is."""
    is_it = np.arange(len(values)) == place
    return np.where(is_it, values, low), np.where(is_it, values, high)


def with_launch(form: Form, values: Vector, launch_s: float) -> Vector:
    """Return the values with another launch of a step with prefill.

    One that is shorter than the step has no effect, and so no slope: a search must begin on both sides.
    """
    changed = values.copy()
    changed[form.launch] = launch_s / MILLISECOND
    return changed


def overheads(start: HardwareSpec) -> list[Parameter]:
    """Return ``OVERHEADS``, which both forms have, in their units."""
    known = [getattr(start, name) / UNITS.get(name, MILLISECOND) for name in OVERHEADS]
    return [Parameter(value, 0.0, LONGEST_OVERHEAD, 50.0) for value in known]


def with_overheads(hardware: HardwareSpec, values: Vector) -> HardwareSpec:
    changes: dict[str, Any] = {
        name: float(value) * UNITS.get(name, MILLISECOND) for name, value in zip(OVERHEADS, values, strict=True)
    }
    return replace(hardware, **changes)


def roofline_form(start: HardwareSpec) -> Form:
    """Return rooflines: how many times slower than the peak products and memory are, and overheads. A machine that is faster
    than described has a higher peak.

    A server forms every step anew, so what a leap takes is part of the overhead of a step.
    """
    base = replace(start, compute_curves=None, leap_overhead_s=0.0, copy_leap_s=0.0, noise=None)
    slower = [Parameter(1 / share, 0.1, 50.0, 5.0) for share in (start.flops_efficiency, start.memory_efficiency)]

    def machine(values: Vector) -> HardwareSpec:
        flops, memory = float(1 / values[0]), float(1 / values[1])
        rates = replace(
            base,
            flops_per_s=base.flops_per_s * max(1.0, flops),
            flops_efficiency=min(1.0, flops),
            memory_bytes_per_s=base.memory_bytes_per_s * max(1.0, memory),
            memory_efficiency=min(1.0, memory),
        )
        return with_overheads(rates, values[2:])

    return Form("roofline", [*slower, *overheads(start)], len(slower), MANY_LAUNCHES, machine)


def curves_form(
    start: HardwareSpec,
    roofline: HardwareSpec,
    points: Sequence[Point],
    model: ModelSpec,
    tile_tokens: int,
    *,
    pads_chunks: bool = False,
) -> Form:
    """Return machines whose parts of a step are each so many times as slow as those of a roofline, in logarithms.

    Parts of nearly the same size are nearly as many times as slow.
    """
    works = [work for point in points if not point.reading.batch.is_held_out for work in point.works]
    rows = Rows(start, roofline, model, works)
    factor = Parameter(0.0, -3.0, 3.0, 0.5)
    is_shared = any(point.reading.batch.slots < SLOTS for point in points)
    repeated = [SHARED, CACHE] if is_shared else []
    parameters = [*overheads(roofline), RESTED, WARMING, *repeated, *[factor] * rows.count]
    own = len(OVERHEADS)
    first = own + 2 + len(repeated)
    neighbours = [(first + one, first + other) for one, other in rows.neighbours()]

    def machine(values: Vector) -> HardwareSpec:
        curves = replace(
            rows.curves(values[first:]),
            rested_prefill_share=float(values[own]),
            warming_s=float(values[own + 1]),
            prefill_tile_tokens=tile_tokens,
            pads_chunks=pads_chunks,
        )
        if repeated:
            share, kept_bytes = float(values[own + 2]), float(values[own + 3]) * MEGABYTE
            curves = replace(curves, repeated_context_share=share, repeated_context_bytes=kept_bytes)
        return replace(with_overheads(roofline, values[:own]), compute_curves=curves)

    return Form("curves", parameters, 0, FEW_LAUNCHES, machine, neighbours)
