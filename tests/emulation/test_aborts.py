"""Requests that are given up, at any moment and wherever they are: what they held is free again, and the others go on."""

import asyncio
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.emulation.emulator import Emulator
from kvsim.emulation.live_cluster import LiveCluster
from kvsim.emulation.metrics.memory import memory_of
from kvsim.pages.extents import split_extents
from kvsim.run.assembly import build_cluster_of, build_graphs, build_served
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.page_index import PageIndex
from tests.servers.emulated import plan_of

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
        after = self.index.lookup([hash(page) for page in [*pages, *answer]])
        request = Request(
            index=0, arrival_s=0.0, prompt_tokens=tokens, output_tokens=output, runs=runs, prompt_pages=len(pages),
            output_runs=split_extents(after, len(pages))[1],
        )  # fmt: skip
        self.under_way.add(number)
        self.arrived += 1
        self.cluster.arrive(request)

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


def cached_after_abort(overrides: tuple[str, ...], generated: int) -> tuple[int, int, int]:
    """Give up a request of 40 prompt tokens when it has ``generated`` tokens, then ask for that prompt and its answer again.

    Returns the tokens that the answer had, the pages that requests then used, and the cached tokens of the second request.
    """

    async def serve() -> tuple[int, int, int]:
        emulator = Emulator(plan_of(overrides))
        env = emulator.cluster.env
        first = emulator.submit(list(range(40)), 200)
        while first.generated < generated:
            env.step()
        emulator.abort(first)
        env.run(env.now + 1)
        assert first.is_ended and first.is_aborted and first.reason == "abort"
        used = memory_of(emulator).used
        second = emulator.submit([*range(40), *first.answer], 1)
        env.run(env.now + 100)
        return first.generated, used, sum(second.cached_tokens)

    return asyncio.run(serve())


def test_vllm_frees_blocks_at_once_and_keeps_their_names() -> None:
    """Of 40 + 30 tokens, the last one's KV is not there yet: 69 tokens are four full blocks of 16."""
    assert cached_after_abort(("preset=vllm", "tiers.gpu.capacity=100pages"), 30) == (30, 0, 64)


def test_sglang_ends_a_request_with_its_next_token_and_caches_the_answer() -> None:
    """The KV of all tokens but the last one enters the tree, token by token, as at any end."""
    generated, used, cached = cached_after_abort(("preset=sglang", "tiers.gpu.capacity=1000pages"), 30)
    assert used == 0 and generated - 1 <= cached - 40 <= generated + 1


def test_kvsims_own_rules_keep_the_prompt() -> None:
    generated, used, cached = cached_after_abort(("tiers.gpu.capacity=100pages", "rules.cache_output=true"), 30)
    assert (generated, used, cached) == (30, 0, 32)


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
@settings(max_examples=4, deadline=None)
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
