"""KVFlow's order by hand, and against looking at all calls."""

from random import Random

import pytest

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.plans.combinations import check_unforeseen
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.kv_flow import StepsToExecution
from tests.composing import plan
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import make_request, random_word

Step = tuple[str, int, str]
"""(prompt, workflow, agent)."""


def known(*steps: Step, gpu: int = 30) -> tuple[SmallCache, list[Request]]:
    """A cache whose policy knows these steps, none of which has been served."""
    cache = small_cache(gpu=gpu, eviction=StepsToExecution)
    requests = [cache.request(word, index=at, session=flow, kind=agent) for at, (word, flow, agent) in enumerate(steps)]
    cache.gpu.eviction.bind(PolicyContext(requests=requests))
    return cache, requests


def serve(cache: SmallCache, steps: tuple[Step, ...], begin: int = 0) -> None:
    for at, (word, flow, agent) in enumerate(steps, begin):
        cache.use(word, index=at, session=flow, kind=agent)


FLOW = ("a", 0, "plan"), ("b", 0, "write"), ("c", 0, "check"), ("b", 0, "write"), ("c", 0, "check"), ("a", 0, "plan")


def test_the_agent_that_is_called_last_leaves_first() -> None:
    """After check: write is one step away, check two, plan three. LRU would lose plan and then write."""
    cache, _ = known(*FLOW)
    serve(cache, FLOW[:3])
    assert cache.leaving_order() == "acb"


def test_an_agent_that_is_never_called_again_leaves_before_all() -> None:
    cache, _ = known(*FLOW)
    serve(cache, FLOW[:5])
    assert cache.leaving_order() == "bca", "write and check never, plan next"


def test_steps_are_those_of_each_workflow() -> None:
    """Workflow 1 stands still: its agent stays one step away, however many steps workflow 0 makes."""
    steps = ("x", 1, "plan"), *FLOW[:3], ("x", 1, "plan"), *FLOW[3:]
    cache, _ = known(*steps)
    serve(cache, steps[:4])
    policy = cache.gpu.eviction
    assert [policy.rank(cache.node(word))[0] for word in "xabc"] == [-1, -3, -1, -2]


def test_what_the_next_call_does_not_use_is_not_expected() -> None:
    """The writer has a fixed prompt w and a task each time: t is over, u is expected, and so is w."""
    steps = ("wt", 0, "write"), ("p", 0, "plan"), ("wu", 0, "write"), ("p", 0, "plan"), ("wv", 0, "write")
    cache, _ = known(*steps)
    serve(cache, steps[:3])
    policy = cache.gpu.eviction
    assert policy.rank(cache.node("wt"))[0] == -float("inf") and policy.rank(cache.node("wu"))[0] == -2
    assert cache.leaving_order() == "tuwp"


def test_of_shared_pages_the_first_call_counts() -> None:
    """s is shared by an agent that is called in one step and one that is called in three."""
    steps = ("sa", 0, "near"), ("sb", 1, "far"), ("x", 1, "other"), ("x", 1, "other"), ("sb", 1, "far"), ("sa", 0, "near")
    cache, _ = known(*steps)
    serve(cache, steps[:2])
    policy = cache.gpu.eviction
    assert [policy.rank(cache.node(word))[0] for word in ("s", "sa", "sb")] == [-1, -1, -3]


@pytest.mark.parametrize("seed", range(4))
def test_the_victim_has_most_steps_to_go(seed: int) -> None:
    """Each workflow has pages of its own, so that a page's last call is the one that counts."""
    random = Random(seed)
    flows = [random.randrange(3) for _ in range(90)]
    steps = tuple((f"{flow}{random_word(random, 'ab', longest=3)}", flow, random.choice("xyz")) for flow in flows)
    cache, requests = known(*steps, gpu=200)
    for at, step in enumerate(steps[:60]):
        serve(cache, (step,), at)
        leaves = offered(cache.gpu.eviction, 999.0)
        expected = [slow_steps(requests, at, node.notes[0]) for node in leaves]
        assert expected == sorted(expected, reverse=True)


def slow_steps(requests: list[Request], now: int, call: object) -> float:
    """Steps from the workflow's last request so far until the one that is due, by counting."""
    due, session = call.due, call.session  # type: ignore[attr-defined]
    mine = [request.index for request in requests if request.session == session]
    done = sum(index <= now for index in mine) - 1
    return float("inf") if due <= done else due - done


def test_the_whole_trace_is_needed() -> None:
    with pytest.raises(ValueError, match="needs the session of each request"):
        StepsToExecution().bind(PolicyContext(requests=[make_request([0])]))
    with pytest.raises(ValueError, match="needs the agent that makes each request"):
        StepsToExecution().bind(PolicyContext(requests=[make_request([0], session=1)]))
    with pytest.raises(UsageError, match="StepsToExecution must know all requests in advance"):
        check_unforeseen(plan("eviction=kv_flow"))
