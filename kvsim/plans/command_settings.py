"""Settings of a command as a whole: a sweep, the search for a rate, the disk of a real machine."""

from dataclasses import dataclass, field
from pathlib import Path

from kvsim.hardware.tier_kinds import LEVELS
from kvsim.numbers import Real, Whole, check_number, check_settings


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Settings of a multirun as a whole."""

    fail_fast: bool = False
    dry_run: bool = False
    objective: list[str] | None = None
    seeds: int | None = None

    def __post_init__(self) -> None:
        check_settings(self, Whole(2), "seeds", or_null=True, hint="each configuration runs with so many")
        if self.objective is not None and not self.objective:
            raise ValueError("objective is empty: name fields of result.json, as [hit_rate, ttft_s.p99], or leave it out")


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """Settings of the disk tier on real hardware."""

    folder: str | None = None
    threads: int = 4

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "threads")

    @property
    def path(self) -> Path | None:
        """The folder chosen by the user; None for the default."""
        return None if self.folder is None else Path(self.folder)


@dataclass(kw_only=True)  # OmegaConf refuses values for a frozen class within another one
class Prices:
    """What an hour costs, in any unit."""

    gpu: float = 1.0
    """One GPU, with its memory."""
    cpu_gib: float = 0.0
    """One GiB of the CPU tier."""
    disk_gib: float = 0.0
    """One GiB of the disk tier."""
    remote_gib: float = 0.0
    """One GiB of the remote tier."""

    def __post_init__(self) -> None:
        for name in ("gpu", *[f"{name}_gib" for name in LEVELS[1:]]):
            check_number(f"price_per_hour.{name}", Real(least=0), getattr(self, name))

    def per_hour(self, gpus: int, tier_bytes: dict[str, int | None]) -> float | None:
        """Return the price of an hour; None if it depends on an unlimited tier."""
        total = self.gpu * gpus
        for name in LEVELS[1:]:
            price, n_bytes = getattr(self, f"{name}_gib"), tier_bytes.get(name, 0)
            if price and n_bytes is None:
                return None
            total += price * (n_bytes or 0) / 2**30
        return total


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What ``kvsim plan`` reads, and how far it looks."""

    prices: str | None = None
    """The file of prices and choices."""
    beyond: float | None = 1.0
    """Share above the price of the cheapest configuration that holds, up to which others are simulated; None: all are."""

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "beyond", or_null=True, hint="it is a share of the price")


@dataclass(frozen=True, kw_only=True)
class SaturateSettings:
    """How the highest rate is searched for."""

    attainment: float = 0.99
    """Share of the requests that must meet the objectives."""
    tolerance: float = 0.05
    """The search ends when a rate that fails is at most this share above one that holds."""
    most_runs: int = 30
    rate: float | None = None
    """A rate that is wanted: every configuration is run at it, and those that hold it are ordered by price."""
    price_per_hour: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        check_settings(self, Real(above=0, most=1), "attainment", hint="it is a share of the requests")
        check_settings(self, Real(least=0.001, most=1), "tolerance", hint="it is a share of the rate")
        check_settings(self, Whole(2), "most_runs")
        check_settings(self, Real(above=0), "rate", or_null=True, hint="it is a value of trace.rate")
