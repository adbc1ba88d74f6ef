"""Steps in flight against vLLM's loop, written out: ``step_with_batch_queue`` and ``schedule``, with a clock and nothing else.

See small.py for the round numbers. All prompts differ, and there is memory for all of them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.pool import Pool
from kvsim.core.tier import Tier
from kvsim.engine.engine import EngineSettings
from kvsim.engine.prefetching import Prefetching
from kvsim.engines.vllm.rules import VLLMRules
from kvsim.engines.vllm.stepped import SteppedCache
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.stages import layers_of_stages
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import (
    FOREVER,
    HARDWARE,
    LAYERS,
    MODEL,
    PAGE_TOKENS,
    SmallEngine,
    ask,
    make_requests,
    seconds,
    small_engine,
)

LETTERS = "abcdefghijklmnopqrst"
SEND_S = 0.25


@dataclass
class One:
    """A request: what of it has been scheduled, and what has come out."""

    arrival_s: float
    prompt: int
    output: int
    scheduled: int = 0
    """``num_computed_tokens``, which counts at once what is scheduled."""
    answered: int = 0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def known(self) -> int:
        return self.prompt + self.answered


@dataclass
class Server:
    """An engine core with a batch queue, and workers that are stages."""

    requests: list[One]
    max_tokens: int
    stages: int
    now: float = 0.0
    waiting: deque[One] = field(default_factory=deque)
    running: list[One] = field(default_factory=list)
    queue: deque[tuple[float, list[tuple[One, int]]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.coming = deque(sorted(self.requests, key=lambda one: one.arrival_s))
        self.free_s = [0.0] * self.stages
        self.share = [layers / LAYERS for layers in layers_of_stages(LAYERS, self.stages)]

    def schedule(self) -> list[tuple[One, int]]:
        """Running requests first, in order, each with what it has to compute; then waiting ones."""
        left, batch = self.max_tokens, []
        for one in [*self.running, *self.waiting]:
            tokens = min(one.known - one.scheduled, left)
            if not left:
                break
            if not tokens:  # it is being computed
                continue
            if one not in self.running:
                self.running.append(self.waiting.popleft())
            one.scheduled += tokens
            left -= tokens
            batch.append((one, tokens))
        return batch

    def execute(self, batch: list[tuple[One, int]]) -> float:
        """Return when the last stage has computed a batch, of which each stage serves one after another."""
        at_s, tokens = self.now, sum(count for _, count in batch)
        for stage, share in enumerate(self.share):
            at_s = max(at_s + (SEND_S if stage else 0.0), self.free_s[stage]) + share * tokens
            self.free_s[stage] = at_s
        return at_s

    def update(self, batch: list[tuple[One, int]], upto: dict[int, int]) -> None:
        for one, _ in batch:
            if upto[id(one)] < one.known:
                continue
            one.answered += 1
            one.first_s = one.first_s or self.now
            if one.answered == one.output:
                one.end_s = self.now
                self.running.remove(one)

    def run(self) -> None:
        known: dict[int, dict[int, int]] = {}
        while self.coming or self.waiting or self.running or self.queue:
            while self.coming and self.coming[0].arrival_s <= self.now:
                self.waiting.append(self.coming.popleft())
            if len(self.queue) < self.stages and (batch := self.schedule()):
                known[id(batch)] = {id(one): one.scheduled for one, _ in batch}
                self.queue.append((self.execute(batch), batch))
                if len(self.queue) < self.stages:
                    continue
            if self.queue:
                self.now, batch = self.queue.popleft()
                self.update(batch, known.pop(id(batch)))
            elif self.coming:
                self.now = self.coming[0].arrival_s


asked = st.tuples(st.integers(0, 80), st.integers(0, 5), st.integers(1, 4), st.integers(1, 6))
"""Arrival in halves of a second, pages, tokens beyond them, and the length of the answer."""


def own_engine(machine: dict[str, Any], max_tokens: int) -> SmallEngine:
    """kvsim's own cache."""
    return small_engine(gpu=1000, max_batch_tokens=max_tokens, hardware=machine)


def vllm_engine(machine: dict[str, Any], max_tokens: int, pages: int = 1000) -> SmallEngine:
    """vLLM's cache, which takes blocks and names pages when a step is scheduled."""
    tier = Tier("gpu", 0, Pool(pages), LRU())
    tier.eviction.bind(PolicyContext(tier=0, capacity_pages=pages, page_tokens=PAGE_TOKENS))
    cache = SteppedCache(tier, VLLMRules(), PAGE_TOKENS)
    spec, settings = HardwareSpec(**(HARDWARE | machine)), EngineSettings(max_batch_tokens=max_tokens)
    substrate = SimulatedSubstrate(MODEL, spec, PAGE_TOKENS, links="fifo")
    prefetching, stages = Prefetching(cache, NoPrefetch(), Offer), spec.pipeline_parallel
    schedule = VLLMRules().scheduler()
    return SmallEngine(substrate, cache, prefetching, settings, FCFS(), schedule=schedule, steps_in_flight=stages)


@pytest.mark.parametrize("make", [own_engine, vllm_engine])
@given(st.lists(asked, min_size=1, max_size=10), st.integers(3, 16), st.sampled_from([1, 2, 3, 4]))
def test_requests_get_their_tokens_when_a_batch_queue_would_bring_them(
    make: Callable[[dict[str, Any], int], SmallEngine], drawn: list[tuple[int, int, int, int]], max_tokens: int, stages: int
) -> None:
    drawn = sorted(drawn)
    arrivals = [half / 2 + 0.1 + at * 0.001 for at, (half, *_) in enumerate(drawn)]
    ones = [One(at_s, 4 * pages + tokens, output) for at_s, (_, pages, tokens, output) in zip(arrivals, drawn, strict=True)]
    Server(ones, max_tokens, stages).run()
    links = {"interconnect_latency_s": SEND_S, "interconnect_bytes_per_s": FOREVER}
    machine = {"gpus": stages, "pipeline_parallel": stages, **links}
    words = [LETTERS[at] + LETTERS[:pages][1:] if pages else "" for at, (_, pages, _, _) in enumerate(drawn)]
    asks = [
        ask(word, at_s, tokens=tokens, output=output)
        for word, at_s, (_, _, tokens, output) in zip(words, arrivals, drawn, strict=True)
    ]
    outcome = make(machine, max_tokens).run(make_requests(asks))
    assert outcome.ttft_s.tolist() == seconds([one.first_s - one.arrival_s for one in ones])
    assert outcome.e2e_s.tolist() == seconds([one.end_s - one.arrival_s for one in ones])


@given(st.lists(asked, min_size=2, max_size=10), st.integers(3, 16), st.sampled_from([2, 3, 4]), st.integers(8, 14))
def test_requests_of_vllm_end_when_there_is_too_little_memory_for_all(
    drawn: list[tuple[int, int, int, int]], max_tokens: int, stages: int, pages: int
) -> None:
    """Any of them fits alone, with up to 30 tokens. Blocks are given back, and those that are not held can be reused."""
    asks = [
        ask((LETTERS[at % 3] + LETTERS[:pages])[:count], half / 2, tokens=tokens, output=output)
        for at, (half, count, tokens, output) in enumerate(sorted(drawn))
    ]
    engine = vllm_engine({"gpus": stages, "pipeline_parallel": stages}, max_tokens, pages)
    outcome = engine.run(make_requests(asks))
    assert not outcome.status.any() and (outcome.e2e_s >= outcome.ttft_s).all()
    assert engine.gpu.pool.free + engine.gpu.evictable_pages == pages and engine.is_idle
    engine.cache.check()
