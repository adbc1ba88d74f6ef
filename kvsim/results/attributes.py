"""The numbers of a result as attributes: ``result.ttft_p99`` for ``record["ttft_s"]["p99"]``."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvsim.results.fields import FIELDS, measures_of
from kvsim.results.result import RunRecord
from kvsim.results.schema import OPTIONAL
from kvsim.suggest import closest

QUANTILES = ("mean", "p50", "p90", "p99")
SHORT = {"goodput": "goodput_requests_per_s", "attainment": "slo_attainment"}
"""What some columns of tables are called for short, besides those of times, which go without their unit."""
AMBIGUOUS = ("requests_per_s", "load_s")
"""Fields about kvsim's own speed, which a reader would take for the server's throughput, or its loading of pages."""


def attributes_of(record: RunRecord) -> dict[str, Callable[[], Any]]:
    """Return what gives each number of a ``result.json`` by the names that Python users may write.

    These are, the later ones first where two are equal: its fields (``hit_rate``, ``tiers``; None where it has none);
    ``throughput_requests_per_s`` and its like; the columns of a sweep's table (``ttft_s_p99``, ``hit_rate_gpu``,
    ``goodput_requests_per_s``), with all quantiles of all times; and the same without the unit (``ttft_p99``, ``queue_mean``,
    ``goodput``).
    """
    known = dict.fromkeys(field.name for field in FIELDS if field.presence == OPTIONAL) | record
    found: dict[str, Callable[[], Any]] = {name: _given(value) for name, value in known.items() if name not in AMBIGUOUS}
    found |= {f"throughput_{name}": _given(value) for name, value in (record.get("throughput") or {}).items()}
    for measure in measures_of([record]):
        found[measure.key] = partial(measure.of, record)
    for name, spread in _spreads(record).items():
        for quantile in QUANTILES:
            found[f"{name}_s_{quantile}"] = found[f"{name}_{quantile}"] = _given(spread[quantile])
    return found | {short: found[name] for short, name in SHORT.items()}


def _given(value: Any) -> Callable[[], Any]:
    return lambda: value


def _spreads(record: RunRecord) -> dict[str, Mapping[str, Any]]:
    """Return the times of a record that have a mean and quantiles, by their names without the unit."""
    times = {name: value for name, value in record.items() if name.endswith("_s") and isinstance(value, Mapping)}
    of_phases = {f"{phase}_s": spread for phase, spread in (record.get("phases_s") or {}).items()}
    return {name[:-2]: value for name, value in (times | of_phases).items() if set(QUANTILES) <= value.keys()}


class Attributes:
    """An object that has the numbers of its ``record`` as attributes, too, and completes their names at a prompt."""

    record: RunRecord
    """The content of the JSON file that the command writes."""

    def _numbers(self) -> dict[str, Callable[[], Any]]:
        """Return what gives each attribute besides those of the class."""
        return {name: _given(value) for name, value in self.record.items()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "record" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        numbers = self._numbers()
        if name not in numbers:
            names = [own for own in dir(self) if not own.startswith("_")]
            hint = closest(name, names)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name)
        return numbers[name]()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._numbers()})
