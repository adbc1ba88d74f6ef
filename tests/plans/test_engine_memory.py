"""More engines than this machine has memory for are refused before they take any."""

import pytest

from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.plans import engine_memory
from kvsim.plans.cluster_settings import ClusterSettings
from kvsim.plans.engine_memory import check_memory


def test_a_thousand_million_engines_take_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "cluster.engines=1000000000"]) == 2
    assert capfd.readouterr().err.startswith("kvsim: cluster.engines is 1,000,000,000: that many simulated engines take at least")


@pytest.mark.parametrize(
    ("settings", "needed_mb"),
    [
        ({"engines": 1_000}, 24 + 12),
        ({"engines": 1_000, "engines_per_host": 1}, 24),
        ({"engines": 1_000, "engines_per_host": 100}, 24 + 1.2),
        ({"prefill": 600, "decode": 400}, 24 + 12),
    ],
)
def test_the_limit_is_what_is_available(settings: dict[str, int], needed_mb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSettings(**settings)
    monkeypatch.setattr(engine_memory, "available_bytes", lambda: int(needed_mb * 1.02e6))
    check_memory(cluster)
    monkeypatch.setattr(engine_memory, "available_bytes", lambda: int(needed_mb * 0.98e6))
    with pytest.raises(UsageError, match=r"1,000: that many simulated engines take at least .* this machine has .* available"):
        check_memory(cluster)


def test_a_machine_that_does_not_say_has_its_physical_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> int:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(engine_memory, "available_bytes", unknown)
    check_memory(ClusterSettings(engines=100))
    with pytest.raises(UsageError, match="use fewer engines"):
        check_memory(ClusterSettings(engines=10**9))
