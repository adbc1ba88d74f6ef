"""Several answers to one prompt by the rules of engines. See tests/engine/small.py for the round numbers: a token takes 1 s."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

import kvsim
from kvsim.cluster.cluster import Cluster, Failure
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup, Rules
from kvsim.core.tier import Tier
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engines.fastdeploy.rules import FastDeployRules
from kvsim.engines.lightllm.rules import LightLLMRules
from kvsim.engines.sglang.rules import SGLangRules
from kvsim.engines.vllm.rules import VLLMRules
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.pages.extents import split_extents
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.base import Trace
from tests.engine.small import HARDWARE, MODEL, PAGE_TOKENS, ask, hits, make_requests, seconds
from tests.workloads import conversations

A, B = "abcd", "efgh"
RULES = {
    "vllm": VLLMRules(cache_output=False),
    "vllm overlap": VLLMRules(cache_output=False, loop="overlap"),
    "fastdeploy": FastDeployRules(cache_output=False),
    "sglang": SGLangRules(cache_output=False, loop="plain"),
    "sglang overlap": SGLangRules(cache_output=False),
}
AT_ONCE = ["vllm", "vllm overlap", "fastdeploy"]
WARMED_UP = ["sglang", "sglang overlap"]


def serve(rules: Rules, requests: list[Request], gpu: int, *, seats: int = 16, failures: Sequence[Failure] = ()) -> Outcome:
    """Serve requests with one engine by its rules; afterwards nothing is left of them but what is cached."""
    tier = Tier("gpu", 0, Pool(gpu), LRU())
    tier.eviction.bind(PolicyContext(tier=0, capacity_pages=gpu, page_tokens=PAGE_TOKENS))
    cache = rules.cache(CacheSetup(tiers=[tier], edges=[], page_tokens=PAGE_TOKENS))
    assert cache is not None and rules.samples is not None
    substrate = SimulatedSubstrate(MODEL, HardwareSpec(**HARDWARE), PAGE_TOKENS, links="fifo")
    settings = EngineSettings(max_batch_tokens=64, max_running_requests=seats)
    prefetching = Prefetching(cache, NoPrefetch(), Offer)
    engine = Engine(substrate, cache, prefetching, settings, FCFS(), schedule=rules.scheduler())
    cluster = Cluster([engine], failures=failures, samples=rules.samples)
    outcome = cluster.run(requests, lambda _: cache.check())
    assert not cluster._samples_left and not cluster._apart and not cache.leases
    assert tier.pool.free + tier.evictable_pages == tier.pool.capacity
    return outcome


def sampled(requests: list[Request], *samples: int) -> list[Request]:
    for request, count in zip(requests, samples, strict=False):
        request.samples = count
    return requests


def replayed(name: str, requests: list[Request], gpu: int, *settings: str) -> Outcome:
    trace = Trace(name="small", requests=requests, page_tokens=PAGE_TOKENS, block_tokens=None)
    outcome: Outcome = kvsim.replay(trace, "model=tiny", f"rules={name}", f"tiers.gpu.capacity={gpu}pages", *settings).outcome
    return outcome


# --- in time ---


def test_in_lightllm_samples_share_all_of_a_prompt_and_decode_at_once() -> None:
    """17 s for the prompt, and 10 steps of 3 tokens. They share 4 pages of 7; a request that comes later finds these at once,
    which it does not find of a prompt with one answer before that has ended. It computes 1 token in one of the steps."""
    for samples, found in ((3, 4), (1, 0)):
        requests = sampled(make_requests([ask(A, output=11), ask(A, 18.0)]), samples)
        outcome = serve(LightLLMRules(cache_output=False), requests, 40)
        assert outcome.ttft_s[0] == seconds(17)
        assert hits(outcome, 1)[0] == found
        assert outcome.e2e_s[0] == seconds(17 + 10 * samples + (1 if found else 17))
    outcome = serve(LightLLMRules(cache_output=False), sampled(make_requests([ask(A, output=11)]), 3), 14)
    assert outcome.tiers["gpu"].peak_pages == 4 + 3 * 3


def test_lightllm_rejects_a_request_whose_samples_do_not_fit_together() -> None:
    """They take 13 pages, which must be fewer than there are."""
    for gpu, status in ((14, FINISHED), (13, REJECTED)):
        for command in ("time", "replay"):
            requests = sampled(make_requests([ask(A, output=11), ask(B, 100)]), 3)
            rules = LightLLMRules(cache_output=False)
            outcome = serve(rules, requests, gpu) if command == "time" else replayed("lightllm", requests, gpu)
            assert outcome.status.tolist() == [status, FINISHED]


@pytest.mark.parametrize("at_s", [5.0, 17.5, 30.0])
def test_an_engine_of_lightllm_that_fails_serves_the_samples_when_it_is_back(at_s: float) -> None:
    requests = sampled(make_requests([ask(A, output=11), ask(A, 1.0, output=5), ask(B, 2.0, output=1)]), 3, 2, 4)
    outcome = serve(LightLLMRules(), requests, 60, failures=[Failure(engine=0, at_s=at_s, back_after_s=5.0)])
    assert outcome.status.tolist() == [FINISHED] * 3 and outcome.e2e_s[0] > at_s + 5


def test_after_a_failure_every_sample_of_lightllm_takes_its_own_pages_only() -> None:
    """Three samples of 4 + 3 pages: 4 shared ones and 3 each, or without the prompt in the cache 7 each, 21 in all."""
    requests = sampled(make_requests([ask(A, output=11)]), 3)
    outcome = serve(LightLLMRules(cache_output=False), requests, 30, failures=[Failure(engine=0, at_s=20.0, back_after_s=5.0)])
    assert outcome.status.tolist() == [FINISHED] and outcome.tiers["gpu"].peak_pages == 21


@pytest.mark.parametrize("at_s", [38.25, 38.75, 39.25, 39.75])
def test_an_engine_of_sglang_that_fails_has_not_lost_those_on_their_last_token(at_s: float) -> None:
    """The next step has been formed without them while the step that computes it runs."""
    requests = make_requests([ask(A, output=4), ask(B, output=11)])
    failures = [Failure(engine=0, at_s=at_s, back_after_s=5.0)]
    outcome = serve(SGLangRules(cache_output=False), requests, 40, failures=failures)
    assert outcome.status.tolist() == [FINISHED, FINISHED]


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_an_engine_of_vllm_drains_while_requests_wait(loop: str) -> None:
    requests = conversations(7, requests=40, gap_s=0.02, page_tokens=16)
    trace = Trace(name="small", requests=requests, page_tokens=16, block_tokens=None)
    rules = ("preset=vllm", "rules.cache_output=false", f"rules.loop={loop}")
    result = kvsim.simulate(trace, "model=tiny", "tiers.gpu.capacity=90pages", *rules, "engine.reset_at_s=[0.269]")
    assert (result.outcome.status == FINISHED).all()


@pytest.mark.parametrize("seed", range(8))
def test_every_count_of_lightllms_cache_holds_while_samples_overlap(seed: int) -> None:
    """Four samples of the longest request take 5 pages and 3 each."""
    random = Random(seed)
    requests = sorted(asked(random), key=lambda request: request.arrival_s)
    requests = sampled([replace(one, index=at) for at, one in enumerate(requests)], *[random.randint(1, 4) for _ in requests])
    outcome = serve(LightLLMRules(cache_output=False), requests, random.choice([18, 25]))
    assert outcome.status.tolist() == [FINISHED] * len(requests)


@pytest.mark.parametrize("seed", range(6))
def test_samples_of_lightllm_hit_in_time_what_they_hit_in_a_replay(seed: int) -> None:
    """Requests come one after another; answers are known, and CPU memory keeps prompts."""
    outcomes = []
    for command in ("replay", "simulate"):
        requests = conversations(seed, requests=40, page_tokens=16, gap_s=1000.0)
        counts = [Random(seed * 100 + number).choice([1, 1, 2, 3]) for number in range(len(requests))]
        trace = Trace(name="small", requests=sampled(requests, *counts), page_tokens=16, block_tokens=None)
        settings = [
            "tiers.gpu.capacity=48pages",
            "tiers.cpu.capacity=90pages",
            "tiers.cpu.page_tokens=32",
            "model=tiny",
            "placement.min_tokens=32",
        ]
        answers = f"rules.cache_output={'true' if seed % 2 == 0 else 'false'}"
        outcomes.append(getattr(kvsim, command)(trace, "preset=lightllm", *settings, answers).outcome)
    assert outcomes[0].hit_pages.tolist() == outcomes[1].hit_pages.tolist()
    assert outcomes[0].hit_pages[:, 0].sum() > 0 and outcomes[0].hit_pages[:, 1].sum() > 0
    assert outcomes[0].status.tolist() == outcomes[1].status.tolist()


@pytest.mark.parametrize("name", AT_ONCE)
def test_samples_are_requests_that_find_each_others_pages_in_the_same_step(name: str) -> None:
    """17 tokens of the first and the last one of two others in one step; then 10 steps of 3 tokens. They share 4 pages of 7."""
    outcome = serve(RULES[name], sampled(make_requests([ask(A, output=11), ask(A + "e", 100.0)]), 3), 20)
    assert outcome.ttft_s[0] == seconds(17 + 2)
    assert outcome.e2e_s[0] == seconds(17 + 2 + 10 * 3)
    assert outcome.tpot_s[0] == seconds(3)
    assert [hits(outcome, number)[0] for number in (0, 1)] == [0, 4]
    assert outcome.tiers["gpu"].peak_pages == 4 + 3 * 3


@pytest.mark.parametrize("name", WARMED_UP)
def test_in_sglang_a_request_without_an_answer_computes_the_prompt_first(name: str) -> None:
    """17 s for the prompt, 3 s for the last tokens of three samples, and 10 steps of 3 tokens."""
    outcome = serve(RULES[name], sampled(make_requests([ask(A, output=11), ask(A + "e", 100.0)]), 3), 20)
    assert outcome.ttft_s[0] == seconds(17 + 3)
    assert outcome.e2e_s[0] == seconds(17 + 3 + 10 * 3)
    assert outcome.tpot_s[0] == seconds(3)
    assert [hits(outcome, number)[0] for number in (0, 1)] == [0, 4]
    assert outcome.tiers["gpu"].peak_pages == 4 + 3 * 3


@pytest.mark.parametrize("name", RULES)
def test_the_row_has_the_hits_of_the_first_request_only(name: str) -> None:
    outcome = serve(RULES[name], sampled(make_requests([ask(A, output=2), ask(A, 100.0, output=2)]), 1, 3), 20)
    assert hits(outcome, 1) == (4, 0, 0)


@pytest.mark.parametrize("name", RULES)
def test_waiting_times_are_those_of_the_requests_that_lead_to_the_first_token(name: str) -> None:
    """It arrives 1 s after a step of 17 s has begun. SGLang's samples miss the pass that follows their warm-up, which forms a
    decode step of 1 s unless that is under way already."""
    outcome = serve(RULES[name], sampled(make_requests([ask(B, output=2), ask(A, 1.0, output=2)]), 1, 2), 20)
    assert outcome.columns["queue_s"][1] == seconds(16 + (name == "sglang"))
    assert outcome.columns["load_s"][1] == 0


@pytest.mark.parametrize("name", RULES)
def test_a_request_ends_when_all_of_its_samples_have(name: str) -> None:
    """Only one runs at a time, and the follower waits for all: 17 + 10 and 1 + 10; SGLang's warm-up takes 17, the samples 11."""
    requests = sampled(make_requests([ask(A, output=11), ask(B, 1000, after=0)]), 2)
    outcome = serve(RULES[name], requests, 20, seats=1)
    expected = 17 + 2 * 11 if name in WARMED_UP else 17 + 10 + 1 + 10
    if "overlap" not in name:
        assert outcome.e2e_s[0] == seconds(expected)
    assert outcome.arrival_s[1] == outcome.e2e_s[0] >= expected * (1 - 1e-9)


@pytest.mark.parametrize("name", RULES)
def test_samples_need_no_room_together(name: str) -> None:
    """One takes 7 pages; kvsim's own rules reject three that need 13 and have 10."""
    requests = make_requests([ask(A, output=11), ask(B, 100)])
    assert serve(RULES[name], sampled(requests, 3), 10).status.tolist() == [FINISHED, FINISHED]
    for engine, expected in (("default", REJECTED), (name.split()[0], FINISHED)):
        again = sampled(make_requests([ask(A, output=11), ask(B, 100)]), 3)
        assert replayed(engine, again, 10).status.tolist() == [expected, FINISHED]


@pytest.mark.parametrize("name", RULES)
def test_a_request_whose_samples_never_fit_is_rejected_and_has_no_times(name: str) -> None:
    for command in (lambda requests: serve(RULES[name], requests, 6), lambda requests: replayed(name.split()[0], requests, 6)):
        outcome = command(sampled(make_requests([ask(A, output=11), ask("ef", 100)]), 3))
        assert outcome.status.tolist() == [REJECTED, FINISHED]
        assert [str(number) for number in (outcome.ttft_s[0], outcome.e2e_s[0])] == ["nan"] * 2


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("at_s", [5.0, 17.5, 25.0, 40.0])
def test_an_engine_that_fails_serves_them_all_when_it_is_back(name: str, at_s: float) -> None:
    requests = sampled(make_requests([ask(A, output=11), ask(A, 1.0, output=5), ask(B, 2.0)]), 3, 2)
    outcome = serve(RULES[name], requests, 20, failures=[Failure(engine=0, at_s=at_s, back_after_s=5.0)])
    assert outcome.status.tolist() == [FINISHED] * 3


def asked(random: Random) -> list[Request]:
    words = ["a", "ab", "abc", "abcd", "b", "bc"]
    return make_requests(
        [
            ask(random.choice(words), round(random.random() * 200, 3), tokens=random.randint(1, 3), output=random.randint(1, 12))
            for _ in range(random.randint(3, 12))
        ]
    )


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("seed", range(6))
def test_samples_are_like_requests_that_arrive_together(name: str, seed: int) -> None:
    random = Random(seed)
    requests = sorted(asked(random), key=lambda request: request.arrival_s)
    counts = [random.choice([1, 1, 2, 3]) for _ in requests]
    each = [(request, number) for request, count in zip(requests, counts, strict=True) for number in range(count)]
    alike = [replace(request, index=index) for index, (request, _) in enumerate(each)]
    gpu = random.choice([9, 12, 30])
    expected = serve(RULES[name], alike, gpu)
    together = serve(RULES[name], sampled([replace(request, index=at) for at, request in enumerate(requests)], *counts), gpu)
    rows = [[at for at, (one, _) in enumerate(each) if one is request] for request in requests]
    assert together.hit_pages.tolist() == [expected.hit_pages[row[0]].tolist() for row in rows]
    assert together.ttft_s.tolist() == [expected.ttft_s[row[0]] for row in rows]
    assert together.e2e_s.tolist() == [max(expected.e2e_s[row]) for row in rows]
    assert together.columns["retractions"].tolist() == [sum(expected.columns["retractions"][row]) for row in rows]


TIERS = {
    "vllm_offload": ["placement.k=2", "tiers.cpu.capacity=30pages"],
    "fastdeploy": ["tiers.cpu.capacity=30pages", "tiers.disk.capacity=50pages"],
    "sglang_hicache": ["tiers.cpu.capacity=30pages", "scheduling=longest_prefix"],
}


@pytest.mark.parametrize("preset", TIERS)
@pytest.mark.parametrize("seed", range(3))
def test_samples_use_the_tiers_below_like_requests_that_arrive_together(preset: str, seed: int) -> None:
    random = Random(seed)
    requests = conversations(seed * 2, requests=30, gap_s=0.05)
    counts = [random.choice([1, 1, 2, 3]) for _ in requests]
    each = [number for number, count in enumerate(counts) for _ in range(count)]
    outcomes = []
    for asked in (
        sampled([replace(request, index=at) for at, request in enumerate(requests)], *counts),
        [replace(requests[number], index=at) for at, number in enumerate(each)],
    ):
        trace = Trace(name="small", requests=asked, page_tokens=16, block_tokens=None)
        settings = ["model=tiny", "tiers.gpu.capacity=45pages", "rules.cache_output=false", *TIERS[preset]]
        outcomes.append(kvsim.simulate(trace, f"preset={preset}", *settings).outcome)
    together, expected = outcomes
    assert set(together.status.tolist()) == {FINISHED}
    if preset != "sglang_hicache":
        rows = [[at for at, number in enumerate(each) if number == request.index] for request in together.requests]
        assert together.hit_pages.tolist() == [expected.hit_pages[row[0]].tolist() for row in rows]
        assert together.e2e_s.tolist() == [max(expected.e2e_s[row]) for row in rows]
        assert together.hit_pages[:, 1:].sum() > 0


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("rules", ["vllm", "sglang", "fastdeploy", "lightllm"])
def test_every_sample_may_have_an_answer_of_its_own_that_is_cached(command: str, rules: str) -> None:
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 20], [1, 2, 3, 7, 8, 9, 20]]
    trace = kvsim.trace_from_tokens(prompts, answers=[[4, 5, 6], [0], [0]], arrivals_s=[0.0, 100.0, 200.0], page_tokens=1)
    first = trace.requests[0]
    others = [request.runs for request in trace.requests[1:]]
    first.samples, first.sample_output_runs = 2, (split_extents(split_extents(others[1], 5)[0], 3)[1],)
    result = getattr(kvsim, command)(trace, f"rules={rules}", "tiers.gpu.capacity=40pages", "rules.cache_output=true")
    assert result.hit_pages[:, 0].tolist() == [0, 5, 5]


# --- replays ---


@pytest.mark.parametrize("name", ["vllm", "sglang", "fastdeploy", "lightllm"])
def test_in_a_replay_samples_find_the_prompt_and_share_it(name: str) -> None:
    outcome = replayed(name, sampled(make_requests([ask(A, output=11), ask(A + "e", 100.0)]), 3), 20)
    assert outcome.hit_pages[:, 0].tolist() == [0, 4]
    assert outcome.tiers["gpu"].peak_pages == 4 + 3 * 3


@pytest.mark.parametrize("name", ["vllm", "sglang", "fastdeploy"])
def test_those_in_flight_finish_before_samples_do(name: str) -> None:
    """The first holds 7 pages of 16, and the three samples need 13; with 12, a sample waits for another."""
    for gpu in (16, 12):
        requests = sampled(make_requests([ask(B, output=11), ask(A, output=11), ask(A, output=11)]), 1, 3)
        outcome = replayed(name, requests, gpu, "replay.in_flight=9")
        assert outcome.status.tolist() == [FINISHED] * 3
        assert outcome.hit_pages[2].tolist() == [4, 0, 0] and outcome.tiers["gpu"].peak_pages <= gpu


@pytest.mark.parametrize("preset", ["vllm_hybrid", "sglang_mamba", "lightllm_hybrid"])
def test_rules_for_hybrid_models_refuse_samples(preset: str) -> None:
    trace = Trace(name="x", requests=sampled(conversations(page_tokens=64), 2), page_tokens=64, block_tokens=None)
    with pytest.raises(UsageError, match="rules: the trace asks for several samples of an answer, which an engine's own rules"):
        kvsim.replay(trace, f"preset={preset}")
