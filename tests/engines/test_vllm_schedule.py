"""``rules=vllm`` in a simulation: the schedule is vLLM's, step by step."""

import csv
import gzip
from collections import Counter
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.cluster.cluster import Cluster
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request, RetentionRange
from kvsim.core.tier import Tier
from kvsim.core.watch import Watch
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engines.vllm.rules import VLLMRules
from kvsim.engines.vllm.stepped import SteppedCache
from kvsim.hardware.spec import HardwareSpec, LinearHardware
from kvsim.pages.extents import Extent
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.policies.scheduling.priority import Priority
from kvsim.run.play import simulate
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.composing import plan
from tests.core.knowing import Knowing
from tests.engine.small import HARDWARE, MODEL
from tests.engines.slow_schedule import SlowSchedule
from tests.engines.small import empty_cache
from tests.policies.small import POLICIES, policy_of
from tests.workloads import EXAMPLES, Words, extents_of, make_request, pages_of

PAGE_TOKENS = 4
FORMULA = LinearHardware(
    **HARDWARE, fixed_s=5e-3, prefill_token_s=2e-5, decode_request_s=1e-5, chunk_context_s=2.5e-9, decode_context_s=1e-8
)
Row = tuple[int, int, float, float]
"""Hit pages, retractions, seconds of the first and of the last token."""


def rows_of(outcome: Outcome) -> list[Row]:
    pages, retractions = outcome.hit_pages[:, 0].tolist(), outcome.columns["retractions"].tolist()
    first, last = ((outcome.arrival_s + times).tolist() for times in (outcome.ttft_s, outcome.e2e_s))
    return list(zip(pages, retractions, first, last, strict=True))


class Watched(Watch):
    """How often each page is stored, by what the tier says of it."""

    def __init__(self) -> None:
        self.copies = Counter[int]()

    def stored(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self.copies.update(pages_of(extents))

    def dropped(self, tier: Tier, extents: tuple[Extent, ...]) -> None:
        self.copies.subtract(pages_of(extents))

    def check(self, cache: SteppedCache) -> None:
        """Recount the cache, and compare."""
        cache.check()
        younger = [copy for copies in cache.pool._copies.values() for copy in copies[1:]]
        nodes = [*cache.tree.root.descendants(), *younger]
        if isinstance(cache.pool.gpu.eviction, Knowing):
            cache.pool.gpu.eviction.check(cache.pool.gpu, nodes)
        assert +self.copies == Counter(page for node in nodes for page in pages_of(node.runs))


def serve(
    requests: list[Request],
    capacity: int,
    settings: EngineSettings,
    *,
    names_answers: bool,
    scheduling: SchedulingPolicy | None = None,
    eviction: EvictionPolicy | None = None,
    resets: Container[int] = (),
) -> list[Row]:
    """The engine's schedule by vLLM's rules; everything is recounted whenever a request ends.

    The cache is reset after these numbers of requests have ended.
    """
    gpu = Tier("gpu", 0, SlotPool(capacity), eviction or LRU())
    known = {"requests": requests, "model": MODEL, "hardware": HardwareSpec(**HARDWARE), "empty_cache": empty_cache}
    gpu.eviction.bind(PolicyContext(tier=0, capacity_pages=capacity, page_tokens=PAGE_TOKENS, **known))
    cache, watched = SteppedCache(gpu, VLLMRules(cache_output=names_answers), PAGE_TOKENS), Watched()
    gpu.watches.append(watched)
    substrate = SimulatedSubstrate(MODEL, FORMULA, PAGE_TOKENS, links="fifo")
    engine = Engine(substrate, cache, Prefetching(cache, NoPrefetch(), Offer), settings, scheduling or FCFS())

    def inspect(ended: int) -> None:
        if ended in resets:
            cache.reset()
        watched.check(cache)

    rows = rows_of(Cluster([engine]).run(requests, inspect))
    assert gpu.pool.free + gpu.evictable_pages == capacity
    return rows


def check_schedule(
    requests: list[Request], capacity: int, settings: EngineSettings, *, names_answers: bool, names_late: bool = False
) -> None:
    """Hits and retractions are those of the slow model, and times agree within a microsecond."""
    limits = settings.max_batch_tokens, settings.max_running_requests
    schedule = SlowSchedule(FORMULA, PAGE_TOKENS, capacity, *limits, names_late=names_late)
    expected = schedule.run(requests, names_answers=names_answers)
    assert_same(serve(requests, capacity, settings, names_answers=names_answers), expected)


def draw(random: Random, *, shares_answers: bool, count: int | None = None) -> list[Request]:
    """Requests whose prompts share beginnings and often end with a page. Answers are unique, or are shared like prompts."""

    def letters(pages: int) -> list[str]:
        return random.choices("ab", [3, 1], k=pages)

    words, requests, now = Words(), list[Request](), 0.0
    for index in range(count or random.randint(2, 14)):
        now += random.choice([0.0, 0.0, 0.004, 0.02, 0.1]) * random.random()
        prompt = tuple(random.choices("ab", [3, 1], k=random.randint(1, 7)))
        tail = random.choice([0, 0, 1, 3])
        output = random.randint(1, 30)
        about: Any = {"page_tokens": PAGE_TOKENS, "tail": tail, "output": output, "arrival_s": now}
        requests.append(words.answered(prompt, index=index, answer=letters if shares_answers else None, **about))
    return requests


FOUND_BY_WAITING = (1834, 4295)
"""Seeds that draw a request which fits once it finds pages of an answer that has grown while it waited."""


@pytest.mark.parametrize(("names_answers", "shares_answers"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("seed", [*range(EXAMPLES // 2), *FOUND_BY_WAITING])
def test_the_schedule_is_that_of_the_slow_model(seed: int, names_answers: bool, shares_answers: bool):
    """Pages of answers that other prompts contain can be found when the next page is taken: in vLLM, one step earlier."""
    random = Random(seed)
    for _ in range(5):
        requests = draw(random, shares_answers=shares_answers)
        largest = max(-(-(one.prompt_tokens + one.output_tokens) // PAGE_TOKENS) for one in requests)
        capacity = largest + random.choice([0, 1, 2, 5, 10, 30])
        settings = EngineSettings(max_batch_tokens=random.choice([7, 16, 64]), max_running_requests=random.choice([2, 4, 16]))
        check_schedule(requests, capacity, settings, names_answers=names_answers, names_late=shares_answers)


@pytest.mark.parametrize("names_answers", [True, False])
def test_the_schedule_by_priority_is_that_of_the_slow_model(names_answers: bool):
    """Unless a request preempts itself before others that run: in vLLM these then skip a step."""
    compared = preempted = 0
    for seed in range(2 * EXAMPLES):
        random = Random(seed)
        requests = draw(random, shares_answers=False)
        for request in requests:
            request.priority = random.randrange(3)
        largest = max(-(-(one.prompt_tokens + one.output_tokens) // PAGE_TOKENS) for one in requests)
        capacity = largest + random.choice([0, 1, 2, 5, 10])
        settings = EngineSettings(max_batch_tokens=random.choice([7, 16, 64]), max_running_requests=random.choice([2, 4, 16]))
        limits = settings.max_batch_tokens, settings.max_running_requests
        schedule = SlowSchedule(FORMULA, PAGE_TOKENS, capacity, *limits, by_priority=True)
        expected = schedule.run(requests, names_answers=names_answers)
        if schedule.has_skipped:
            continue
        compared += 1
        preempted += any(row[1] for row in expected)
        rows = serve(requests, capacity, settings, names_answers=names_answers, scheduling=Priority())
        assert_same(rows, expected)
    assert compared > EXAMPLES // 2 and preempted > EXAMPLES // 8


@pytest.mark.parametrize("name", ["Knowing", *POLICIES])
def test_any_eviction_policy_keeps_the_pool_right(name: str):
    """With copies of any page, found in turn, and with resets while requests hold them; ``Knowing`` knows what can leave."""
    for seed in range(2 * EXAMPLES if name == "Knowing" else EXAMPLES // 10):
        random = Random(seed)
        requests = draw(random, shares_answers=True, count=30)
        for one in requests:
            one.turn, one.session = divmod(one.index, 7)
            one.kind, one.priority = "chat", one.index % 3
            one.retention = (RetentionRange(0, one.prompt_tokens, 30 + 10 * one.priority, 5.0),)
        settings = EngineSettings(max_batch_tokens=16, max_running_requests=4)
        resets = random.sample(range(len(requests)), 2) if seed % 2 else ()
        policy = Knowing() if name == "Knowing" else policy_of(name)
        rows = serve(requests, 18, settings, names_answers=True, eviction=policy, resets=resets)
        assert sum(pages for pages, *_ in rows) > 0


def request(words: Words, word: str, index: int, *, tail: int = 0, output: int = 1) -> Request:
    return words.request(word, page_tokens=PAGE_TOKENS, tail=tail, output=output, index=index, output_runs=())


def test_a_prompt_is_found_in_the_step_that_computes_it():
    words = Words()
    requests = [request(words, "abc", 0, tail=1), request(words, "abx", 1, tail=1), request(words, "abc", 2)]
    rows = serve(requests, 20, EngineSettings(), names_answers=False)
    assert [pages for pages, *_ in rows] == [0, 2, 2]
    assert [first for _, _, first, _ in rows] == [0.005 + 2e-5 * (13 + 5 + 4) + 2.5e-9 * (5 * 8 + 4 * 8)] * 3


def test_an_answer_below_the_second_copy_of_a_page_is_found_while_it_grows():
    """The second request computes the page of b again; the third finds the older copy, and after it the page of c."""
    words = Words()
    answer = extents_of(words.pages("abcd")[2:])
    requests = [
        request(words, "ab", 0),
        words.request("ab", page_tokens=PAGE_TOKENS, output=12, index=1, arrival_s=0.001, output_runs=answer),
        words.request("abcx", page_tokens=PAGE_TOKENS, tail=1, output=1, index=2, arrival_s=0.04, output_runs=()),
    ]
    rows = serve(requests, 20, EngineSettings(), names_answers=True)
    assert [pages for pages, *_ in rows] == [0, 1, 3]
    assert rows[1][3] > rows[2][2], "the second request still runs"


def test_a_chunk_without_room_retracts_its_own_request():
    """The prompt of 6 pages just fits at first, but an answer takes a page while it is computed in chunks.

    By then, 14 of its tokens are computed: vLLM 0.25 says that the request found their three pages, since it finds them later.
    """
    words = Words()
    requests = [request(words, "a", 0, tail=3, output=12), request(words, "uvwxyz", 1, output=1)]
    rows = serve(requests, 8, EngineSettings(max_batch_tokens=8), names_answers=False)
    assert [row[:2] for row in rows] == [(0, 0), (0, 1)]
    for loop in ("plain", "overlap"):
        one = plan(
            f"rules.loop={loop}", "preset=vllm", f"page_tokens={PAGE_TOKENS}", "tiers.gpu.capacity=8pages",
            "engine.max_batch_tokens=8", command="simulate",
        )  # fmt: skip
        for version, hits in (("0.33.0", [0, 0]), ("0.25.1", [0, 3])):
            outcome = simulate(replace(one, rules=replace(one.rules, version=version)), requests)
            assert (outcome.columns["retractions"].tolist(), outcome.hit_pages[:, 0].tolist()) == ([0, 1], hits)


def test_a_retracted_request_finds_its_answer_again():
    """Two answers outgrow the GPU; the younger request is retracted and computes only what was evicted meanwhile."""
    words = Words()
    ids = [words.pages((letter, *(f"{letter}{at}" for at in range(9)))) for letter in "ab"]
    requests = [
        make_request(
            pages[:1],
            index=index,
            prompt_tokens=4,
            output_tokens=34,
            output_runs=extents_of(pages[1:]),
            own_path=extents_of(pages),
        )
        for index, pages in enumerate(ids)
    ]
    check_schedule(requests, 12, EngineSettings(), names_answers=True)
    found, lost = (serve(requests, 12, EngineSettings(), names_answers=named)[1] for named in (True, False))
    assert found[1] == lost[1] == 1
    assert found[3] < lost[3]


# --- recorded schedules ------------------------------------------------------------------------------------------------------

CASES = {
    "chunk-pages": 20_448, "decode-first": 22_032, "early-keys": 1_500_000, "early-keys-same-step": 1_500_000,
    "finish-recency": 3_072, "keep-answers": 3_072, "leaps": 2_048, "resume-answers": 2_048, "two-copies": 3_056,
}  # fmt: skip
"""Capacity in tokens by case."""
RECORDED = {
    "mooncake_n1000_r0.3_c1500000": "trace.limit=1000",
    "mooncake_n1000_r0.3_c300000": "trace.limit=1000",
    "stress2_r2.2_c20000": "trace.limit=null",
    "stress2_r4_c60000": "trace.limit=null",
}


def recorded_schedule(path: Path) -> list[Row]:
    """The rows of a recorded schedule; skips the test where it is absent."""
    if not path.is_file():
        pytest.skip(
            f"compares with a recorded schedule that is not part of the repository: ../shared/golden/schedule/{path.name}"
        )
    lines = path.read_text() if path.suffix == ".txt" else gzip.decompress(path.read_bytes()).decode()
    rows = [line.split() for line in lines.partition("# start")[0].splitlines() if line[0] != "#"]
    return [(int(hits), int(preempted), float(first), float(last)) for *_, first, last, hits, preempted in rows]


def simulated(tmp_path: Path, trace: Path, capacity: int, *overrides: str) -> list[Row]:
    """The schedule that the command writes, with hits in tokens."""
    arguments = [
        "preset=vllm", "hardware=linear", "page_tokens=16", "trace=mooncake", f"trace.path={trace}", "trace.answers=unique",
        "rules.cache_output=true", f"tiers.gpu.capacity={capacity}tokens", f"output={tmp_path}", *overrides,
    ]  # fmt: skip
    assert main(["simulate", *arguments]) == 0
    with gzip.open(tmp_path / "requests.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    columns = ("retractions", "first_token_s", "last_token_s")
    return [(int(row["hit_tokens_gpu"]), int(row[columns[0]]), float(row[columns[1]]), float(row[columns[2]])) for row in rows]


def assert_same(rows: list[Row], expected: list[Row]) -> None:
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert [row[2:] for row in rows] == [pytest.approx(row[2:], rel=0, abs=1e-6) for row in expected]


@pytest.mark.parametrize("name", CASES)
def test_recorded_cases_are_played_exactly(shared: Path, tmp_path: Path, name: str):
    cases = shared / "golden" / "schedule" / "cases"
    expected = recorded_schedule(cases / f"{name}.vllm.txt")
    assert_same(simulated(tmp_path, cases / f"{name}.jsonl", CASES[name]), expected)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_schedules_are_played_exactly(shared: Path, tmp_path: Path, name: str):
    folder = shared / "golden" / "schedule"
    expected = recorded_schedule(folder / f"{name}.requests.gz")
    trace, *_, rate, capacity = name.split("_")
    path = shared / "traces" / "mooncake_conversation_trace.jsonl.gz" if trace == "mooncake" else folder / f"{trace}.jsonl"
    rows = simulated(tmp_path, path, int(capacity[1:]), f"trace.rate={rate[1:]}", RECORDED[name])
    assert_same(rows, expected)
