"""How far a simulation may be from real runs, and which runs are compared."""

from dataclasses import dataclass, field

from kvsim.numbers import Real, Whole, check_settings


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """Largest allowed errors of a simulation: absolute for hit rates, relative to the measured value for everything else."""

    hit_rate: float = 0.005
    """Absolute error of each tier's hit rate."""
    identical: float = 0.99
    """Smallest allowed share of requests with the same number of hit pages in every tier."""
    link_bytes: float = 0.01
    """Relative error of each link's bytes."""
    ttft_p50: float = 0.05
    ttft_p99: float = 0.10

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "hit_rate", "link_bytes", "ttft_p50", "ttft_p99")
        check_settings(self, Real(least=0, most=1), "identical", hint="it is a share of the requests")


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(Tolerances):
    """Which runs are compared, and the tolerances."""

    runs: int = 1
    """Real runs of the configuration."""
    simulations: int = 20
    """Simulations, if there are several real runs and the machine has noise."""
    measured: list[str] = field(default_factory=list)
    """Folders with recorded real runs, which replace new ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(1), "runs")
        check_settings(self, Whole(2), "simulations", hint="a single one has no spread")
