"""A policy of a user's own that lets StopIteration out, as ``next`` does of an empty iterator, is named with its line.

Wherever it is asked: in engines and in ``victims``, which are generators and may be compiled, and in events.
"""

from collections.abc import Sequence
from inspect import getsourcelines
from typing import Any

import pytest

import kvsim
from kvsim.errors import PolicyFailed
from kvsim.policies.admission.queue_limit import QueueLimit
from kvsim.policies.autoscaling.target_utilization import TargetUtilization
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.trace.base import Trace

TIERS = ("tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=2000pages", "tiers.disk.capacity=20000pages")
HYBRID = ("model=nemotron_h_8b", "tiers.gpu.capacity=8GiB", "tiers.cpu.capacity=0", "tiers.disk.capacity=0")
SETTINGS = {"checkpoint": HYBRID, "routing": (*TIERS, "cluster.engines=2"), "autoscaling": (*TIERS, "cluster.engines=2")}
FROM = 20
"""The call of which the policy fails; everything before it is as usual."""
CALLS = {
    "eviction": (LRU, "on_request", "on_insert", "on_hit", "on_evictable", "on_remove", "on_finish", "rank"),
    "placement": (WriteThrough, "on_request", "after_use", "watermark"),
    "prefetch": (ThresholdPrefetch, "fetch", "load", "wait_s"),
    "checkpoint": (Last, "after_prefill"),
    "scheduling": (FCFS, "rank", "order"),
    "routing": (LeastLoaded, "choose", "on_sent", "on_first_token", "on_ended"),
    "autoscaling": (TargetUtilization, "engines"),
    "admission": (QueueLimit, "admits"),
}
CASES = [(family, base, call) for family, (base, *calls) in CALLS.items() for call in calls] + [
    ("placement", WriteBack, "after_eviction")
]
RARE = ("prefetch", "autoscaling")
"""Families that a short run asks a few times."""
REPLAYED = ("eviction", "placement", "checkpoint")
RUNS = [("simulate", 1 if family in RARE or rest[1] == "watermark" else FROM, family, *rest) for family, *rest in CASES]
RUNS += [("replay", 1, *case) for case in CASES if case[0] in REPLAYED and case[2] != "watermark"]


def failing(base: Any, call: str, at: int) -> Any:
    """A policy whose n-th answer to a question is StopIteration."""
    calls = [0]

    def fails(self: Any, *asked: Any) -> Any:
        calls[0] += 1
        if calls[0] >= at:
            return next(iter(()))
        inherited = getattr(super(mine, self), call)
        return inherited(*asked) if callable(inherited) else inherited

    body: Any = property(fails) if call == "watermark" else fails
    mine: Any = type("Mine", (base,), {call: body, "__module__": __name__})
    return mine()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=20, page_tokens=16)


@pytest.mark.parametrize(("command", "at", "family", "base", "call"), RUNS, ids=[f"{run[0]}-{run[1]}-{run[4]}" for run in RUNS])
def test_it_is_named(command: str, at: int, family: str, base: Any, call: str, trace: Trace) -> None:
    with pytest.raises(PolicyFailed) as failed:
        getattr(kvsim, command)(trace, *SETTINGS.get(family, TIERS), **{family: failing(base, call, at)})
    said = str(failed.value)
    assert said.startswith(f"the {family} policy") and "Mine" in said
    assert (
        f"test_stop_iteration.py:{line_of_failure()}, in failing.<locals>.fails: RuntimeError: fails raised StopIteration" in said
    )


def line_of_failure() -> int:
    lines, first = getsourcelines(failing)
    return first + next(at for at, line in enumerate(lines) if line.endswith("return next(iter(()))\n"))


class Victims(LRU):
    def victims(self, now: float) -> Any:
        for node in super().victims(now):
            yield node if node.depth < 0 else next(iter(()))


class NoGenerator(LRU):
    def victims(self, now: float) -> Any:
        return [next(iter(()))]


@pytest.mark.parametrize("policy", [Victims, NoGenerator])
@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_out_of_victims_too(policy: Any, command: str, trace: Trace) -> None:
    with pytest.raises(
        PolicyFailed, match=rf"{policy.__name__}, failed at .* in {policy.__name__}.victims: RuntimeError: .*StopIter"
    ):
        getattr(kvsim, command)(trace, *TIERS, eviction=policy())


def test_what_a_policy_offers_may_end(trace: Trace) -> None:
    class Mine(LRU):
        def victims(self, now: float) -> Any:
            return iter(super().victims(now))

        def all_of(self, parts: Sequence[int]) -> int:
            return next(iter(parts))

    mine = kvsim.replay(trace, *TIERS, eviction=Mine())
    assert (mine.hit_pages == kvsim.replay(trace, *TIERS, "eviction=lru").hit_pages).all()
    assert Mine().all_of([3]) == 3
