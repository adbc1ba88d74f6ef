"""The noise of a run's numbers: against a slow model, and on differences whose distribution is known."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvsim.results import resampling
from kvsim.results.resampling import (
    FEWEST_BLOCKS,
    MOST_BLOCKS,
    STRETCHES,
    Resampled,
    blocks_of,
    difference,
    resampled,
    stretches,
    weights,
)  # fmt: skip

RECORD: dict[str, Any] = {
    "warmup_requests": 0, "slo": {"ttft_s": 1.0, "tpot_s": None, "attainment": 0.5, "goodput_requests_per_s": 2.0},
}  # fmt: skip


def columns(rng: np.random.Generator, requests: int, sessions: int = 0) -> dict[str, np.ndarray]:
    """Random requests, a tenth of them rejected, of which nothing counts."""
    prompts = rng.integers(100, 1000, requests)
    is_served = rng.random(requests) > 0.1
    hits = np.where(is_served, (prompts * rng.random(requests)).astype(np.int64), 0)
    times = np.where(is_served, rng.exponential(1.0, requests), np.nan)
    session = rng.integers(0, sessions, requests).astype(np.float64) if sessions else np.full(requests, np.nan)
    return {
        "prompt_tokens": prompts, "prompt_pages": prompts // 16, "hit_tokens_gpu": hits // 2, "hit_tokens_cpu": hits - hits // 2,
        "hit_pages_gpu": hits // 16, "ttft_s": times, "tpot_s": times / 10, "session": session,
        "status": np.where(is_served, "finished", "rejected"),
    }  # fmt: skip


def slowly(found: dict[str, np.ndarray], draw: int) -> dict[str, float]:
    """The measures of one draw, request by request: each block as often as it was drawn."""
    block, _ = blocks_of(found["session"])
    times = weights(int(block.max()) + 1)[draw]
    rows = [row for row in range(len(block)) for _ in range(int(times[block[row]]))]
    served = [row for row in rows if found["status"][row] == "finished"]
    waits = sorted(found["ttft_s"][row] for row in served)
    tokens, pages = (sum(int(found[f"prompt_{unit}"][row]) for row in served) for unit in ("tokens", "pages"))
    met = sum(1 for row in served if found["ttft_s"][row] <= 1.0) / len(rows)
    return {
        "hit_rate": sum(int(found["hit_tokens_gpu"][row] + found["hit_tokens_cpu"][row]) for row in served) / tokens,
        "page_hit_rate": sum(int(found["hit_pages_gpu"][row]) for row in served) / pages,
        "ttft_s_mean": sum(waits) / len(waits),
        "ttft_s_p99": waits[len(waits) - 1 - int(len(waits) * 0.01 + 1e-9)],
        "tpot_s_mean": sum(waits) / 10 / len(waits),
        "slo_attainment": met,
        "goodput_requests_per_s": met * 4.0,
    }


@pytest.mark.parametrize("sessions", [0, 30])
def test_each_draw_is_that_of_a_slow_model(sessions: int) -> None:
    found = columns(np.random.default_rng(1), 300, sessions)
    fast = resampled(RECORD, found)
    assert fast is not None and fast.has_sessions is bool(sessions)
    for draw in range(20):
        for measure, value in slowly(found, draw).items():
            assert fast.draws[measure][draw] == pytest.approx(value, rel=1e-9), measure


def with_rates(rates: np.ndarray, sizes: int = 1) -> Resampled:
    """A run whose sessions, each of ``sizes`` requests of 1,000 tokens, have these hit rates."""
    hits = np.repeat(np.round(rates * 1000).astype(np.int64), sizes)
    requests = len(hits)
    known = resampled(
        {"warmup_requests": 0},
        {
            "prompt_tokens": np.full(requests, 1000), "prompt_pages": np.full(requests, 10), "hit_tokens_gpu": hits,
            "hit_pages_gpu": hits // 100, "ttft_s": np.full(requests, np.nan), "tpot_s": np.full(requests, np.nan),
            "status": np.full(requests, "finished"), "session": np.repeat(np.arange(len(rates), dtype=np.float64), sizes),
        },
    )  # fmt: skip
    assert known is not None
    return known


def test_the_interval_of_independent_sessions_is_that_of_the_normal_distribution() -> None:
    """The mean of n differences has a standard error of their deviation over the root of n, however many requests each has."""
    rng = np.random.default_rng(2)
    base, gain = rng.random(400) / 2, rng.normal(0.02, 0.05, 400)
    for sizes in (1, 5):
        found = difference("hit_rate", (0.02, 0.0), with_rates(base + gain + 0.2, sizes), with_rates(base + 0.2, sizes))
        assert found is not None and not found.holds_zero
        assert (found.high - found.low) / 2 == pytest.approx(1.96 * gain.std() / 20, rel=0.1)
        assert (found.high + found.low) / 2 == pytest.approx(gain.mean(), abs=0.001)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        gain = rng.normal(0.01, 0.1, 60)
        found = difference("hit_rate", (0.0, 0.0), with_rates(0.5 + gain), with_rates(np.full(60, 0.5)))
        assert found is not None
        held += found.low <= 0.01 <= found.high
    assert 0.90 <= held / 200 <= 0.985


def test_pairs_cancel_what_both_runs_have_in_common() -> None:
    """Sessions differ by tens of points, but one run is 1 point better in each: no doubt is left."""
    rates = np.random.default_rng(4).random(100) * 0.8
    found = difference("hit_rate", (0.01, 0.0), with_rates(rates + 0.01), with_rates(rates))
    assert found is not None and found.low == pytest.approx(0.01, abs=0.001) == found.high


def test_runs_of_other_requests_are_not_compared() -> None:
    rng = np.random.default_rng(5)
    one, other = columns(rng, 200), columns(rng, 200)
    assert difference("hit_rate", (0.0, 0.0), resampled(RECORD, one), resampled(RECORD, other)) is None
    assert difference("hit_rate", (0.0, 0.0), resampled(RECORD, one), resampled(RECORD | {"warmup_requests": 20}, one)) is None
    assert difference("rejected", (0.0, 0.0), resampled(RECORD, one), resampled(RECORD, one)) is None
    assert resampled(RECORD, columns(rng, 2 * FEWEST_BLOCKS - 1)) is None, "too few to say anything"


def test_blocks_are_sessions_or_stretches() -> None:
    block, _ = stretches(1000)
    assert list(np.bincount(block)) == [1000 // STRETCHES] * STRETCHES
    sessions = np.array([7.0, 7.0, np.nan, 3.0, np.nan] + [float(100 + each) for each in range(FEWEST_BLOCKS)])
    block, has_sessions = blocks_of(sessions)
    assert has_sessions and list(block[:6]) == [0, 0, 1, 2, 3, 4], "a request without a session is one of its own"
    many, _ = blocks_of(np.arange(5000.0))
    assert many.max() + 1 == MOST_BLOCKS and set(np.bincount(many)) == {5}
    few, has_sessions = blocks_of(np.arange(100.0) % 3)
    assert not has_sessions and few.max() + 1 == STRETCHES


def test_percentiles_of_many_requests_take_little_memory() -> None:
    """40,000 requests and 1,000 draws at once would take 320 MB; slices take the same draws."""
    found = columns(np.random.default_rng(6), 40_000)
    tracemalloc.start()
    fast = resampled(RECORD, found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fast is not None and peak < 100e6
    for draw in (0, 999):
        assert fast.draws["ttft_s_p99"][draw] == pytest.approx(slowly(found, draw)["ttft_s_p99"])


def test_a_draw_of_slow_requests_looks_further_than_the_slowest_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    found = columns(np.random.default_rng(7), 300, 30)
    usual = resampled(RECORD, found)
    monkeypatch.setattr(resampling, "TAIL", 0.01)
    monkeypatch.setattr(resampling, "CELLS", 700)
    sliced = resampled(RECORD, found)
    assert usual is not None and sliced is not None
    assert (usual.draws["ttft_s_p99"] == sliced.draws["ttft_s_p99"]).all()
