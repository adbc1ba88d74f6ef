"""What is built for each engine is small, however many requests there are."""

from collections.abc import Sequence

from kvsim.core.request import Request
from kvsim.plans.arguments import arguments_of
from kvsim.plans.from_python import plan_for
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.run.assembly import build_cluster, build_graphs, build_served
from kvsim.trace.synthetic import Synthetic

KNOWN: list[Sequence[Request]] = []


class NotingLRU(LRU):
    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        KNOWN.append(context.requests)


class NotingFCFS(FCFS):
    def bind(self, context: PolicyContext) -> None:
        super().bind(context)
        KNOWN.append(context.requests)


def test_the_policies_of_all_engines_know_one_and_the_same_sequence_of_requests() -> None:
    KNOWN.clear()
    trace = Synthetic(sessions=5).load(16)
    assert type(trace.requests) is list
    settings = ["cluster.engines=3", "tiers.gpu.capacity=9000pages", "tiers.cpu.capacity=0", "tiers.disk.capacity=0"]
    plan = plan_for("simulate", trace, arguments_of(settings, {"eviction": NotingLRU(), "scheduling": NotingFCFS()}))
    graphs = build_graphs(plan, trace.requests)
    of_tiers = len(KNOWN)
    caches = [build_served(plan, graph, trace.requests) for graph in graphs]
    build_cluster(plan, trace.requests, caches, SUBSTRATES[plan.substrate].open(plan, trace.requests, caches))
    assert (of_tiers, len(KNOWN)) == (3, 6)
    assert all(known is KNOWN[0] for known in KNOWN[:3]) and all(known is KNOWN[3] for known in KNOWN[3:])
    assert KNOWN[0] == KNOWN[3] == tuple(trace.requests)


def test_a_state_takes_fewer_pages_where_gpus_have_copies_of_kv() -> None:
    """Qwen3-Next has two KV heads, so each page is twice on four GPUs; each has a fourth of a state."""
    trace = Synthetic(sessions=2).load(256)
    taken = []
    for gpus in (2, 4):
        settings = ["model=qwen3_next_80b", "rules=vllm_hybrid", "hardware=h200", f"hardware.gpus={gpus}"]
        plan = plan_for("simulate", trace, arguments_of([*settings, "tiers.gpu.capacity=400pages"], {}))
        cache = build_served(plan, build_graphs(plan, trace.requests)[0], trace.requests)
        taken.append(cache.states.units)
        assert taken[-1] == -(-plan.model.state_bytes // (gpus // 2 * plan.model.page_bytes(256)))
    assert taken[1] < taken[0]
