"""Deficit longest prefix match by hand and against a slow model. Prompts are words, a page of 16 tokens for each letter."""

from random import Random
from typing import Any

import pytest

import kvsim
from kvsim.engine.job import Job
from kvsim.errors import UsageError
from kvsim.policies.context import PolicyContext
from kvsim.policies.scheduling.dlpm import Dlpm
from tests.engine.small import ask, make_requests, small_engine
from tests.policies.small_queue import SmallQueue, small_queue
from tests.workloads import EXAMPLES, random_word


def admit(small: SmallQueue, count: int, tokens: int) -> str:
    """The words of the next requests, each with ``tokens`` tokens to compute."""
    small.queue.begin_round(0.0)
    words = []
    for _ in range(count):
        job = small.queue.first()
        small.queue.remove(job)
        small.queue.admitted(job, tokens)
        words.append(small.words[job.place])
    return " ".join(words)


def deficits(small: SmallQueue, policy: Dlpm) -> dict[Any, float]:
    return {name: client.deficit for name, client in policy._clients._clients.items()}


def test_the_longest_prefix_goes_first_until_its_client_has_had_its_share() -> None:
    """abcd is cached. Client A, with the longest prefixes, gets 100 tokens; a request costs 60. Then B, whose prefixes are
    shorter, and only when both have nothing left A again."""
    policy = Dlpm(quantum_tokens=100.0)
    small = small_queue(policy, "abcd")
    small.wait("abcd1", "abcd2", "abcd3", "abcd4", tenant="A")
    small.wait("ab1", "x", tenant="B")
    assert admit(small, 2, 60) == "abcd1 abcd2"
    assert deficits(small, policy) == {"A": -20, "B": 100}
    assert admit(small, 2, 60) == "ab1 x"
    assert deficits(small, policy) == {"A": -20, "B": -20}
    assert admit(small, 2, 60) == "abcd3 abcd4"
    assert deficits(small, policy) == {"A": -40, "B": 80}


def test_what_is_generated_costs_twice() -> None:
    policy = Dlpm(quantum_tokens=100.0)
    small = small_queue(policy)
    a, b = *small.wait("a", tenant="A"), *small.wait("b", tenant="B")
    assert admit(small, 1, 10) == "a"
    small.queue.generated(a, 30)
    assert deficits(small, policy)["A"] == 100 - 10 - 60
    small.queue.generated(a, 50)
    small.queue.generated(a, 50)
    assert deficits(small, policy)["A"] == 100 - 10 - 100
    small.wait("c", tenant="A")
    assert admit(small, 2, 10) == "b c"
    assert b.told == 0


def test_clients_far_in_debt_are_refilled_until_one_of_them_has_something() -> None:
    """Debts of 250 and 120: two quanta of 100 make 80 of B's, and -50 of A's. C, with 30 left, gets none; D, of whom nothing
    waits, two."""
    policy = Dlpm(quantum_tokens=100.0)
    small = small_queue(policy)
    for name, deficit in (("A", -250.0), ("B", -120.0), ("C", 30.0), ("D", -500.0)):
        policy._clients.of(name).deficit = deficit
    small.wait("a", tenant="A")
    small.wait("b", tenant="B")
    assert admit(small, 1, 5) == "b"
    assert deficits(small, policy) == {"A": -50, "B": 75, "C": 30, "D": -300}
    assert admit(small, 1, 5) == "a"
    assert deficits(small, policy) == {"A": 45, "B": 75, "C": 30, "D": -200}


class Slow:
    """The rule, one request at a time, over a list."""

    def __init__(self, quantum: float) -> None:
        self.quantum = quantum
        self.deficits: dict[str, float] = {}
        self.waiting: list[tuple[str, int, Job]] = []
        """(client, entry, job)"""

    def first(self, cached: Any) -> Job:
        while True:
            able = [one for one in self.waiting if self.deficits[one[0]] > 0]
            if able:
                return min(able, key=lambda one: (-cached(one[2]), one[1]))[2]
            for name, deficit in self.deficits.items():
                if deficit <= 0:
                    self.deficits[name] += self.quantum


@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_the_order_is_that_of_the_slow_model(seed: int) -> None:
    random = Random(seed)
    policy = Dlpm(quantum_tokens=random.choice([16.0, 100.0]))
    small, slow = small_queue(policy, has_index=random.random() < 0.7), Slow(policy.quantum_tokens)
    running: list[tuple[str, Job, int]] = []
    for now in range(30):
        for _ in range(random.randint(0, 3)):
            name = random.choice("ABC")
            (job,) = small.wait(random_word(random), at=float(now), tenant=name)
            slow.deficits.setdefault(name, 0.0)
            slow.waiting.append((name, job.entry, job))
        for at, (name, job, generated) in enumerate(running):
            if random.random() < 0.5:
                small.queue.generated(job, generated + 7)
                slow.deficits[name] -= 2 * 7
                running[at] = (name, job, generated + 7)
        small.queue.begin_round(float(now))
        if not slow.waiting:
            continue
        first = small.queue.first()
        cached = {one[2]: small.queue._look_ups.cached_tokens(one[2]) for one in slow.waiting}  # type: ignore[attr-defined]
        assert first is slow.first(cached.__getitem__)
        for _ in range(random.randint(0, len(slow.waiting))):
            job = small.queue.first()
            assert job is slow.first(cached.__getitem__)
            (entry,) = [one for one in slow.waiting if one[2] is job]
            small.queue.remove(job)
            slow.waiting.remove(entry)
            if random.random() < 0.9:
                tokens = random.choice([1, 16, 90])
                small.queue.admitted(job, tokens)
                slow.deficits[entry[0]] -= tokens
                running.append((entry[0], job, 0))
                small.cache.use(small.words[job.place])
        assert deficits(small, policy) == slow.deficits


def test_an_engine_tells_what_requests_cost() -> None:
    """Prompts of 17 tokens, one after the other; 8 of B's are cached when it is admitted. A got a token before each of them."""
    policy = Dlpm(quantum_tokens=1.0)
    policy.bind(PolicyContext())
    engine = small_engine(gpu=20, scheduling=policy, max_running_requests=1)
    requests = make_requests([ask("abxy", output=3), ask("abcd", 1.0, output=5)])
    requests[0].tenant, requests[1].tenant = "A", "B"
    engine.run(requests)
    assert {name: client.deficit for name, client in policy._clients._clients.items()} == {
        "A": 2 - 17 - 2 * 3,
        "B": 1 - 9 - 2 * 5,
    }


def test_the_client_with_fewer_requests_does_not_wait_for_the_other_one() -> None:
    """Client A floods an engine with requests, one of twelve is B's. By prefix alone, B's wait until nothing of A's is cached."""
    trace: Any = kvsim.load_trace("synthetic", limit=120, rate=50.0)
    for request in trace.requests:
        request.tenant = "B" if request.index % 12 == 0 else "A"
    engine = ("engine.max_running_requests=2", "scheduling.max_wait_s=null")
    means = {}
    for name in ("dlpm", "longest_prefix"):
        result = kvsim.simulate(trace, *engine, f"scheduling={name}")
        means[name] = result.outcome.ttft_s[::12].mean()
    assert means["dlpm"] < means["longest_prefix"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("scheduling.client=user",), "scheduling.client must be one of tenant, session, not user"),
        (("scheduling.quantum_tokens=0",), "scheduling.quantum_tokens must be at least 1, not 0"),
        ((), "scheduling: Dlpm needs the tenant of each request, which this trace does not have"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.simulate(kvsim.load_trace("synthetic", limit=2), "scheduling=dlpm", *words)


def test_sessions_may_share() -> None:
    policy = Dlpm(client="session", quantum_tokens=10.0)
    policy.bind(PolicyContext())
    small = small_queue(policy, "abcd")
    small.wait("abcd1", "abcd2", session=1)
    small.wait("x", session=2)
    assert admit(small, 3, 20) == "abcd1 x abcd2"
