"""Numbers of a shadow for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.errors import UsageError
from kvsim.shadow.snapshot import EngineView, GhostView, Snapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

GHOST, ENGINE = ("ghost",), ("engine", "rank")


class Seen(NamedTuple):
    """A snapshot, and what is told besides."""

    snapshot: Snapshot
    engine_hit_rate: float | None
    """What the engine itself says of the last requests."""
    recorded: int | None
    """Requests in the recording; None without one."""
    problems: Mapping[str, int]
    """What was said to be wrong, by kind."""


class Metrics:
    """Collects metrics when Prometheus asks; ``latest`` returns what was seen last, None before that."""

    def __init__(self, latest: Callable[[], Seen | None]) -> None:
        self._latest = latest

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics, as prometheus_client asks a collector for them."""
        seen = self._latest()
        if seen is not None:
            yield from _totals(seen)
            yield from _of_ghosts(seen.snapshot.ghosts)
            yield from _of_engines(seen.snapshot.engines)


class MetricsServer:
    """Answers Prometheus on a port, in a thread of its own."""

    def __init__(self, host: str, port: int, latest: Callable[[], Seen | None]) -> None:
        """Raises UsageError if the port cannot be had or the package is missing."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise UsageError("shadow.metrics_port needs the package prometheus-client: pip install kvsim[servers]") from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Metrics(latest))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(f"shadow.metrics_port: cannot listen on {host}:{port}: {error.strerror or error}") from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        thread: Thread = self._thread
        thread.join()


def _totals(seen: Seen) -> "Iterator[Metric]":
    snapshot = seen.snapshot
    yield _counter("requests", "Requests that the ghosts have served.", snapshot.requests)
    yield _counter("skipped_requests", "Requests that were left out.", snapshot.skipped)
    yield _counter("events", "KV events received.", snapshot.events)
    yield _counter("gaps", "Gaps in the sequence numbers of events that were not filled.", snapshot.gaps)
    yield _gauge("memory_bytes", "Memory of trees, page ids and ghosts, as the shadow counts it.", snapshot.memory_bytes)
    if seen.recorded is not None:
        yield _counter("recorded_requests", "Requests written to the recording.", seen.recorded)
    if seen.engine_hit_rate is not None:
        yield _gauge(
            "engine_recent_hit_ratio", "Cached per prompt tokens of the last requests, by the engine.", seen.engine_hit_rate
        )
    problems = _family("Counter", "problems", "What was said to be wrong, by kind.", ("kind",))
    for kind, number in seen.problems.items():
        problems.add_metric([kind], number)
    yield problems


def _of_ghosts(ghosts: tuple[GhostView, ...]) -> "Iterator[Metric]":
    hit = _family("Gauge", "hit_ratio", "Hit tokens per prompt token.", GHOST)
    recent = _family("Gauge", "recent_hit_ratio", "Hit tokens per prompt token of the last requests.", GHOST)
    gain = _family("Gauge", "hit_ratio_gain", "Hit ratio above that of the first ghost.", GHOST)
    by_tier = _family("Gauge", "tier_hit_ratio", "Hit tokens per prompt token, by the tier they came from.", (*GHOST, "tier"))
    pages = _family("Gauge", "pages", "Pages held.", (*GHOST, "tier"))
    capacity = _family("Gauge", "capacity_pages", "Pages that the tier has room for.", (*GHOST, "tier"))
    for ghost in ghosts:
        for family, value in ((hit, ghost.hit_rate), (recent, ghost.recent_hit_rate)):
            if value is not None:
                family.add_metric([ghost.name], value)
        if ghost.points is not None:
            gain.add_metric([ghost.name], ghost.points / 100)
        for tier, share in ghost.hit_rate_by_tier.items():
            by_tier.add_metric([ghost.name, tier], share)
        for tier, (taken, most) in ghost.occupancy.items():
            pages.add_metric([ghost.name, tier], taken)
            if most is not None:
                capacity.add_metric([ghost.name, tier], most)
    yield from (hit, recent, gain, by_tier, pages, capacity)


def _of_engines(engines: tuple[EngineView, ...]) -> "Iterator[Metric]":
    blocks = _family("Gauge", "engine_blocks", "Blocks that an engine has, by its events.", (*ENGINE, "medium"))
    stored = _family("Counter", "engine_stored_blocks", "Blocks that an engine has stored.", ENGINE)
    removed = _family("Counter", "engine_removed_blocks", "Blocks that an engine has removed.", ENGINE)
    known = _family("Gauge", "engine_is_known", "1 if no gap has made an engine's blocks unknown.", ENGINE)
    predicted = _family("Gauge", "engine_predicted_ratio", "Predicted share of its blocks.", (*ENGINE, "event", "medium"))
    for engine in engines:
        labels = [engine.name, "" if engine.rank is None else str(engine.rank)]
        for medium, number in engine.pages.items():
            blocks.add_metric([*labels, medium], number)
        stored.add_metric(labels, engine.stored)
        removed.add_metric(labels, engine.removed)
        known.add_metric(labels, float(engine.known))
        for event in ("stored", "removed") if engine.score is not None else ():
            for medium, share in getattr(engine.score, event).items():
                if share.share is not None:
                    predicted.add_metric([*labels, event, medium], share.share)
    yield from (blocks, stored, removed, known, predicted)


def _family(kind: str, name: str, help_text: str, labels: tuple[str, ...]) -> Any:
    from prometheus_client import core

    return getattr(core, f"{kind}MetricFamily")(f"kvsim_shadow_{name}", help_text, labels=labels)


def _counter(name: str, help_text: str, value: float) -> Any:
    family = _family("Counter", name, help_text, ())
    family.add_metric([], value)
    return family


def _gauge(name: str, help_text: str, value: float) -> Any:
    family = _family("Gauge", name, help_text, ())
    family.add_metric([], value)
    return family
