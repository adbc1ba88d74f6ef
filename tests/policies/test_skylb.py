"""SkyLB by hand, in pages of 4 tokens, and between engines whose work is reckoned by hand (tests/engine/small.py)."""

from typing import Any

import pytest

import kvsim
from kvsim.cluster.router import Report
from kvsim.errors import UsageError
from kvsim.policies.routing.skylb import SkyLB
from tests.cluster.small_cluster import small_cluster
from tests.engine.small import ask, seconds
from tests.policies.small_routing import SmallRouter, prompt, router, sent_to


def pending(small: SmallRouter, *counts: int) -> None:
    """The engines report how many requests wait there."""
    for engine, count in enumerate(counts):
        small.report(engine, Report(pending_requests=count), 0.0)


def test_engines_where_requests_wait_get_none() -> None:
    small = router(SkyLB())
    pending(small, 1, 0, 2)
    assert small.send(prompt(index=0), 0.0) == 1
    pending(small, 1, 3, 2)
    assert small.send(prompt(index=1), 0.0) is None
    pending(small, 1, 3, 0)
    assert small.send(prompt(index=1), 0.0) == 2


def test_engines_with_enough_requests_get_no_more() -> None:
    small = router(SkyLB(push="outstanding", max_outstanding=2), engines=2)
    assert [small.send(prompt(index=index), 0.0) for index in range(5)] == [0, 1, 0, 1, None]
    small.ended(prompt(index=1), 1, 1.0)
    assert small.send(prompt(index=4), 1.0) == 1


def test_the_longest_match_of_the_available_engines_decides_if_it_is_long_enough() -> None:
    """Of 21 tokens, engine 0 was sent 20, engine 1 12 and engine 2 8: 57% and 38%."""
    small = router(SkyLB())
    for engine, pages in enumerate((5, 3, 2)):
        sent_to(small, engine, prompt((0, pages), index=engine))
    asked = prompt((0, 5), index=9)
    for counts, loads, expected in (((0, 0, 0), (0, 0, 0), 0), ((1, 0, 0), (0, 9, 0), 1), ((1, 1, 0), (0, 0, 9), 2)):
        pending(small, *counts)
        for known, load in zip(small.engines.values(), loads, strict=True):
            known._outstanding_requests = load
        assert small.send(asked, 0.0) == expected
        small.ended(asked, expected, 0.0)
        small.policy._sent.forget(expected)  # type: ignore[attr-defined]
        sent_to(small, expected, prompt((0, (5, 3, 2)[expected]), index=expected))


def test_otherwise_the_engine_with_fewest_requests_gets_it() -> None:
    small = router(SkyLB())
    sent_to(small, 0, prompt((0, 2), index=0))
    assert small.send(prompt((0, 5), index=1), 0.0) == 1, "8 of 21 tokens"
    assert small.send(prompt((50, 5), index=2), 0.0) == 2


def test_a_request_that_waits_goes_to_the_first_engine_that_is_free() -> None:
    """An engine runs one request at a time, 17 s each; the second one takes 33 s. The end of a step tells what its beginning left
    waiting: engine 0 leaves one at 17 and 34 s, engine 1 at 50 s. At 67.5 s, one is known to wait on each. At 68 s, engine 0 says
    that it has left none at 51 s, and gets the request."""
    settings = {"max_running_requests": 1}
    cluster = small_cluster(gpu=10, routing=SkyLB(), settings=settings)
    times = (0, 0, 1, 2, 3, 20, 35, 36, 52, 67.5)
    asks = [ask(letter * (8 if at == 1 else 4), times[at]) for at, letter in enumerate("abcdefghij")]
    outcome = cluster.serve(*asks)
    assert outcome.columns["engine"].tolist() == [0, 1, 0, 1, 0, 0, 1, 1, 1, 0]
    assert outcome.ttft_s[-1] == seconds(0.5 + 17)


@pytest.mark.parametrize("staleness_s", [0.0, 0.2])
def test_every_request_is_served_under_load(staleness_s: float) -> None:
    trace: Any = kvsim.load_trace("synthetic", limit=150, rate=20.0)
    cluster = ("cluster.engines=3", "cluster.engines_per_host=1", "tiers.gpu.capacity=4000pages")
    result = kvsim.simulate(trace, *cluster, "routing=skylb", f"routing.staleness_s={staleness_s}")
    assert (result.record["requests"], result.record["rejected"]) == (150, 0)


def test_decode_engines_cannot_keep_requests() -> None:
    trace = kvsim.load_trace("synthetic", limit=5)
    with pytest.raises(UsageError, match=r"cluster.decode_routing: SkyLB keeps requests at the router"):
        kvsim.simulate(trace, "cluster.prefill=1", "cluster.decode=2", "routing@cluster.decode_routing=skylb")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("routing.push=all",), "routing.push must be one of pending, outstanding, not all"),
        (("routing.max_outstanding=5",), "routing.max_outstanding has no effect with these settings of SkyLB"),
        (("routing.push=outstanding", "routing.staleness_s=1"), "routing.staleness_s has no effect"),
    ],
)
def test_settings_that_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.simulate(kvsim.load_trace("synthetic", limit=2), "cluster.engines=2", "routing=skylb", *words)
