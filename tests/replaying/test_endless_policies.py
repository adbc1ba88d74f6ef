"""Policies of a user's own whose answers never end, or never stand still: stopped soon after what was expected, and named."""

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, count, cycle, repeat
from textwrap import dedent
from typing import Any

import pytest

import kvsim
from kvsim.core.tree import Node
from kvsim.errors import UsageError
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.eviction.base import RankedEviction
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.trace.base import Trace

ONE_TIER = ("tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=0")
HYBRID = ("model=nemotron_h_8b", "tiers.gpu.capacity=8GiB", "tiers.cpu.capacity=0", "tiers.disk.capacity=0")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=20, page_tokens=16)


class Counted:
    """Passes an endless iterator on, and counts."""

    def __init__(self, endless: Any) -> None:
        self.taken = 0
        self._endless = iter(endless)

    def __iter__(self) -> Iterator[Any]:
        for one in self._endless:
            self.taken += 1
            yield one


@pytest.mark.parametrize("order", [cycle, lambda waiting: repeat(waiting[0]), lambda waiting: chain(waiting, count())])
def test_an_order_is_stopped_at_one_more_than_there_are(order: Any, trace: Trace) -> None:
    given: list[tuple[int, Counted]] = []

    class Mine(FCFS):
        def order(self, round: Any) -> Any:
            given.append((len(round.waiting), Counted(order(round.waiting))))
            return given[-1][1]

    with pytest.raises(
        UsageError, match=r"the scheduling policy Mine returned .* from order\(\), not a waiting request that it has"
    ):
        kvsim.simulate(trace, *ONE_TIER, scheduling=Mine())
    waiting, counted = given[-1]
    assert counted.taken <= waiting + 1


@pytest.mark.parametrize("call", ["after_prefill", "after_answer"])
def test_states_are_not_saved_for_ever(call: str, trace: Trace) -> None:
    given: list[Counted] = []

    def states(self: Any, *asked: Any) -> Any:
        given.append(Counted(repeat(0)))
        return given[-1]

    mine = type("Mine", (Last,), {call: states})
    with pytest.raises(
        UsageError, match=rf"the checkpoint policy Mine returned more than [\d,]+ numbers from {call}\(\), of at most"
    ):
        kvsim.simulate(trace, *HYBRID, "rules.cache_output=true", checkpoint=mine())
    assert 1_000 <= given[-1].taken < 10_000


class Rising(RankedEviction):
    calls = 0.0

    def rank(self, node: Node) -> float:
        self.calls += 1
        return self.calls


def test_a_rank_that_rises_whenever_it_is_asked_is_refused(trace: Trace) -> None:
    for run in (kvsim.replay, kvsim.simulate):
        with pytest.raises(UsageError, match="the eviction policy Rising raises the rank of a node whenever it is asked"):
            run(trace, *ONE_TIER, eviction=Rising())


def test_ranks_that_rise_with_what_happens_are_taken(trace: Trace) -> None:
    class Aging(LRU):
        """Every eviction raises the ranks of all nodes, so that each victim is preceded by as many as there are."""

        def bind(self, context: Any) -> None:
            super().bind(context)
            self.age = 0.0

        def rank(self, node: Node) -> float:
            return node.last_used + self.age

        def on_remove(self, node: Node) -> None:
            self.age += 1.0

    mine = kvsim.replay(trace, *ONE_TIER, eviction=Aging())
    assert (mine.hit_pages == kvsim.replay(trace, *ONE_TIER, "eviction=lru").hit_pages).all()


def test_a_victim_that_is_offered_again_and_again_is_refused(trace: Trace) -> None:
    class Mine(LRU):
        def victims(self, now: float) -> Iterator[Node]:
            return repeat(next(super().victims(now)))

    with pytest.raises(UsageError, match="Mine, offered a node that cannot leave"):
        kvsim.replay(trace, *ONE_TIER, eviction=Mine())


def test_a_policy_that_loops_itself_can_be_interrupted() -> None:
    """As compiled code, too: the engine is asked for nothing while the policy runs."""
    program = dedent("""
        import signal, threading, kvsim
        from kvsim.policies.scheduling.fcfs import FCFS

        class Mine(FCFS):
            def order(self, round):
                threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
                while True:
                    pass

        try:
            kvsim.simulate(kvsim.load_trace("synthetic", sessions=5), scheduling=Mine())
        except KeyboardInterrupt as interrupt:
            print("interrupted", interrupt)
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, preexec_fn=_limited)
    assert ended.stdout.startswith("interrupted"), ended.stderr


def _limited() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
