"""Requests that arrive at the same instant are found by the same step, wherever the clock stood before."""

import numpy as np

from tests.engine.small import ask, small_engine


def test_requests_of_one_instant_share_a_step() -> None:
    """The clock at 1.031 s, and 2 s more, are one rounding before 3.031 s: an engine that starts then misses one."""
    assert 1.031 + (3.031 - 1.031) < 3.031
    for early_s, late_s in ((1.031, 3.031), (1.03125, 3.03125)):
        outcome = small_engine(gpu=40).serve(ask("", early_s, tokens=1), ask("abcd", late_s), ask("efgh", late_s))
        assert outcome.arrival_s.tolist() == [early_s, late_s, late_s]
        assert outcome.ttft_s[1] == outcome.ttft_s[2]


def test_the_clock_stops_where_a_request_arrives() -> None:
    """After others, at a time that is more than twice theirs: where differences are rounded."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        early_s, late_s = 1 + rng.random(), 3 + rng.random()
        outcome = small_engine(gpu=40).serve(ask("", early_s, tokens=1), ask("a", late_s), ask("b", late_s))
        assert outcome.arrival_s[1] == outcome.arrival_s[2] and abs(outcome.arrival_s[1] - late_s) <= np.spacing(late_s)
        assert outcome.ttft_s[1] == outcome.ttft_s[2]
