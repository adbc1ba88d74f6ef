"""A cluster step by step, in any order: a Hypothesis state machine that hunts for a moment at which an invariant does not hold.

Requests arrive, time passes event by event, engines fail and come back, the cache is reset. Every cache is recounted after
every step, and nothing is left at the end. KVSIM_MACHINE_STEPS=20000 makes as many steps.
"""

from math import inf
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from simpy import Process

from kvsim.cluster.followers import Followers
from kvsim.core.request import RESETS, Request, Reset
from kvsim.engine.engine import Engine
from kvsim.engine.job import CLAIMING, DECODING, FETCHING, PREFILLING, QUEUED
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.s3_fifo import S3FIFO
from kvsim.policies.routing.round_robin import RoundRobin
from tests.cluster.small_cluster import small_cluster
from tests.core.test_machine import STEPS
from tests.engine.drawn import PLACEMENTS, WORDS, machines, prefetches
from tests.engine.small import PAGE_TOKENS
from tests.workloads import Words, make_request

STEPS_AT_ONCE = 60
MOST_REQUESTS = 40
PICK = st.integers(0, 1_000)
SHAPES: dict[str, dict[str, Any]] = {
    "one": {"hosts": (0,)},
    "two": {"hosts": (0, 0)},
    "two hosts over a disk": {"hosts": (0, 1), "is_disk_shared": True},
    "two apart": {"hosts": (0, 0), "is_cpu_divided": True},
    "prefill and decode": {"hosts": (0, 0), "prefill": 1},
    "prefill and decode, two of each": {"hosts": (0, 0, 1, 1), "prefill": 2, "is_disk_shared": True},
}


class ClusterMachine(RuleBasedStateMachine):
    """Lets things happen to a cluster between any two of its events."""

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        draw = data.draw
        settings = {
            "max_batch_tokens": draw(st.sampled_from([3, 10, 1000])),
            "max_running_requests": draw(st.sampled_from([1, 3, 100])),
            "overlap": draw(st.sampled_from(["none", "layerwise"])),
            "links": draw(st.sampled_from(["fifo", "shared"])),
        }
        tiers = draw(st.integers(1, 3))
        self.cluster = small_cluster(
            gpu=draw(st.integers(2, 12)),
            cpu=draw(st.integers(1, 10)) if tiers > 1 else 0,
            disk=draw(st.integers(1, 12)) if tiers > 2 else 0,
            eviction=draw(st.sampled_from([LRU, FIFO, S3FIFO])),
            placement=[draw(PLACEMENTS), draw(PLACEMENTS)],
            prefetch=draw(prefetches()),
            routing=RoundRobin(),
            decode_routing=RoundRobin(),
            hardware=draw(machines()),
            cache_output=draw(st.booleans()),
            settings=settings,
            **SHAPES[draw(st.sampled_from(sorted(SHAPES)))],
        )
        self.env = self.cluster.env
        self.words = Words()
        self.coming = [self.request("", index, tokens=1, output=1) for index in range(MOST_REQUESTS)]
        self.cluster.start(self.coming.copy())
        self.cluster._followers = Followers([])
        self.failing: dict[Engine, Process] = {}

    def request(self, word: str, index: int, *, tokens: int, output: int) -> Request:
        """A request that arrives when it is told to."""
        pages = self.words.pages(word)
        return make_request(
            pages, index=index, prompt_tokens=len(pages) * PAGE_TOKENS + tokens, output_tokens=output, after=index
        )

    # --- what happens ---

    @rule(word=WORDS, tokens=st.integers(1, 6), output=st.sampled_from([1, 2, 5, 15]), samples=st.sampled_from([1, 1, 1, 3]))
    @precondition(lambda self: self.coming)
    def arrive(self, word: str, tokens: int, output: int, samples: int) -> None:
        index = self.coming.pop(0).index
        request = self.request(word, index, tokens=tokens, output=output)
        request.samples = 1 if self.cluster.hand_over is not None else samples
        self.cluster.book.requests[index] = request
        self.cluster._arrive(request)

    @rule(events=st.integers(1, 12))
    def pass_events(self, events: int) -> None:
        for _ in range(events):
            if self.env.peek() < inf:
                self.env.step()

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 17.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.env.run(until=self.env.now + seconds)

    @rule(pick=PICK)
    def fail(self, pick: int) -> None:
        engine = self.cluster.engines[pick % len(self.cluster.engines)]
        if engine not in self.failing and pick % 3 == 0:
            self.failing[engine] = self.env.process(self.cluster.fail(engine))

    @rule(pick=PICK)
    @precondition(lambda self: any(not process.is_alive for process in self.failing.values()))
    def come_back(self, pick: int) -> None:
        down = [engine for engine, process in self.failing.items() if not process.is_alive]
        engine = down[pick % len(down)]
        del self.failing[engine]
        self.cluster._bring_back(engine)

    @rule(pick=st.integers(0, 9), mode=st.sampled_from(RESETS))
    def reset(self, pick: int, mode: str) -> None:
        if pick == 0:
            self.cluster._resets.reset(Reset(mode, self.env.now))

    # --- what always holds ---

    @invariant()
    def caches_add_up(self) -> None:
        self.cluster.check()

    @invariant()
    def an_engine_that_is_down_runs_nothing(self) -> None:
        for engine, process in self.failing.items():
            if not process.is_alive:
                assert engine.is_idle and not engine.waiting.queue and not engine.transfers()
                assert engine.gpu.pool.free == engine.gpu.pool.capacity

    @invariant()
    def requests_are_counted_where_they_are(self) -> None:
        for engine in self.cluster.engines:
            running = engine.running
            jobs = [*running.admitted, *running.decoding.jobs, *running.joining]
            assert running.held >= 0 and not running.admitted.keys() & running.decoding.jobs.keys()
            assert all(job.lease is not None for job in jobs)
            assert all(job.phase == QUEUED for job in engine.waiting.queue)
            assert all(job.phase == FETCHING for job in engine.waiting.fetching)
            assert all(job.phase in (CLAIMING, PREFILLING) for job in running.admitted)
            assert running._prefilling == [job for job in running.admitted if job.phase == PREFILLING], "in order of admission"
            assert all(job.phase == DECODING for job in [*running.decoding.jobs, *running.joining])

    def teardown(self) -> None:
        if not hasattr(self, "failing"):
            return
        while self.failing:
            self.env.run(until=self.env.now + 1000)
            self.come_back(0)
        for request in self.coming:
            self.cluster._arrive(request)
        self.env.run()
        assert self.cluster.is_done, self.cluster._where()
        self.cluster.check_idle()


def test_no_order_of_events_breaks_a_cluster() -> None:
    run_state_machine_as_test(
        ClusterMachine,
        settings=hypothesis_settings(
            max_examples=max(1, STEPS // STEPS_AT_ONCE),
            stateful_step_count=STEPS_AT_ONCE,
        ),
    )
