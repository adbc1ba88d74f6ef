"""A trace played against an emulated server: every request hits what a replay and a simulation say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvsim.core.request import Request
from kvsim.engine.outcome import Outcome
from kvsim.run.play import simulate
from kvsim.servers.play import play_server
from kvsim.servers.prompts import as_sent
from kvsim.servers.settings import ServerSettings
from tests.servers.emulated import Emulated, emulated, plan_of
from tests.workloads import Words

WORDS = (
    "abcdefgh",
    "abcdxyzw",
    "abcdefghij",
    "pqrs",
    "abcdefgh",
    "pqrstuvw",
    "abcdxyzw",
    "mnopqrstuvwx",
    "abcdef",
    "pqrs",
    "abcdxyzwk",
)
"""Prompts, a page for each letter: more than the caches of these tests have room for."""


def requests_of(page_tokens: int, *, gap_s: float = 0.0, words: Sequence[str] = WORDS, **about: Any) -> list[Request]:
    """A request for each word, with an answer of a page and a half."""
    index = Words()
    return [
        index.request(
            word,
            index=number,
            page_tokens=page_tokens,
            tail=number % page_tokens,
            output=3 * page_tokens // 2 + 1,
            arrival_s=number * gap_s,
            **about,
        )
        for number, word in enumerate(words)
    ]


def simulated(server: Emulated, requests: list[Request], arrivals_s: Sequence[float]) -> Outcome:
    """The simulation of the same plan with the same requests at these times."""
    sent = as_sent(requests, server.plan.page_tokens)
    timed = [replace(one, arrival_s=at_s, after=-1) for one, at_s in zip(sent, arrivals_s, strict=True)]
    return simulate(plan_of(server.overrides), timed)


def hit_tokens(outcome: Outcome, page_tokens: int) -> list[list[int]]:
    return (outcome.hit_pages * page_tokens).tolist()


@pytest.mark.parametrize(
    ("dialect", "overrides"),
    [
        ("vllm", ["preset=vllm", "tiers.gpu.capacity=24pages"]),
        ("vllm", ["preset=vllm_offload", "tiers.gpu.capacity=16pages", "tiers.cpu.capacity=16pages"]),
        ("sglang", ["preset=sglang", "page_tokens=4", "tiers.gpu.capacity=24pages"]),
        ("sglang", ["preset=sglang_hicache", "page_tokens=4", "tiers.gpu.capacity=20pages", "tiers.cpu.capacity=32pages"]),
        ("openai", ["page_tokens=4", "rules.cache_output=true", "tiers.gpu.capacity=24pages"]),
    ],
    ids=["vllm", "vllm offload", "sglang", "hicache", "own rules"],
)
def test_one_request_at_a_time_hits_what_a_simulation_does(dialect: str, overrides: list[str]) -> None:
    with emulated(overrides, dialect=dialect, speed=200.0) as server:
        requests = requests_of(server.plan.page_tokens)
        run = play_server(
            requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=1, reset=dialect != "openai")
        )
        outcome = simulated(server, requests, [served.request.arrival_s for served in server.emulator.served])
    assert run.failures() == ""
    assert run.cached_tokens.tolist() == [sum(hits) for hits in hit_tokens(outcome, server.plan.page_tokens)]
    assert run.cached_tokens.sum() > 0
