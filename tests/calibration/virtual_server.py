"""A server on a virtual clock: a simulation plays the requests, and tells what a client would have seen."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvsim.core.request import Request
from kvsim.emulation.token_watch import TokenWatch
from kvsim.results.observed import ObservedRun, ServerFacts
from kvsim.run.assembly import build_cluster, build_graphs, build_served
from kvsim.servers.prompts import as_sent
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.servers.emulated import plan_of


class VirtualServer:
    """Plays each run of requests on an empty cache."""

    def __init__(self, overrides: Sequence[str], engine: str = "vllm") -> None:
        self.plan = plan_of(overrides)
        self.facts = ServerFacts(
            engine=engine,
            version="0",
            model="virtual",
            page_tokens=self.plan.page_tokens,
            capacity_tokens=400_000,
            settings={
                "scheduler_config.max_num_batched_tokens": self.plan.engine.max_batch_tokens,
                "chunked_prefill_size": self.plan.engine.max_batch_tokens,
            },
        )
        self.plays = 0

    def play(self, requests: Sequence[Request], page_tokens: int) -> ObservedRun:
        assert page_tokens == self.plan.page_tokens
        self.plays += 1
        plan, sent = self.plan, renumbered(as_sent(requests, page_tokens))
        substrate = SimulatedSubstrate(plan.model, plan.hardware, page_tokens, links="fifo")
        times: list[list[float]] = [[] for _ in sent]
        watch = TokenWatch(substrate.env, substrate.steps.leap_s, lambda some: [times[n].append(substrate.env.now) for n in some])
        caches = [build_served(plan, graph, sent) for graph in build_graphs(plan)]
        outcome = build_cluster(plan, sent, caches, substrate, [watch]).run(sent)
        first = outcome.arrival_s + outcome.ttft_s
        gaps = [np.diff([first[n], *times[n][: one.output_tokens - 1]]) for n, one in enumerate(sent)]
        return ObservedRun(
            source="virtual",
            client="virtual",
            due_s=outcome.arrival_s,
            sent_s=outcome.arrival_s,
            first_token_s=first,
            end_s=outcome.arrival_s + outcome.e2e_s,
            token_gaps_s=gaps,
            prompt_tokens=np.array([one.prompt_tokens for one in sent]),
            output_tokens=np.array([one.output_tokens for one in sent]),
            cached_tokens=np.array([hit * page_tokens for hit in outcome.columns["hit_pages"].sum(axis=1)]),
            tier_tokens={},
            queued_s=np.full(len(sent), np.nan),
            prefill_s=np.full(len(sent), np.nan),
            errors=[None] * len(sent),
            facts=self.facts,
        )


def renumbered(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with page ids from 0 on, in the order in which pages are first seen."""
    first = min(start for request in requests for start, _ in request.runs)
    return [
        replace(
            one,
            runs=tuple((start - first, pages) for start, pages in one.runs),
            output_runs=tuple((start - first, pages) for start, pages in one.output_runs or ()),
            own_path=tuple((start - first, pages) for start, pages in one.own_path or ()),
        )
        for one in requests
    ]
