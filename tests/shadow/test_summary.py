"""What a shadow has found, in tables that need no explanation."""

from itertools import pairwise

import pytest

from kvsim.report.summary import Table
from kvsim.shadow.history import MOST_POINTS, History, Observed, Stretches
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.summary import facts, headlines, in_short, tables
from tests.shadow.seen import engine, ghost, snapshot

FIRST = ghost("as_configured", checked_requests=8, alike_requests=6, engine_points=-0.25)
TWICE = ghost("twice", points=6.1, hit_rate=0.561, differs="tiers.cpu.capacity=2GiB", hit_rate_by_tier={"gpu": 0.5, "cpu": 0.061})
WORSE = ghost("worse", points=-3.0, hit_rate=0.47, differs="eviction=fifo")


def test_the_first_table_has_the_points_beside_the_names() -> None:
    (table,) = tables(snapshot(FIRST, TWICE, WORSE), 0.4, {"twice": 0.44})
    assert table.columns == ("cache", "points", "hit rate", "recent", "from gpu", "from cpu", "settings")
    assert table.rows == [
        ("the engine", "", "", "40.00%", "", "", "as it says itself"),
        ("as_configured", "", "50.00%", "25.00%", "50.00%", "-", "as configured"),
        ("twice", "+6.1 ± 0.4", "56.10%", "25.00%", "50.00%", "6.10%", "tiers.cpu.capacity=2GiB"),
        ("worse", "-3.0", "47.00%", "25.00%", "50.00%", "-", "eviction=fifo"),
    ]
    assert "found as much as the engine said in 75.0% of 8 requests, and -0.2 points in all" in table.note


def test_the_best_ghost_is_the_first_headline() -> None:
    stopped = ghost("stopped", points=50.0, problem="it fails")
    assert headlines(snapshot(FIRST, WORSE, TWICE, stopped)) == [
        ("+6.1 points", "twice: tiers.cpu.capacity=2GiB"),
        ("-3.0 points", "worse: eviction=fifo"),
    ]
    assert headlines(snapshot(FIRST)) == []


def test_a_ghost_that_has_stopped_says_why() -> None:
    (table,) = tables(snapshot(FIRST, ghost("mine", problem="mine.py:3: no")), None, {})
    assert table.rows[1][-1] == "stopped: mine.py:3: no"


def test_engines_have_a_table_once_they_have_sent_events() -> None:
    silent = engine("silent", stored=0, pages={})
    lost = engine("tcp://b:1", rank=1, pages={"cpu": 2}, known=False, lost_batches=7, score=None)
    table: Table = tables(snapshot(FIRST, engines=(engine("tcp://a:1"), silent, lost)), None, {})[1]
    assert table.columns[:4] == ("engine", "rank", "gpu blocks", "cpu blocks")
    assert table.rows == [
        ("tcp://a:1", "-", "3", "0", "3", "0", "50.00%", "75.00%", "-", "known"),
        ("tcp://b:1", "1", "0", "2", "3", "0", "50.00%", "-", "-", "unknown since a gap (7 batches lost)"),
    ]


def test_facts_without_data_are_left_out() -> None:
    assert facts(snapshot(FIRST), None) == [("requests", "10"), ("memory", "2 KiB")]
    assert ("gaps", "2") in facts(snapshot(FIRST, gaps=2, events=5), 3) and ("recorded", "3 requests") in facts(
        snapshot(FIRST), 3
    )


def test_one_line_says_what_matters() -> None:
    assert in_short(snapshot(FIRST, TWICE), 0.4) == (
        "10 requests, the engine 40.00%, as_configured 50.00%, twice 56.10% (+6.1 points)"
    )


def test_the_engines_own_rate_is_of_the_last_requests_that_tell_it() -> None:
    observed = Observed(2)
    assert observed.hit_rate is None
    for cached in (0, None, 10, 30):
        observed.add(LiveRequest(0.0, (), 40, cached_tokens=cached))
    assert observed.hit_rate == 40 / 80


def test_a_history_stays_small_and_keeps_its_first_moment_or_the_next() -> None:
    history = History()
    for number in range(1, 5 * MOST_POINTS):
        history.add(snapshot(FIRST, requests=number, at_s=float(number)), None)
        history.add(snapshot(FIRST, requests=number, at_s=float(number)), None)  # nothing new
    (line,) = history.lines()
    times = [at_s for at_s, _ in line.points]
    assert line.name == "as_configured" and MOST_POINTS / 2 < len(times) <= MOST_POINTS
    assert times[0] < 20 and times[-1] > 5 * MOST_POINTS - 20 and times == sorted(times)
    steps = {second - first for first, second in pairwise(times)}
    assert len(steps) == 1


def test_noise_is_that_of_stretches_that_do_not_overlap() -> None:
    """Gains of 1, 2 and 3 points: a mean of 2, a deviation of 1, and t = 4.303 with two degrees of freedom."""
    stretches = Stretches(10)
    for number, gain in ((5, 0.99), (10, 0.01), (15, 0.99), (21, 0.02), (30, 0.99)):
        stretches.add(snapshot(FIRST, ghost("twice", recent_hit_rate=0.25 + gain), requests=number))
    assert stretches.noise() == {}
    stretches.add(snapshot(FIRST, ghost("twice", recent_hit_rate=0.28), requests=31))
    assert stretches.noise() == {"twice": pytest.approx(4.3027 / 3**0.5, abs=1e-3)}
