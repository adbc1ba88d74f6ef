"""A trace played against an emulated server: every request hits what a replay and a simulation say."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.emulation.apis.base import ApiSettings
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.results.observed import NOT_TOLD
from kvsim.run.play import replay, simulate
from kvsim.servers.play import play_server, read_facts
from kvsim.servers.prompts import as_sent
from kvsim.servers.settings import ServerSettings
from tests.reused_compositions import compositions_are_reused
from tests.servers.emulated import Emulated, emulated, plan_of
from tests.workloads import Words

WORDS = ("abcdefgh", "abcdxyzw", "abcdefghij", "pqrs", "abcdefgh", "pqrstuvw", "abcdxyzw", "mnopqrstuvwx", "abcdef", "pqrs")
"""Prompts, a page for each letter: more than the caches of these tests have room for."""
VLLM = ("preset=vllm", "tiers.gpu.capacity=32pages")
SGLANG = ("preset=sglang", "page_tokens=4", "tiers.gpu.capacity=32pages")
HICACHE = ("preset=sglang_hicache", "page_tokens=4", "tiers.gpu.capacity=24pages", "tiers.cpu.capacity=32pages")
SERVERS = pytest.mark.parametrize(
    ("dialect", "overrides"),
    [
        ("vllm", VLLM),
        ("vllm", ("preset=vllm_offload", "tiers.gpu.capacity=20pages", "tiers.cpu.capacity=16pages")),
        ("sglang", SGLANG),
        ("sglang", HICACHE),
        ("openai", ("page_tokens=4", "rules.cache_output=true", "tiers.gpu.capacity=32pages")),
        ("openai", ("page_tokens=4", "rules.cache_output=true", "tiers.gpu.capacity=24pages", "cluster.engines=2")),
    ],
    ids=["vllm", "vllm offload", "sglang", "hicache", "own rules", "two engines"],
)


@pytest.fixture(autouse=True, scope="module")
def compositions() -> Iterator[None]:
    with compositions_are_reused():
        yield


def requests_of(page_tokens: int, *, gap_s: float = 0.0, words: Sequence[str] = WORDS) -> list[Request]:
    """A request for each word, each with an answer of another length, of more than a page."""
    index = Words()
    return [
        index.request(
            word,
            index=number,
            page_tokens=page_tokens,
            tail=number % page_tokens,
            output=3 * page_tokens // 2 + number,
            arrival_s=number * gap_s,
        )
        for number, word in enumerate(words)
    ]


def simulated(server: Emulated, requests: list[Request]) -> Outcome:
    """The simulation of the same plan with the same requests, in the order and at the times at which they reached the server."""
    sent = {one.output_tokens: one for one in as_sent(requests, server.plan.page_tokens)}
    came = [served.request for served in server.served]
    timed = [replace(sent[one.output_tokens], index=one.index, arrival_s=one.arrival_s, after=-1) for one in came]
    return simulate(plan_of(server.overrides), timed)


def hit_tokens(outcome: Outcome) -> list[int]:
    """The hits of each request, in the order of the lengths of their answers, which is that of the trace."""
    tokens = outcome.hit_pages.sum(axis=1) * outcome.page_tokens
    order = np.argsort([request.output_tokens for request in outcome.requests])
    hits: list[int] = tokens[order].tolist()
    return hits


@SERVERS
def test_requests_one_at_a_time_hit_what_a_simulation_says(dialect: str, overrides: Sequence[str]) -> None:
    with emulated(overrides, dialect=dialect, speed=300.0) as server:
        requests = requests_of(server.plan.page_tokens)
        settings = ServerSettings(url=server.url, concurrency=1, reset=dialect != "openai")
        run = play_server(requests, server.plan.page_tokens, settings)
        outcome = simulated(server, requests)
    assert run.failures() == ""
    assert run.cached_tokens.tolist() == hit_tokens(outcome)
    assert 0 < run.cached_tokens.sum() < run.prompt_tokens.sum()
    assert run.prompt_tokens.tolist() == [request.prompt_tokens for request in requests]
    assert run.output_tokens.tolist() == [request.output_tokens for request in requests]
    assert run.admitted().tolist() == list(range(len(requests)))


@SERVERS
def test_requests_at_once_hit_what_a_simulation_says(dialect: str, overrides: Sequence[str]) -> None:
    """They arrive while others run, and evict and find each other's pages."""
    with emulated(overrides, dialect=dialect, speed=10.0) as server:
        requests = requests_of(server.plan.page_tokens, gap_s=0.02)
        run = play_server(
            requests, server.plan.page_tokens, ServerSettings(url=server.url, speed=10.0, reset=dialect != "openai")
        )
        outcome = simulated(server, requests)
        first_tokens_s = [served.first_token_s for served in server.served]
    assert run.failures() == ""
    assert run.cached_tokens.tolist() == hit_tokens(outcome)
    np.testing.assert_allclose(np.array(first_tokens_s), outcome.arrival_s + outcome.ttft_s, atol=1e-9)


def test_requests_one_at_a_time_hit_what_a_replay_says() -> None:
    with emulated(SGLANG, dialect="sglang", speed=300.0) as server:
        requests = requests_of(server.plan.page_tokens)
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=1))
        outcome = replay(server.plan, as_sent(requests, server.plan.page_tokens))
    assert run.cached_tokens.tolist() == hit_tokens(outcome)


def test_hits_do_not_depend_on_the_page_size_that_prompts_are_made_of() -> None:
    """Pages of 8 tokens against a server with pages of 16: it finds every second one."""
    with emulated(("preset=vllm", "tiers.gpu.capacity=1000pages"), speed=300.0) as server:
        requests = requests_of(8, words=("abcdefgh", "abcdefgh", "abcxy", "abcdefghijk"))
        run = play_server(requests, 8, ServerSettings(url=server.url, concurrency=1))
    assert run.cached_tokens.tolist() == [0, 64, 16, 64], "of 64, 65, 42 and 91 tokens; three pages of 8 are one of 16"


def test_tiers_of_hits_are_told_and_counted() -> None:
    with emulated(HICACHE, dialect="sglang", speed=300.0) as server:
        requests = requests_of(server.plan.page_tokens)
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=1))
        outcome = simulated(server, requests)
    gpu, cpu = (outcome.hit_pages[:, :2] * outcome.page_tokens).T.tolist()
    assert run.tier_tokens["device"].tolist() == gpu and run.tier_tokens["host"].tolist() == cpu
    assert sum(cpu) > 0
    labels = 'engine_type="unified",model_name="emulated"'
    assert run.counters[f'sglang:cached_tokens_total{{cache_source="host",{labels}}}'] == sum(cpu)
    labels = 'engine_type="unified",is_streaming="true",model_name="emulated"'
    assert run.counters[f"sglang:prompt_tokens_total{{{labels}}}"] == run.prompt_tokens.sum()


def test_counters_are_those_of_the_run_alone() -> None:
    with emulated(VLLM, speed=300.0) as server:
        requests = requests_of(server.plan.page_tokens)
        settings = ServerSettings(url=server.url, concurrency=2)
        runs = [play_server(requests, server.plan.page_tokens, settings) for _ in range(2)]
    for run in runs:
        labels = 'engine="0",model_name="emulated"'
        assert run.counters[f"vllm:prefix_cache_queries_total{{{labels}}}"] == run.prompt_tokens.sum()
        assert run.counters[f"vllm:prefix_cache_hits_total{{{labels}}}"] == run.cached_tokens.sum()


def test_a_run_begins_with_an_empty_cache() -> None:
    """After a warm-up with prompts of its own, too."""
    with emulated(("preset=vllm", "tiers.gpu.capacity=1000pages"), speed=300.0) as server:
        requests = requests_of(server.plan.page_tokens)
        settings = ServerSettings(url=server.url, concurrency=1, warmup_requests=3)
        first, second = [play_server(requests, server.plan.page_tokens, settings) for _ in range(2)]
        kept = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=1, reset=False))
        assert len(server.served) == 3 * len(requests) + 6
        assert all(served.cached_tokens[0] == 0 for served in server.served[:3])
    assert first.cached_tokens.tolist() == second.cached_tokens.tolist()
    assert kept.cached_tokens[0] == 112, "of the run before it: a hit leaves the last of 8 pages, since it leaves a token"


def test_times_are_those_of_the_server() -> None:
    """At real speed, the client sees what the simulation says, a little later."""
    with emulated(VLLM) as server:
        short = requests_of(server.plan.page_tokens, words=("abcd", "pqrs"), gap_s=0.1)
        requests = [replace(one, output_tokens=100 + one.index) for one in short]
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url))
        outcome = simulated(server, requests)
    ttft_s = run.first_token_s - run.sent_s
    assert (ttft_s >= outcome.ttft_s).all() and (ttft_s < outcome.ttft_s + 10.0).all()
    assert (run.end_s - run.sent_s >= outcome.e2e_s).all() and all(len(gaps) for gaps in run.token_gaps_s)
    assert run.sent_s[1] >= run.due_s[1] == pytest.approx(0.1)
    np.testing.assert_allclose(run.first_token_s + [gaps.sum() for gaps in run.token_gaps_s], run.end_s)


def test_requests_follow_others() -> None:
    """The second turn of a session comes its pause after the first one has ended; the speed divides both times."""
    with emulated(VLLM, speed=300.0) as server:
        first, second, other = requests_of(server.plan.page_tokens, words=("abcd", "abcdef", "pqrs"))
        requests = [first, replace(second, after=0, delay_s=3.0), replace(other, arrival_s=1.0)]
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, speed=20.0))
        loop = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=3))
    assert run.due_s[2] == pytest.approx(0.05)
    assert run.end_s[0] + 0.15 <= run.sent_s[1] and run.cached_tokens[1] == 64
    assert loop.end_s[0] <= loop.sent_s[1] and loop.cached_tokens[1] == 64, "in a closed loop, too, but without the pause"
    assert loop.concurrency == 3 and run.speed == 20.0


def test_a_request_waits_for_all_that_it_joins() -> None:
    with emulated(VLLM, speed=300.0) as server:
        first, long, quick, last = requests_of(server.plan.page_tokens, words=("ab", "ab" * 9, "abcd", "abx"))
        requests = [first, replace(long, after=0), replace(quick, after=0), replace(last, after=2, joins=(1,), delay_s=3.0)]
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, speed=20.0))
        loop = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=4))
    assert max(run.end_s[1:3]) + 0.15 <= run.sent_s[3]
    assert max(loop.end_s[1:3]) <= loop.sent_s[3]


def test_a_closed_loop_keeps_its_number_under_way() -> None:
    with emulated(VLLM) as server:
        requests = requests_of(server.plan.page_tokens, words=["ab"] * 7)
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=3))
    under_way = [sum((run.sent_s <= at_s) & (at_s < run.end_s)) for at_s in run.sent_s]
    assert max(under_way) == 3 and run.sent_s[3] >= min(run.end_s[:3])


def test_facts_are_read_from_the_server() -> None:
    with emulated(VLLM) as server:
        vllm = read_facts(ServerSettings(url=server.url + "/v1/"))
    assert (vllm.engine, vllm.version, vllm.model) == ("vllm", "0.33.0", "emulated")
    assert (vllm.page_tokens, vllm.capacity_tokens, vllm.host_capacity_tokens) == (16, 32 * 16, None)
    assert vllm.settings["scheduler_config.max_num_seqs"] == 256 and vllm.settings["cache_config.num_gpu_blocks"] == "33"
    with emulated(HICACHE, dialect="sglang") as server:
        sglang = read_facts(ServerSettings(url=server.url))
    assert (sglang.engine, sglang.version, sglang.model) == ("sglang", "0.5.23", "emulated")
    assert (sglang.page_tokens, sglang.capacity_tokens, sglang.host_capacity_tokens) == (4, 24 * 4, 32 * 4)
    assert sglang.settings["chunked_prefill_size"] == 8192
    with emulated(VLLM, dialect="openai") as server:
        plain = read_facts(ServerSettings(url=server.url))
    assert (plain.engine, plain.model, plain.page_tokens, plain.capacity_tokens) == ("openai", "emulated", None, None)


def test_what_a_server_does_not_say_is_noted() -> None:
    with emulated(VLLM, speed=300.0, settings=ApiSettings(tells_cached=False, tells_times=False)) as server:
        requests = requests_of(server.plan.page_tokens, words=("abcd", "abcd"))
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url, concurrency=1))
    assert run.cached_tokens.tolist() == [NOT_TOLD] * 2 and np.isnan(run.queued_s).all()
    assert any("of 2 prompts were cached: start vLLM with --enable-prompt-tokens-details" in note for note in run.notes)
    assert run.admitted().tolist() == [0, 1], "by their first tokens"


def test_time_in_the_queue_is_told() -> None:
    """Each request has room only when the one before it has ended."""
    with emulated(("preset=vllm", "tiers.gpu.capacity=12pages"), speed=0.1) as server:
        requests = requests_of(server.plan.page_tokens, words=("abcdefgh", "pqrstuvw", "mnopqrst"))
        run = play_server(requests, server.plan.page_tokens, ServerSettings(url=server.url))
        outcome = simulated(server, requests)
    np.testing.assert_allclose(np.sort(run.queued_s), np.sort(outcome.columns["queue_s"]) / 0.1, atol=1e-6)
    assert run.queued_s.max() > 0, "an answer takes 0.8 s"
    assert (run.sent_s + run.queued_s < run.first_token_s).all()


def test_progress_is_told() -> None:
    seen: list[int] = []
    with emulated(VLLM, speed=300.0) as server:
        play_server(requests_of(16), 16, ServerSettings(url=server.url, concurrency=2), seen.append)
    assert seen == list(range(1, len(WORDS) + 1))


def test_what_cannot_be_played_is_refused_before_anything_is_sent() -> None:
    with emulated(VLLM) as server, pytest.raises(UsageError, match="several samples"):
        play_server([replace(requests_of(16)[0], samples=2)], 16, ServerSettings(url=server.url))
    assert server.served == []
