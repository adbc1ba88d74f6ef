"""Requests that an admission policy refuses, by hand and against slow models. See small.py and small_cluster.py.

A prompt of a letter takes 5 s (a page and a token), one of two letters 9 s; its first token is there when it is computed.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cluster.failure import Failure
from kvsim.core.answers import PolicyError
from kvsim.core.fan_out import AFTER_WARM_UP, AT_ONCE, TOGETHER
from kvsim.core.request import Request
from kvsim.engine.outcome import FINISHED, REJECTED, SHED, Outcome
from kvsim.policies.admission.base import AdmissionPolicy, ClusterLoad
from kvsim.policies.admission.context import AdmissionContext
from kvsim.policies.admission.predicted_ttft import PredictedTtft
from kvsim.policies.admission.priority_shed import PriorityShed
from kvsim.policies.admission.queue_limit import QueueLimit
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.routing.round_robin import RoundRobin
from tests.cluster.small_cluster import SmallCluster, small_cluster
from tests.engine.drawn import SETTINGS
from tests.engine.small import ask, make_requests, seconds

ONE = (0,)
"""The host of a single engine."""
SEEN = (
    "waiting_requests",
    "running_requests",
    "prefills",
    "prefill_tokens",
    "computing_s",
    "decoding_requests",
    "decoding_tokens",
    "begun_prefills",
    "queued_prefills",
    "answers",
    "free_tokens",
)


class Asked(AdmissionPolicy):
    """Refuses the requests with these numbers, and keeps what it has seen of each."""

    def __init__(self, *refused: int, by: str = "cluster") -> None:
        self.refused = refused
        self.by = by
        self.seen: list[tuple[int, list[dict[str, Any]]]] = []
        self.loads: list[tuple[float, float, int]] = []

    @property
    def goes_by(self) -> str:
        return self.by

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        self.loads.append((load.now, load.waited_s, load.kept_requests))
        self.seen.append((request.index, [{name: getattr(one, name) for name in SEEN} for one in load.engines]))
        return request.index not in self.refused


def one_engine(policy: AdmissionPolicy, **settings: Any) -> SmallCluster:
    return small_cluster(gpu=settings.pop("gpu", 64), hosts=ONE, admission=policy, **settings)


def shed(outcome: Outcome) -> list[int]:
    return [index for index, status in enumerate(outcome.status.tolist()) if status == SHED]


# --- by hand -----------------------------------------------------------------------------------------------------------------


def test_a_request_that_finds_too_many_waiting_is_refused() -> None:
    """Request 0 runs until 5 and 1 waits; 2 finds it waiting. At 6, 1 runs, until 10, and 3 may wait, until then."""
    outcome = one_engine(QueueLimit(waiting_requests=1)).serve(ask("a"), ask("b", 1), ask("c", 2), ask("d", 6))
    assert outcome.status.tolist() == [FINISHED, FINISHED, SHED, FINISHED]
    assert outcome.ttft_s.tolist() == seconds([5.0, 9.0, float("nan"), 9.0])
    assert outcome.engine.tolist() == [0, 0, -1, 0] and outcome.arrival_s[2] == 2.0
    assert outcome.has_admission and outcome.simulated_s == seconds(15.0)


@pytest.mark.parametrize(("limit", "refused"), [(9, [2]), (10, []), (4, [1, 2])])
def test_prompt_tokens_to_compute_are_limited(limit: int, refused: list[int]) -> None:
    """At 1, the 5 tokens of the step under way are to be computed; at 2, those and 5 that wait, unless they were refused."""
    policy = QueueLimit(waiting_requests=None, prefill_tokens=limit)
    assert shed(one_engine(policy).serve(ask("a"), ask("b", 1), ask("c", 2))) == refused


def test_tokens_that_are_cached_are_not_to_be_computed() -> None:
    """Request 1 repeats two pages and computes one token of its 9, which 2 finds waiting besides the 5 of the step under way."""
    policy = Asked()
    one_engine(policy).serve(ask("ab"), ask("c", 10), ask("ab", 11), ask("d", 12))
    assert [one["prefills"] for _, (one,) in policy.seen] == [(), (), ((0, 5),), ((0, 5), (8, 9))]
    assert [one["prefill_tokens"] for _, (one,) in policy.seen] == [0, 0, 5, 6]
    assert [one["computing_s"] for _, (one,) in policy.seen] == seconds([0.0, 0.0, 1.0, 2.0])


def test_kv_in_use_is_limited() -> None:
    """Request 0 has 4 of 8 pages until it ends."""
    policy = QueueLimit(waiting_requests=None, kv_use=0.4)
    outcome = one_engine(policy, gpu=8).serve(ask("abc"), ask("d", 1), ask("e", 20))
    assert shed(outcome) == [1]


@pytest.mark.parametrize(("objective", "refused"), [(9.0, []), (8.9, [1])])
def test_a_request_that_would_be_late_is_refused(objective: float, refused: list[int]) -> None:
    """At 1, 4 s are left of request 0, and 1 takes 5."""
    known = {"ttft_s": lambda request: objective}
    outcome = one_engine(PredictedTtft(), known=known).serve(ask("a"), ask("b", 1))
    assert shed(outcome) == refused
    assert refused or outcome.ttft_s[1] == seconds(9.0)


def test_the_objective_is_that_of_the_class_times_a_factor() -> None:
    """Requests 1 and 2 would have their first tokens after 9 and 13 s: 2 misses 1.5 times its objective of 8 s, not of 12."""
    objectives = {1: 6.0, 2: 8.0}
    known = {"ttft_s": lambda request: objectives.get(request.index, inf)}
    asks = ask("a"), ask("b", 1), ask("c", 2)
    assert shed(one_engine(PredictedTtft(factor=1.5), known=known).serve(*asks)) == [2]
    objectives[2] = 12.0
    assert shed(one_engine(PredictedTtft(factor=1.5), known=known).serve(*asks)) == []
    assert shed(one_engine(PredictedTtft(ttft_s=8.5, factor=1.0), known=known).serve(*asks)) == [1]


def test_what_is_cached_of_a_prompt_is_not_in_its_time() -> None:
    known = {"ttft_s": lambda request: 5.0}
    outcome = one_engine(PredictedTtft(), known=known).serve(ask("a"), ask("ab", 10), ask("xy", 20))
    assert shed(outcome) == [2], "5 of its 9 tokens, against all 9"


def test_what_has_pages_and_how_far_answers_are_is_known() -> None:
    """Request 0 decodes from 5 on, a step a second in a leap, over 2 pages of 4 tokens; 1 needs 9 s for its prompt, from 8 on."""
    policy = Asked()
    one_engine(policy, gpu=16).serve(ask("a", output=4), ask("bc", 7.5), ask("d", 9), ask("e", 10))
    names = "begun_prefills", "queued_prefills", "answers", "free_tokens"
    seen = [tuple(one[name] for name in names) for _, (one,) in policy.seen]
    assert seen[0] == ((), (), (), 64)
    assert seen[1] == ((), (), ((5, 3),), 56), "steps end at 6 and 7"
    assert seen[2][:2] == (((0, 9),), ()) and seen[3][:2] == (((0, 9),), ((0, 5),))


@pytest.mark.parametrize(("waits_for_room", "refused"), [(False, []), (True, [2])])
def test_a_request_that_would_wait_for_room_is_late(waits_for_room: bool, refused: list[int]) -> None:
    """Request 0 tells that answers have 7 tokens. Request 1 has all memory from 20 to 51, the end of its seventh token. At 49, 2
    would be computed until 58, if it had not to wait for that: so its first token comes at 60."""
    known = {"ttft_s": lambda request: 10.0 if request.index == 2 else 1000.0}
    policy = PredictedTtft(waits_for_room=waits_for_room)
    outcome = one_engine(policy, gpu=8, known=known).serve(ask("x", output=7), ask("abcdef", 20, output=7), ask("gh", 49))
    assert outcome.status[:2].tolist() == [FINISHED] * 2 and shed(outcome) == refused
    assert refused or outcome.ttft_s[2] == seconds(11.0)


def test_lengths_of_answers_are_those_of_the_same_engine() -> None:
    """Engine 0 gets 0 and 2, engine 1 gets 1 and 3: each policy is told of its own, of what has been answered."""
    told: list[tuple[int, int, float]] = []

    class Told(Asked):
        def on_answered(self, request: Request, now: float) -> None:
            told.append((self.engine, request.index, now))

        def bind(self, context: AdmissionContext) -> None:
            self.engine = next(numbers)

    numbers = iter(range(2))
    outcome = small_cluster(gpu=64, routing=RoundRobin(), admission=Told(2, by="engine")).serve(
        ask("a", output=3), ask("b"), ask("c", 1), ask("d", 2)
    )
    assert shed(outcome) == [2]
    assert [(engine, index) for engine, index, _ in told] == [(1, 1), (0, 0), (1, 3)]
    assert [now for *_, now in told] == seconds([5.0, 7.0, 10.0])


def test_slow_decoding_refuses_requests() -> None:
    """Steps take a second for each decoding request: with two of them under way, a third one makes it 3 s."""
    known = {"ttft_s": lambda request: inf, "tpot_s": lambda request: 2.5}
    policy = PredictedTtft(ttft_s=1000.0, decode_load=True)
    cluster = one_engine(policy, known=known)
    outcome = cluster.serve(ask("a", output=50), ask("b", output=50), ask("c", 20))
    assert shed(outcome) == [2]


def test_sheddable_requests_are_refused_while_the_cluster_is_saturated() -> None:
    """With a request waiting, saturation is 1; 2 is sheddable and 3 is not. When nothing waits, 4 is admitted."""
    requests = make_requests([ask("a"), ask("b", 1), ask("c", 2), ask("d", 3), ask("e", 30)])
    requests[2].priority = requests[4].priority = -1
    outcome = one_engine(PriorityShed(waiting_requests=1)).serve_requests(requests)
    assert shed(outcome) == [2]


def test_less_important_requests_are_refused_earlier_with_steps() -> None:
    """At a saturation of 0.5, priority -6 is refused with steps of 0.1, -5 is not."""
    requests = make_requests([ask("a"), ask("b", 1), ask("c", 2), ask("d", 3)])
    requests[2].priority, requests[3].priority = -6, -5
    policy = PriorityShed(waiting_requests=2, step=0.1, kv_use=1.0)
    assert shed(one_engine(policy, gpu=10**6).serve_requests(requests)) == [2]


# --- several engines ---------------------------------------------------------------------------------------------------------


def test_a_busy_engine_refuses_what_the_router_sends_it_or_all_are_busy() -> None:
    """Engine 0 gets 0, 2 and 4: 4 finds 2 waiting there. Engine 1 has a request, which does not wait."""
    asks = ask("a"), ask("b"), ask("c", 1), ask("xy", 1.5), ask("d", 2)
    of_engine = small_cluster(gpu=64, routing=RoundRobin(), admission=QueueLimit(waiting_requests=1)).serve(*asks)
    assert shed(of_engine) == [4]
    of_cluster = small_cluster(gpu=64, routing=RoundRobin(), admission=QueueLimit(of="cluster", waiting_requests=1))
    outcome = of_cluster.serve(*asks, ask("e", 3))
    assert shed(outcome) == [4, 5], "both have one waiting from 1.5 on"


def test_what_is_refused_before_the_router_is_not_routed() -> None:
    """The second of three requests is refused: by the gateway, the third goes to engine 1; by engine 1, to engine 0."""
    for by, last in (("cluster", 1), ("engine", 0)):
        outcome = small_cluster(gpu=64, routing=RoundRobin(), admission=Asked(1, by=by)).serve(ask("a"), ask("b"), ask("c"))
        assert shed(outcome) == [1] and outcome.engine.tolist() == [0, -1, last]


def test_a_request_that_was_admitted_is_not_asked_about_again() -> None:
    """Engine 0 fails at 3; its request goes to engine 1, which has a request waiting."""
    policy = Asked()
    cluster = small_cluster(
        gpu=64, routing=RoundRobin(), admission=policy, failures=[Failure(engine=0, at_s=3.0, back_after_s=inf)]
    )
    outcome = cluster.serve(ask("a"), ask("b"), ask("c", 20))
    assert not shed(outcome) and [index for index, _ in policy.seen] == [0, 1, 2]
    assert outcome.decoder.tolist() == [1, 1, 1]


def test_without_an_engine_the_policy_sees_none() -> None:
    """Both engines are down from 3 to 9: request 2 is refused, as with GAIE, or waits."""
    failures = [Failure(engine=number, at_s=3.0, back_after_s=6.0) for number in (0, 1)]
    for sheddable in (True, False):
        requests = make_requests([ask("a"), ask("b"), ask("c", 4)])
        requests[2].priority = -1 if sheddable else 0
        cluster = small_cluster(gpu=64, routing=LeastLoaded(), admission=PriorityShed(), failures=failures)
        assert shed(cluster.serve_requests(requests)) == ([2] if sheddable else [])
    policy = Asked()
    small_cluster(gpu=64, routing=LeastLoaded(), admission=policy, failures=failures).serve(ask("a"), ask("b"), ask("c", 4))
    assert policy.seen[2] == (2, []) and policy.loads[2] == (4.0, 0.0, 2), "and two requests that wait for an engine"


def test_a_request_that_waited_before_the_router_has_less_time() -> None:
    """Engine 0 is down from 3 to 9. Request 1 came at 4: at 9, it would have its first token at 19, after request 0."""
    failures = [Failure(engine=0, at_s=3.0, back_after_s=6.0)]
    for objective, refused in ((15.0, []), (14.0, [1])):
        known = {"ttft_s": lambda request, objective=objective: objective}
        cluster = one_engine(PredictedTtft(), known=known, failures=failures)
        assert shed(cluster.serve(ask("a"), ask("b", 4))) == refused


def test_where_prefill_and_decode_are_apart_both_are_seen() -> None:
    """Engine 1 decodes request 0 from 6 on."""
    policy = Asked()
    cluster = small_cluster(gpu=64, hosts=(0, 0), prefill=1, admission=policy)
    seen: list[Any] = []

    def admits(request: Request, load: ClusterLoad) -> bool:
        seen.append(
            [[(one.engine, one.decoding_requests, one.prefill_tokens) for one in many] for many in (load.engines, load.decoders)]
        )
        return request.index != 2

    assert cluster.gate is not None
    cluster.gate._asks = [admits]
    outcome = cluster.serve(ask("a", output=90), ask("b", 3), ask("c", 12))
    assert shed(outcome) == [2]
    assert seen == [[[(0, 0, 0)], [(1, 0, 0)]], [[(0, 0, 5)], [(1, 0, 0)]], [[(0, 0, 0)], [(1, 1, 0)]]]


# --- what follows ------------------------------------------------------------------------------------------------------------


def test_requests_that_wait_for_a_refused_one_are_never_sent() -> None:
    """A conversation ends with the error; another one goes on."""
    outcome = one_engine(Asked(0)).serve(
        ask("a", 1), ask("ab", after=0, delay_s=3), ask("abc", after=1), ask("x", 2), ask("xy", after=3, delay_s=1)
    )
    assert shed(outcome) == [0, 1, 2]
    assert outcome.arrival_s.tolist() == seconds([1.0, 1.0, 1.0, 2.0, 8.0])
    assert outcome.ttft_s.tolist()[3:] == seconds([5.0, 5.0])


@pytest.mark.parametrize("refused", [0, 1])
def test_a_join_is_never_sent_if_one_of_what_it_awaits_was_refused(refused: int) -> None:
    outcome = one_engine(Asked(refused)).serve(ask("a"), ask("b", 1), ask("c", after=0, joins=(1,)), ask("d", after=2))
    assert shed(outcome) == sorted([refused, 2, 3])


def test_a_request_that_can_never_fit_is_rejected_not_refused() -> None:
    policy = Asked(0, 1)
    outcome = one_engine(policy, gpu=4).serve(ask("abcdefgh"), ask("a"))
    assert outcome.status.tolist() == [REJECTED, SHED] and [index for index, _ in policy.seen] == [1]


@pytest.mark.parametrize("by", ["engine", "cluster"])
def test_all_samples_of_a_request_are_refused_together(by: str) -> None:
    """Three answers, whether they begin apart or not."""
    for samples in (TOGETHER, AT_ONCE, AFTER_WARM_UP):
        policy = Asked(0, by=by)
        cluster = one_engine(policy)
        cluster.samples = samples
        requests = make_requests([ask("a"), ask("b", 1)])
        requests[0].samples = requests[1].samples = 3
        outcome = cluster.serve_requests(requests)
        assert outcome.status.tolist() == [SHED, FINISHED] and [index for index, _ in policy.seen] == [0, 1]


def test_an_answer_that_is_none_is_an_error() -> None:
    class Wrong(Asked):
        def admits(self, request: Request, load: ClusterLoad) -> Any:
            return None

    with pytest.raises(
        PolicyError, match=r"the admission policy Wrong returned None from admits\(\), not True or False: is a return"
    ):
        one_engine(Wrong()).serve(ask("a"))
    with pytest.raises(PolicyError, match="the admission policy Asked returned 'host' from goes_by, not engine or cluster"):
        one_engine(Asked(by="host"))


# --- slow models -------------------------------------------------------------------------------------------------------------

Arrival = tuple[float, int]
"""Time, and pages of the prompt; one token more is computed."""
ARRIVALS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 6)), min_size=1, max_size=25).map(
    lambda drawn: [(time / 8 + 0.01 * at, pages) for at, (time, pages) in enumerate(sorted(drawn))]
)
"""No two of them at the same time, and none when a step ends."""


class SlowEngine:
    """An engine that computes whatever waits in one step, and then what has come meanwhile."""

    def __init__(self) -> None:
        self.ends_s = -inf
        self.running = 0
        self.waiting: list[tuple[float, int]] = []
        self.ttft_s: list[float] = []
        self._order: list[int] = []
        self._running: list[tuple[int, float]] = []
        self.first: dict[int, float] = {}

    def until(self, now: float) -> None:
        """End the steps that end before a time, and begin the next ones."""
        while self.ends_s <= now and self.waiting:
            began_s = max(self.ends_s, self.waiting[0][0])
            tokens = sum(tokens for _, tokens in self.waiting)
            self.ends_s = began_s + tokens
            self.ttft_s += [self.ends_s - came_s for came_s, _ in self.waiting]
            self.waiting = []

    def left_s(self, now: float) -> float:
        return max(0.0, self.ends_s - now) + sum(tokens for _, tokens in self.waiting)


def slow(arrivals: Sequence[Arrival], admits: Callable[[SlowEngine, float, int], bool]) -> tuple[list[int], list[float]]:
    """Which requests are refused, and the times to first token of the others in order."""
    engine, refused = SlowEngine(), []
    for at, (now, pages) in enumerate(arrivals):
        engine.until(now)
        tokens = 4 * pages + 1
        if not admits(engine, now, tokens):
            refused.append(at)
            continue
        engine.waiting.append((now, tokens))
        engine.until(now)
    engine.until(inf)
    return refused, engine.ttft_s


def played(arrivals: Sequence[Arrival], policy: AdmissionPolicy, **known: Any) -> tuple[list[int], list[float]]:
    """The same of the simulation; no two prompts share a page."""
    letters = iter(map(chr, range(0x4E00, 0x9FFF)))
    asks = [ask("".join(next(letters) for _ in range(pages)), now) for now, pages in arrivals]
    outcome = one_engine(policy, gpu=4000, known=known).serve(*asks)
    return shed(outcome), [time for time in outcome.ttft_s.tolist() if time == time]


@given(ARRIVALS, st.integers(1, 4))
@SETTINGS
def test_a_queue_limit_is_as_in_a_slow_model(arrivals: list[Arrival], limit: int) -> None:
    refused, ttft_s = played(arrivals, QueueLimit(waiting_requests=limit))
    expected, times = slow(arrivals, lambda engine, now, tokens: len(engine.waiting) < limit)
    assert refused == expected and ttft_s == seconds(times)


@given(ARRIVALS, st.integers(5, 60).map(lambda eighths: eighths + 0.003))
@SETTINGS
def test_predictions_are_as_in_a_slow_model(arrivals: list[Arrival], objective: float) -> None:
    """Here steps take a second for each token, so that predictions are exact: nobody who is admitted is late, nobody in vain."""
    refused, ttft_s = played(arrivals, PredictedTtft(), ttft_s=lambda request: objective)
    expected, times = slow(arrivals, lambda engine, now, tokens: engine.left_s(now) + tokens <= objective)
    assert refused == expected and ttft_s == seconds(times)


@given(ARRIVALS, st.data())
@SETTINGS
def test_a_policy_that_refuses_nothing_changes_nothing(arrivals: list[Arrival], data: st.DataObject) -> None:
    """Of conversations, over two engines of little memory: to the last bit what a cluster without a policy does."""
    asks = [
        ask("abcdef"[: pages + 1], now, output=3, after=data.draw(st.integers(-1, at - 1)))
        for at, (now, pages) in enumerate(arrivals)
    ]
    outcomes = [
        small_cluster(gpu=9, routing=LeastLoaded(), admission=policy).serve(*asks)
        for policy in (None, Asked(), Asked(by="engine"), QueueLimit(waiting_requests=1000, prefill_tokens=10**6))
    ]
    for outcome in outcomes[1:]:
        for name, values in outcomes[0].columns.items():
            assert values.tobytes() == outcome.columns[name].tobytes(), name


@given(ARRIVALS, st.sets(st.integers(0, 24)), st.data())
@SETTINGS
def test_every_request_ends_whatever_is_refused(arrivals: list[Arrival], numbers: set[int], data: st.DataObject) -> None:
    """What waits for a refused request is never sent, and nothing else is."""
    after = [data.draw(st.integers(-1, at - 1)) for at in range(len(arrivals))]
    asks = [ask("abcdef"[: pages + 1], now, output=2, after=before) for (now, pages), before in zip(arrivals, after, strict=True)]
    by, prefill = data.draw(st.sampled_from(["engine", "cluster"])), data.draw(st.sampled_from([0, 1]))
    cluster = small_cluster(gpu=9, hosts=(0, 0), prefill=prefill, routing=LeastLoaded(), admission=Asked(*numbers, by=by))
    outcome = cluster.serve(*asks)
    expected: set[int] = set()
    for at, before in enumerate(after):
        if at in numbers or before in expected:
            expected.add(at)
    assert shed(outcome) == sorted(expected)
