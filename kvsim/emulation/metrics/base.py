"""What the metrics of all engines share: a registry of their own, and running totals."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.served import ServedWatch
from kvsim.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram


class Metrics(ServedWatch, ABC):
    """The metrics of one emulated server. Times are real ones, as its clients measure them.

    Counters are running totals: requests that have ended are not kept.
    """

    labels: Mapping[str, str]
    """Those that metrics have unless they say otherwise."""

    def __init__(self, emulator: Emulator, model: str, longest_tokens: int | None) -> None:
        """``model`` is its name, ``longest_tokens`` the most tokens of a prompt and its answer. Raises UsageError without the
        library."""
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            raise UsageError("metrics need the package prometheus_client: pip install kvsim[servers]") from None
        self.emulator = emulator
        self.model = model
        self.longest_tokens = longest_tokens
        self._registry = CollectorRegistry()
        emulator.watches.append(self)

    @abstractmethod
    def look(self) -> None:
        """Bring up to date what is not counted as it happens."""

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and the type of that content."""
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

        self.emulator.catch_up()
        self.look()
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def real_s(self, seconds: float) -> float:
        """Return simulated seconds as real ones."""
        return seconds / self.emulator.speed

    # --- metrics -------------------------------------------------------------------------------------------------------------

    def counter(self, name: str, text: str, more: Sequence[str] = (), labels: Mapping[str, str] | None = None) -> "Counter":
        """Return a counter; with ``more`` labels, one that ``labels`` them; ``labels`` stand in for the usual ones."""
        from prometheus_client import Counter

        metric: Counter = self._labelled(Counter, name, text, more, self.labels if labels is None else labels)
        return metric

    def gauge(self, name: str, text: str, more: Sequence[str] = (), labels: Mapping[str, str] | None = None) -> "Gauge":
        """Return a gauge, as ``counter`` does."""
        from prometheus_client import Gauge

        metric: Gauge = self._labelled(Gauge, name, text, more, self.labels if labels is None else labels)
        return metric

    def histogram(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        more: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> "Histogram":
        """Return a histogram, as ``counter`` does."""
        from prometheus_client import Histogram

        own = self.labels if labels is None else labels
        metric: Histogram = self._labelled(Histogram, name, text, more, own, buckets=buckets)
        return metric

    def _labelled(self, kind: Any, name: str, text: str, more: Sequence[str], labels: Mapping[str, str], **settings: Any) -> Any:
        metric = kind(name, text, [*labels, *more], registry=self._registry, **settings)
        return Partly(metric, labels) if more else metric.labels(**labels)


class Partly:
    """A metric that lacks some labels."""

    def __init__(self, metric: Any, labels: Mapping[str, str]) -> None:
        self._metric = metric
        self._labels = labels

    def labels(self, **more: str) -> Any:
        """Return the metric with all labels."""
        return self._metric.labels(**self._labels, **more)
