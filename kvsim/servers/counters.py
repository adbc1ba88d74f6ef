"""A server's counters (``/metrics``, in Prometheus' text format), and what they rose by."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvsim.errors import UsageError
from kvsim.servers.http import Http

COUNTED = ("_total", "_sum", "_count")
"""Endings of what only rises: counters, and the sums and counts of histograms."""
KINDS = ("text/plain", "application/openmetrics-text")
"""Media types of Prometheus' text format."""


class Sample(NamedTuple):
    """One number of one series."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def series(self) -> str:
        """Its name and labels, as Prometheus writes them, the labels in order."""
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(self.labels.items()))
        return f"{self.name}{{{labels}}}" if labels else self.name


async def read_samples(http: Http) -> list[Sample]:
    """Return all numbers of a server; none if its ``/metrics`` are not Prometheus'. Raises UsageError if it does not answer."""
    reply = await http.get("/metrics")
    return parse(reply.text, http.url) if reply.is_good and reply.kind in KINDS else []


def parse(text: str, source: str) -> list[Sample]:
    """Return all numbers of a text. Raises UsageError if it is no such text, and without prometheus_client."""
    try:
        from prometheus_client.parser import text_string_to_metric_families as families
    except ImportError:
        raise UsageError("prometheus-client is missing, which reads a server's counters: pip install kvsim[servers]") from None
    try:
        return [Sample(each.name, each.labels, each.value) for family in families(text) for each in family.samples]
    except ValueError as error:
        raise UsageError(f"{source}/metrics cannot be read: {str(error) or 'it is not in the format of Prometheus'}") from None


def counters(samples: Sequence[Sample]) -> dict[str, float]:
    """Return what only rises, by series."""
    return {sample.series: sample.value for sample in samples if sample.name.endswith(COUNTED)}


def risen(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return what counters rose by, and those that have fallen: the server has started anew, and they count from then."""
    fallen = [series for series, value in after.items() if value < before.get(series, 0.0)]
    return {series: value - (0.0 if series in fallen else before.get(series, 0.0)) for series, value in after.items()}, fallen
