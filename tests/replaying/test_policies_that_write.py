"""Policies of a user's own that write to what they are shown: an error names them, and no other run sees what they did."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from math import nan
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.core.request import Request
from kvsim.core.tree import NO_CHILDREN, Node
from kvsim.errors import PolicyFailed, UsageError
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.threshold import ThresholdPrefetch
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.trace.base import Trace

TIERS = ("tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=2000pages", "tiers.disk.capacity=20000pages")
HYBRID = ("model=nemotron_h_8b", "tiers.gpu.capacity=8GiB", "tiers.cpu.capacity=0", "tiers.disk.capacity=0")


@pytest.fixture
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=16, page_tokens=16)


def all_fields(trace: Trace) -> list[tuple[Any, ...]]:
    return [tuple(getattr(request, field.name) for field in fields(Request)) for request in trace.requests]


# --- requests ------------------------------------------------------------------------------------------------------------


class WritingLRU(LRU):
    def on_request(self, request: Request, now: float) -> None:
        request.output_tokens = 1


class WritingPlacement(WriteThrough):
    def on_request(self, request: Request, now: float) -> None:
        request.kind = "mine"


class WritingPrefetch(ThresholdPrefetch):
    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        request.prompt_tokens += 1
        return super().load(request, gpu_pages, cpu_pages, disk_pages)


class WritingScheduling(FCFS):
    def rank(self, waiting: Any) -> float:
        waiting.request.after = 0
        return 0.0


class WritingRouting(LeastLoaded):
    def on_ended(self, request: Request, engine: int, now: float) -> None:
        request.priority = 5


class WritingCheckpoint(Last):
    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        context.requests[7].session = 3


WRITERS: list[tuple[dict[str, Any], str]] = [
    ({"eviction": WritingLRU()}, "output_tokens"),
    ({"placement": WritingPlacement()}, "kind"),
    ({"prefetch": WritingPrefetch()}, "prompt_tokens"),
    ({"scheduling": WritingScheduling()}, "after"),
    ({"routing": WritingRouting()}, "priority"),
    ({"checkpoint": WritingCheckpoint()}, "session"),
]
CASES = [(run, *case) for case in WRITERS for run in ("replay", "simulate")]
CASES = [case for case in CASES if case[0] == "simulate" or not case[1].keys() & {"scheduling", "routing"}]


@pytest.mark.parametrize(("command", "policy", "field"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_a_changed_request_is_an_error_and_is_restored(command: str, policy: dict[str, Any], field: str, trace: Trace) -> None:
    before = all_fields(trace)
    settings = HYBRID if "checkpoint" in policy else TIERS
    settings += ("cluster.engines=2",) if "routing" in policy else ()
    with pytest.raises(PolicyFailed, match=rf"{field} of request \d+ was .* a policy may change nothing but its own") as failed:
        getattr(kvsim, command)(trace, *settings, **policy)
    name = type(next(iter(policy.values()))).__name__
    assert str(failed.value).startswith(f"a request was changed in a run with {name} of ")
    assert all_fields(trace) == before


def test_a_policy_that_changes_a_request_and_fails_leaves_the_trace_as_it_was(trace: Trace) -> None:
    class Failing(WritingLRU):
        def on_insert(self, node: Node, now: float) -> None:
            raise KeyError(1)

    before = all_fields(trace)
    with pytest.raises(PolicyFailed, match="KeyError: 1"):
        kvsim.replay(trace, *TIERS, eviction=Failing())
    assert all_fields(trace) == before


def test_jobs_of_a_sweep_see_nothing_of_what_another_job_did(trace: Trace) -> None:
    alone = kvsim.replay(trace, *TIERS, "eviction=fifo")
    swept = kvsim.sweep(trace, {"eviction": ["fifo", WritingLRU(), "lru"]}, *TIERS)
    assert len(swept.errors) == 1 and "output_tokens of request 0 was" in next(iter(swept.errors.values()))
    rates = {run.record["config"]["eviction"]["_target_"].rpartition(".")[2]: run.record["hit_rate"] for run in swept.runs}
    assert rates["FIFO"] == alone.hit_rate and len(rates) == 2


@pytest.mark.parametrize(
    "write", [lambda requests: requests.clear(), lambda requests: requests.pop(), lambda requests: requests.sort()]
)
def test_the_list_of_requests_cannot_be_changed(write: Callable[[Any], None], trace: Trace) -> None:
    class Clearing(LRU):
        def bind(self, context: PolicyContext) -> None:
            super().bind(context)
            write(context.requests)

    for run in (kvsim.replay, kvsim.simulate):
        with pytest.raises(PolicyFailed, match=r"Clearing, failed at .*AttributeError: 'tuple' object has no attribute"):
            run(trace, *TIERS, eviction=Clearing())
    assert len(trace.requests) > 30


# --- nodes ---------------------------------------------------------------------------------------------------------------


NODE_WRITES: dict[str, Callable[[Node], Any]] = {
    "pages": lambda node: setattr(node, "pages", 1),
    "more pages": lambda node: setattr(node, "pages", node.pages + 1),
    "state": lambda node: node.state.__setitem__(0, 0),
    "pin": lambda node: node.pins.__setitem__(0, node.pins[0] + 1),
    "no pin": lambda node: node.pins.__setitem__(0, 0),
    "depth": lambda node: setattr(node, "depth", 0),
    "hits": lambda node: setattr(node, "hits", 0),
    "future": lambda node: setattr(node, "created", 1e12),
    "runs": lambda node: setattr(node, "runs", ((0, node.pages),)),
    "children": lambda node: node.children.setdefault(-1, node),
    "children_in": lambda node: node.children_in.__setitem__(0, 9),
}


def writing(write: Callable[[Node], Any]) -> LRU:
    class WritingNodes(LRU):
        def on_insert(self, node: Node, now: float) -> None:
            if node.depth > 50:
                write(node)

    return WritingNodes()


NODE_CASES = [(name, ("replay", "simulate")[at % 2], "rules=default") for at, name in enumerate(NODE_WRITES)]
NODE_CASES += [
    (name, ("replay", "simulate")[at % 2], f"rules={('vllm', 'sglang')[at // 2 % 2]}") for at, name in enumerate(NODE_WRITES)
]


@pytest.mark.parametrize(("name", "command", "engine"), NODE_CASES)
def test_a_changed_node_is_an_error_that_names_the_policy(name: str, command: str, engine: str, trace: Trace) -> None:
    settings = ("tiers.gpu.capacity=3000pages", "tiers.cpu.capacity=0", engine)
    with pytest.raises(UsageError, match=r"WritingNodes(?s:.)*(may change nothing|cannot leave|offered too few)"):
        getattr(kvsim, command)(trace, *settings, eviction=writing(NODE_WRITES[name]))
    assert not NO_CHILDREN
    assert kvsim.replay(trace, *settings, "eviction=lru").hit_rate > 0


def test_a_placement_that_changes_a_node_is_named(trace: Trace) -> None:
    class Growing(WriteThrough):
        def after_use(self, node: Node, now: float) -> bool:
            node.pages += node.depth > 50
            return True

    for run in (kvsim.replay, kvsim.simulate):
        with pytest.raises(UsageError, match="Growing"):
            run(trace, *TIERS, placement=Growing())


PRESETS = ("vllm", "sglang", "sglang_hicache", "lightllm", "fastdeploy", "vllm_offload", "vllm_hybrid", "lightllm_hybrid")


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_policy_that_changes_nothing_is_no_error(preset: str, command: str, trace: Trace) -> None:
    """Whatever the cache, and with pages left in it."""

    class Mine(LRU):
        pass

    mine = getattr(kvsim, command)(trace, f"preset={preset}", "tiers.gpu.capacity=3GiB", eviction=Mine())
    theirs = getattr(kvsim, command)(trace, f"preset={preset}", "tiers.gpu.capacity=3GiB", eviction=LRU())
    assert (mine.hit_pages == theirs.hit_pages).all()


# --- what schedulers and routers see ----------------------------------------------------------------------------------------


WAITING_WRITES: dict[str, Callable[[Any], Any]] = {
    "arrival_s": lambda waiting: setattr(waiting, "arrival_s", nan),
    "entry": lambda waiting: setattr(waiting, "entry", -1),
    "generated": lambda waiting: setattr(waiting, "generated", 5),
    "place": lambda waiting: setattr(waiting, "place", (0.0, 0, 0)),
}


@pytest.mark.parametrize("call", ["rank", "order"])
@pytest.mark.parametrize("name", WAITING_WRITES)
def test_a_waiting_request_belongs_to_the_engine(name: str, call: str, trace: Trace) -> None:
    write = WAITING_WRITES[name]

    class Ranks(FCFS):
        def rank(self, waiting: Any) -> float:
            if waiting.request.index:
                write(waiting)
            return 0.0

    class Orders(FCFS):
        def order(self, round: Any) -> Any:
            for waiting in round.waiting:
                if waiting.request.index:
                    write(waiting)
            return round.waiting

    policy = Ranks() if call == "rank" else Orders()
    expected = rf"the scheduling policy {type(policy).__name__} changed a waiting request in {call}\(\), {name} from"
    with pytest.raises(UsageError, match=expected):
        kvsim.simulate(trace, *TIERS, scheduling=policy)


def test_the_queue_and_the_engines_that_are_up_cannot_be_emptied(trace: Trace) -> None:
    class Emptying(FCFS):
        def order(self, round: Any) -> Any:
            round.waiting.clear()
            return []

    class Down(LeastLoaded):
        def choose(self, request: Request, engines: Sequence[Any], now: float) -> int:
            engines.clear()  # type: ignore[attr-defined]
            return 0

    class Idle(LeastLoaded):
        def choose(self, request: Request, engines: Sequence[Any], now: float) -> int:
            engines[0].outstanding_requests = 0
            return 0

    for policy in ({"scheduling": Emptying()}, {"routing": Down()}, {"routing": Idle()}):
        with pytest.raises(PolicyFailed, match=f"{type(next(iter(policy.values()))).__name__}.*AttributeError"):
            kvsim.simulate(trace, *TIERS, "cluster.engines=2", **policy)


def test_kvsims_own_policies_are_not_checked(trace: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checks cost nothing where they find nothing."""
    called: list[object] = []
    monkeypatch.setattr("kvsim.run.unchanged.Requests", called.append)
    kvsim.simulate(trace, *TIERS, "eviction=slru", "scheduling=shortest_prompt", f"output={tmp_path}/out")
    assert not called
