"""Requests that are given up, at any moment and wherever they are: what they held is free again, and the others go on."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.emulation.live_cluster import LiveCluster
from kvsim.run.assembly import build_cluster_of, build_graphs, build_served
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.page_index import PageIndex
from tests.servers.emulated import plan_of

SLOW = ("hardware=linear", "model=tiny")
ENGINES = {
    "vllm": ("preset=vllm", "tiers.gpu.capacity=12pages"),
    "vllm, chunked": ("preset=vllm", "tiers.gpu.capacity=12pages", "engine.max_batch_tokens=16"),
    "vllm_offload": ("preset=vllm_offload", "tiers.gpu.capacity=12pages", "tiers.cpu.capacity=20pages"),
    "sglang": ("preset=sglang", "tiers.gpu.capacity=200pages"),
    "sglang, chunked": ("preset=sglang", "tiers.gpu.capacity=200pages", "engine.max_batch_tokens=16"),
    "sglang_hicache": ("preset=sglang_hicache", "page_tokens=16", "tiers.gpu.capacity=13pages", "tiers.cpu.capacity=26pages"),
    "sglang with storage": (
        "preset=sglang_hicache", "page_tokens=16", "tiers.gpu.capacity=13pages", "tiers.cpu.capacity=26pages",
        "tiers.disk.capacity=40pages",
    ),
    "kvsim": ("tiers.gpu.capacity=12pages",),
    "kvsim with all tiers": (
        "tiers.gpu.capacity=12pages", "tiers.cpu.capacity=10pages", "tiers.disk.capacity=20pages", "placement=write_back",
        "prefetch=threshold", "rules.cache_output=true",
    ),
    "fastdeploy": ("preset=fastdeploy", "tiers.gpu.capacity=12pages"),
    "lightllm": ("preset=lightllm", "tiers.gpu.capacity=200pages"),
}  # fmt: skip
PROMPTS = ("aaab", "aaac", "aab", "b", "bcc", "aaaaaaa")


class Live:
    """A cluster that is told of requests whose numbers it keeps."""

    def __init__(self, overrides: tuple[str, ...]) -> None:
        plan = plan_of(overrides)
        self.plan = plan if plan.rules.cache_output is not None else plan.with_answers(True)
        substrate = SimulatedSubstrate(plan.model, plan.hardware, plan.page_tokens, links=plan.engine.links, seed=plan.seed)
        caches = [build_served(self.plan, graph, []) for graph in build_graphs(self.plan)]
        self.cluster = build_cluster_of(LiveCluster, self.plan, [], caches, substrate)
        self.cluster.on_first_token = lambda number: None
        self.cluster.on_end = self.ended
        self.cluster.open()
        self.under_way: set[int] = set()
        self.lengths: dict[int, int] = {}
        self.index = PageIndex()
        self.arrived = 0

    def ended(self, number: int) -> None:
        self.under_way.remove(number)

    def arrive(self, word: str, output: int) -> None:
        size, number = self.plan.page_tokens, self.arrived
        tokens = 16 * len(word) + 3
        pages = [
            word[: 1 + at * size // 16] if size >= 16 else f"{word[: 1 + at * size // 16]}{at}" for at in range(tokens // size)
        ]
        answer = [f"{number}:{at}" for at in range((tokens + output - 1) // size - len(pages))]
        runs = self.index.lookup([hash(page) for page in pages])
        path = self.index.lookup([hash(page) for page in [*pages, *answer]])
        after = path if not runs else self.index.lookup([hash(page) for page in [*pages, *answer]])
        request = Request(
            index=0, arrival_s=0.0, prompt_tokens=tokens, output_tokens=output, runs=runs, prompt_pages=len(pages),
            output_runs=split_after(after, len(pages)),
        )  # fmt: skip
        self.under_way.add(number)
        self.arrived += 1
        self.cluster.arrive(request)

    def abort(self, pick: int) -> None:
        aborted = sorted(self.under_way)[pick % len(self.under_way)]
        self.cluster.abort(aborted)

    def check(self) -> None:
        for cache in self.cluster.caches:
            cache.check()

    def check_empty(self) -> None:
        """Nothing runs, and everything on the GPU can leave."""
        cluster = self.cluster
        assert not self.under_way and cluster.unfinished == cluster.running == 0
        assert not cluster._jobs and all(not rows for rows in cluster.book.columns.values())
        for engine in cluster.engines:
            assert engine.is_idle and not len(engine.waiting.queue) and not engine.waiting.fetching
            assert engine.gpu.available_pages == engine.gpu.pool.capacity


def split_after(path: tuple[tuple[int, int], ...], pages: int) -> tuple[tuple[int, int], ...]:
    from kvsim.pages.extents import split_extents

    return split_extents(path, pages)[1]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from(PROMPTS), st.sampled_from([1, 3, 20, 60])),
        st.tuples(st.just("abort"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("events"), st.integers(1, 30), st.just(0)),
    ),
    min_size=3,
    max_size=40,
)


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=6, deadline=None)
@given(steps=STEPS)
def test_requests_may_be_given_up_between_any_two_events(name: str, steps: list[tuple[str, object, int]]) -> None:
    live = Live(ENGINES[name])
    env, given_up = live.cluster.env, set[int]()
    for what, value, output in steps:
        if what == "arrive":
            live.arrive(str(value), output)
        elif what == "abort" and live.under_way - given_up:
            number = sorted(live.under_way - given_up)[int(str(value)) % len(live.under_way - given_up)]
            given_up.add(number)
            live.cluster.abort(number)
        elif what == "events":
            for _ in range(int(str(value))):
                if env.peek() < inf:
                    env.step()
        live.check()
    env.run(env.now + 10_000)
    live.check()
    live.check_empty()
