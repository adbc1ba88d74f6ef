"""Tool calls on clusters: the next request may be sent elsewhere, engines fail, caches are reset. Nothing is left of any call."""

from functools import partial
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvsim.cluster.calls import CallsUnderWay
from kvsim.cluster.failure import Failure
from kvsim.core.request import RESETS, Reset
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.routing.round_robin import RoundRobin
from tests.cluster.small_cluster import Sent, SmallCluster, small_cluster
from tests.engine.calling import Planned, calls_of
from tests.engine.drawn import PLACEMENTS, SETTINGS, WORDS, machines
from tests.engine.small import Ask, ask, hits, make_requests, seconds
from tests.policies.small import POLICIES, policy_of

SHAPES: list[dict[str, Any]] = [
    {"hosts": (0,)},
    {"hosts": (0, 0)},
    {"hosts": (0, 1), "is_disk_shared": True},
    {"hosts": (0, 0), "is_cpu_divided": True},
]
PLANNED = partial(Planned, begin_s=10.0)


def two(*engines: int, **settings: Any) -> SmallCluster:
    """Two engines over one CPU tier, which write back; ``engines`` serve the requests in turn."""
    known: dict[str, Any] = {"gpu": 10, "cpu": 20, "placement": WriteBack, "settings": {"overlap": "none"}}
    return small_cluster(prefetch=PLANNED, routing=Sent(*engines), hosts=(0, 0), **(known | settings))


def test_an_upload_is_wasted_if_the_next_request_is_sent_elsewhere() -> None:
    """Both engines load the pages: the first one in vain, from 27 to 31 s, the other one at 37 s."""
    cluster = two(0, 1)
    outcome = cluster.serve(ask("abcd"), ask("abcdef", after=0, delay_s=20.0))
    assert hits(outcome, 1) == (0, 4, 0) and outcome.ttft_s[1] == seconds(4.0 + 9.0)
    first, second = cluster.engines
    assert calls_of(first) == {"calls": 1, "offloads": 1, "offloaded": 4, "uploads": 1, "uploaded": 4, "wasted": 4}
    assert calls_of(second) == {}
    assert outcome.tool_calls["wasted_pages"] == outcome.tool_calls["uploaded_pages"] == 4


def test_pages_that_another_engine_has_are_written_down_nevertheless() -> None:
    """Another engine's copy is of no use to this one."""
    cluster = two(0, 1, 0)
    cluster.serve(ask("abcd"), ask("abcd"), ask("abcdef", after=0, delay_s=20.0))
    assert calls_of(cluster.engines[0])["used"] == 4


def test_a_failure_ends_the_calls_of_an_engine() -> None:
    """Its pages are back from 31 s on; it fails at 33 s and returns at 35 s. The CPU tier still has them."""
    cluster = two(0, 0, failures=[Failure(engine=0, at_s=33.0, back_after_s=2.0)])
    outcome = cluster.serve(ask("abcd"), ask("abcdef", after=0, delay_s=20.0))
    assert hits(outcome, 1) == (0, 4, 0)
    assert calls_of(cluster.engines[0])["wasted"] == 4


def test_the_request_that_shares_most_continues_a_call() -> None:
    """A sub-agent has a prompt of its own, and the agent waits for it: it continues its own request, and no other one."""
    cluster = two(0)
    cluster.serve(ask("abcd"), ask("axy", after=0), ask("abcde", after=0, joins=(1,), delay_s=5.0))
    calls = cluster.engines[0].calls
    assert calls is not None and calls.counts.calls == 1
    policy: Any = calls.policy
    assert [call for call, _ in policy.ended] == [0]


def test_a_request_without_shared_pages_continues_nothing() -> None:
    cluster = two(0)
    cluster.serve(ask("abcd"), ask("xyz", after=0, delay_s=50.0))
    assert calls_of(cluster.engines[0]) == {}


@st.composite
def tasks(draw: st.DrawFn) -> list[Ask]:
    """Requests of which most continue one before them, with its prompt and more."""
    some: list[Ask] = []
    at = 0.0
    for index in range(draw(st.integers(2, 16))):
        at += draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
        after = draw(st.integers(-1, index - 1))
        word = draw(WORDS) if after < 0 else (some[after].word + draw(WORDS))[:9]
        output, tokens = draw(st.sampled_from([1, 1, 2, 5, 15])), draw(st.integers(1, 4))
        joins = tuple({draw(st.integers(0, index - 1))} - {after}) if after >= 0 and draw(st.booleans()) else ()
        delay_s = draw(st.sampled_from([0.0, 2.0, 15.0, 60.0]))
        some.append(ask(word, at, tokens=tokens, output=output, after=after, joins=joins, delay_s=delay_s))
    return some


@given(st.data())
@SETTINGS
def test_no_order_of_events_breaks_what_is_kept_for_calls(data: st.DataObject) -> None:
    draw = data.draw
    tiers = draw(st.integers(2, 3))
    shape = draw(st.sampled_from(SHAPES))
    until_s = draw(st.sampled_from([0.5, 8.0, 200.0, inf]))
    begin_s = draw(st.sampled_from([None, 0.0, 3.0, 20.0]))
    placements: list[Any] = [draw(PLACEMENTS), draw(PLACEMENTS)]
    cluster = small_cluster(
        gpu=draw(st.integers(3, 14)),
        cpu=draw(st.integers(1, 14)),
        disk=draw(st.integers(1, 14)) if tiers > 2 else 0,
        eviction=partial(policy_of, draw(st.sampled_from(POLICIES))),
        placement=placements,
        prefetch=partial(Planned, offloads=draw(st.booleans()), begin_s=begin_s, until_s=until_s),
        routing=RoundRobin(),
        hardware=draw(machines()),
        cache_output=draw(st.booleans()),
        settings={
            "max_batch_tokens": draw(st.sampled_from([3, 10, 1000])),
            "max_running_requests": draw(st.sampled_from([1, 3, 100])),
            "overlap": draw(st.sampled_from(["none", "layerwise"])),
            "links": draw(st.sampled_from(["fifo", "shared"])),
        },
        failures=[Failure(engine=0, at_s=draw(st.sampled_from([5.0, 40.0])), back_after_s=9.0)] if draw(st.booleans()) else (),
        **shape,
    )
    requests = make_requests(draw(tasks()))
    if draw(st.booleans()):
        requests[-1].resets = (Reset(draw(st.sampled_from(RESETS)), draw(st.sampled_from([10.0, 60.0]))),)
    cluster.serve_requests(requests)
    for engine in cluster.engines:
        counts = calls_of(engine)
        assert counts.get("uploaded", 0) == counts.get("used", 0) + counts.get("wasted", 0)
        assert counts.get("offloads", 0) <= counts.get("calls", 0) >= counts.get("uploads", 0)
    assert isinstance(cluster.calls, CallsUnderWay) and not cluster.calls._began
