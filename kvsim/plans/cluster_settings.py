"""The settings of a cluster: how many engines there are, what they share, and when they fail."""

from dataclasses import dataclass, field
from typing import Any

from kvsim.cluster.failure import Failure
from kvsim.engine.layout import Layout
from kvsim.numbers import Real, Whole, check_settings

STARTS = Real(least=0, most=86_400.0)
"""Seconds that an engine may take to start: a day."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Engines on one clock. See ``conf/config.yaml``."""

    engines: int = 1
    engines_per_host: int | None = None
    workers: int = 1
    prefill: int = 0
    decode: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    decode_routing: Any = None
    min_engines: int = 1
    initial_engines: int | None = None
    start_s: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "engines", "workers")
        check_settings(self, Whole(1), "engines_per_host", or_null=True, hint="null puts all on one host")
        check_settings(self, Whole(), "prefill", "decode")
        check_settings(self, Whole(), "min_engines")
        check_settings(self, Whole(), "initial_engines", or_null=True, hint="null: min_engines")
        check_settings(self, STARTS, "start_s", or_null=True, hint="null: by the bytes of the model")
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(
                f"prefill={self.prefill} needs decode engines, and the other way round: set both above 0, or neither"
            )
        if self.prefill and self.engines not in (1, self.prefill + self.decode):
            raise ValueError(f"engines={self.engines} contradicts prefill + decode = {self.prefill + self.decode}: leave it out")
        if self.total % self.per_host:
            raise ValueError(f"engines_per_host={self.per_host} must divide the number of engines, {self.total}")
        for name in ("min_engines", "initial_engines"):
            if (getattr(self, name) or 0) > self.total:
                raise ValueError(
                    f"{name}={getattr(self, name)} is above engines={self.total}, the most there may be: set it lower"
                )
        if self.initial_engines is not None and self.initial_engines < self.min_engines:
            raise ValueError(f"initial_engines={self.initial_engines} is below min_engines={self.min_engines}: set it higher")
        self.plan_failures()

    @property
    def first(self) -> int:
        """Engines that are up at the start, if a policy decides how many serve: at least one, unless it is said."""
        return max(1, self.min_engines) if self.initial_engines is None else self.initial_engines

    @property
    def total(self) -> int:
        """Number of engines."""
        return self.prefill + self.decode or self.engines

    @property
    def per_host(self) -> int:
        """Engines on one host."""
        return self.engines_per_host or self.total

    def layout(self, disk_scope: str) -> Layout:
        """Return the engines, host by host; with ``disk_scope=cluster`` all use one disk, otherwise each host has its own."""
        hosts = tuple(engine // self.per_host for engine in range(self.total))
        return Layout(
            hosts=hosts, disks=tuple(0 for _ in hosts) if disk_scope == "cluster" else hosts, prefill_engines=self.prefill
        )

    def plan_failures(self) -> list[Failure]:
        """Return the failures, in order of time. Raises ValueError."""
        failures = []
        for at, given in enumerate(self.failures):
            unknown = set(given) - {"engine", "at_s", "back_after_s"}
            if unknown or not {"engine", "at_s"} <= set(given):
                raise ValueError(f"failures[{at}] must have engine and at_s, and may have back_after_s, not {given}")
            try:
                failure = Failure(**{name: value for name, value in given.items() if value is not None})
            except ValueError as error:
                raise ValueError(f"failures[{at}].{error}") from error
            if failure.engine not in range(self.total):
                raise ValueError(f"failures[{at}].engine must be one of 0 to {self.total - 1}, not {failure.engine}")
            failures.append(failure)
        failures.sort(key=lambda failure: failure.at_s)
        self._check_overlaps(failures)
        return failures

    @staticmethod
    def _check_overlaps(failures: list[Failure]) -> None:
        back_at_s: dict[int, float] = {}
        for failure in failures:
            if failure.at_s <= back_at_s.get(failure.engine, -1.0):
                raise ValueError(f"failures: engine {failure.engine} fails at {failure.at_s} s, before it is back")
            back_at_s[failure.engine] = failure.at_s + failure.back_after_s
