"""The search for the highest rate, on attainments given as functions of the rate."""

from collections.abc import Callable

import pytest

from kvsim.plans.command_settings import Prices, SaturateSettings
from kvsim.run.saturation import Found, Probe, highest_rate


def search(
    attained: Callable[[float], float], start: float = 1.0, load: Callable[[float], float] = float, **settings: float
) -> Found:
    """Search with requests/s that equal the rate unless ``load`` says otherwise."""

    def probe(rate: float) -> Probe:
        return Probe(rate=rate, requests_per_s=load(rate), attainment=attained(rate))

    return highest_rate(probe, SaturateSettings(**settings), start)  # type: ignore[arg-type]


def step_at(limit: float) -> Callable[[float], float]:
    """Objectives that all requests meet up to a rate, and none above."""
    return lambda rate: float(rate <= limit)


@pytest.mark.parametrize("limit", [0.0101, 0.3, 0.99, 1.0, 7.3, 900.0])
@pytest.mark.parametrize("tolerance", [0.01, 0.05, 0.5])
def test_the_highest_rate_is_found_to_the_tolerance(limit: float, tolerance: float) -> None:
    found = search(step_at(limit), tolerance=tolerance)
    assert found.highest and found.lowest_above
    assert found.highest.rate <= limit < found.lowest_above.rate <= found.highest.rate * (1 + tolerance) * 1.0001
    assert not found.notes


def test_it_takes_few_runs() -> None:
    """One, one double that fails, and four bisections from a factor of 2 to one of 1.044."""
    found = search(step_at(1.5))
    assert len(found.probes) == 6
    assert [probe.rate for probe in found.probes] == sorted(probe.rate for probe in found.probes)


def test_no_rate_may_hold() -> None:
    found = search(lambda _: 0.0)
    assert found.highest is None and found.lowest_above and found.lowest_above.rate == pytest.approx(1 / 1024, rel=1e-4)
    assert found.notes == [f"searched down to a rate of {found.lowest_above.rate:g}, at which 0.00% meet the objectives"]


def test_objectives_that_some_requests_miss_without_load_end_the_search() -> None:
    """Below a rate of 0.5, 97% meet them, however low it is."""
    found = search(lambda rate: 0.97 if rate < 0.5 else 0.3)
    assert found.highest is None and len(found.probes) == 6
    assert found.notes[0].startswith("97.00% meet the objectives at a rate of 0.03125, and lower rates do not change that")


def test_a_closed_loop_may_hold_at_any_rate() -> None:
    """More than 5 requests/s never come."""
    found = search(lambda _: 1.0, load=lambda rate: min(rate, 5.0))
    assert found.highest and found.highest.rate == 16 and found.lowest_above is None
    assert "rates of 8 and 16 bring nearly the same load (5 and 5 requests/s): in a closed loop" in found.notes[0]
    assert "hold at the most load" in found.notes[0]


def test_a_closed_loop_may_fail_at_any_rate() -> None:
    found = search(lambda _: 0.0, load=lambda rate: max(rate, 0.5))
    assert found.highest is None and "fail at the least load" in found.notes[0]


def test_outcomes_that_are_not_monotone_are_reported() -> None:
    found = search(lambda rate: 1.0 if rate <= 1 else 0.5 if rate < 1.9 else 0.9)
    assert found.highest and found.highest.rate == 1
    assert any(note.startswith("not monotone: attainment is 50.00% at a rate of 1.4142 and 90.00% at 2") for note in found.notes)


def test_the_number_of_runs_is_limited() -> None:
    found = search(step_at(1.5), tolerance=0.001, most_runs=4)
    assert len(found.probes) == 4 and "saturate.most_runs=4" in found.notes[0]
    assert "saturate.most_runs=3" in search(step_at(100.0), most_runs=3).notes[0]


def test_the_attainment_that_is_asked_for_decides() -> None:
    found = search(lambda rate: 1 - rate / 10, attainment=0.8, tolerance=0.01)
    assert found.highest and found.highest.rate == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    "settings", [{"attainment": 0.0}, {"attainment": 1.1}, {"tolerance": 0.0}, {"most_runs": 1}, {"rate": 0.0}, {"rate": -1.0}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} must be"):
        SaturateSettings(**settings)  # type: ignore[arg-type]


def test_a_price_is_that_of_gpus_and_of_the_tiers_that_have_one() -> None:
    """Two GPUs at 3, and 100 GiB at 0.01."""
    n_bytes = {"gpu": 80 * 2**30, "cpu": 100 * 2**30, "disk": None}
    assert Prices(gpu=3.0, cpu_gib=0.01).per_hour(2, n_bytes) == pytest.approx(7.0)
    assert Prices(disk_gib=0.01).per_hour(1, n_bytes) is None
    assert Prices().per_hour(4, {"gpu": None}) == 4.0
    with pytest.raises(ValueError, match="cpu_gib must be 0 or more"):
        Prices(cpu_gib=-1.0)
