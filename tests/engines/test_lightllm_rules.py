"""``rules=lightllm``: one test for each rule, then random and real traces against slower models and recorded hits."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.api import load_trace, replay
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup, Rules
from kvsim.core.serving import NEVER_FITS
from kvsim.core.tier import Tier, chain
from kvsim.core.tree import READY
from kvsim.engine.outcome import REJECTED, Outcome
from kvsim.engines.lightllm.cache import LightLLMCache, RunningLease
from kvsim.engines.lightllm.rules import LightLLMRules
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.by_length import ByLength
from kvsim.replaying.replay import Replay
from kvsim.replaying.settings import ReplaySettings
from kvsim.run.assembly import build_setup
from kvsim.run.play import build_tiers, simulate
from kvsim.run.play import replay as run_plan
from kvsim.trace.mooncake import Mooncake
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_lightllm import Row, SlowLightLLM, play_slowly
from tests.workloads import EXAMPLES, Words, as_records, branching_requests, make_request, random_requests

TRACE = "traces/mooncake_conversation_trace.jsonl.gz"


def make_cache(
    gpu: int, cpu: int = 0, *, unit: int = 1, page_tokens: int = 1, cache_output: bool = False, min_tokens: int = 1
) -> LightLLMCache:
    """A cache by LightLLM's rules; slots are numbered, so that none can have two owners."""
    tiers = []
    for index, capacity in enumerate([gpu, cpu] if cpu else [gpu]):
        policy = LRU()
        policy.bind(PolicyContext(tier=index, capacity_pages=capacity, page_tokens=page_tokens))
        tiers.append(Tier(("gpu", "cpu")[index], index, SlotPool(capacity), policy))
    tiers[-1].unit_pages = unit
    placement = ByLength(min_tokens=min_tokens)
    placement.bind(PolicyContext(tier=1, capacity_pages=cpu, page_tokens=page_tokens))
    edges = chain(tiers, [placement] if cpu else [])
    cache = LightLLMRules(cache_output=cache_output).server(CacheSetup(tiers=tiers, edges=edges, page_tokens=page_tokens))
    assert cache is not None
    return cache


def check(cache: LightLLMCache, running: Iterable[RunningLease]) -> None:
    """Recount slots, pins and what can be evicted."""
    running = list(running)
    gpu, nodes = cache.gpu, list(cache.tree.root.descendants())
    slots = [slot for node in nodes for slot in node.slots[0].tolist()] + [slot for one in running for slot in one.slots.tolist()]
    assert sorted([*slots, *gpu.pool.free_slots().tolist()]) == list(range(gpu.pool.capacity))
    assert gpu.evictable_pages == sum(node.pages for node in nodes if not node.pins[0])
    for node in [cache.tree.root, *nodes]:
        assert node.children_in[0] == len(node.children)
        assert node is cache.tree.root or node.state[0] == READY
    if cache.store is not None:
        cache.store.check(cache.waiting.values())


def rows_of(outcome: Outcome) -> list[Row]:
    """Hits of all requests on GPU and CPU; (-1, 0) for a rejected one."""
    rows = zip(outcome.status.tolist(), outcome.hit_pages.tolist(), strict=True)
    return [(-1, 0) if status == REJECTED else (gpu, cpu) for status, (gpu, cpu, _) in rows]


def play(cache: LightLLMCache, requests: list[Request], *, in_flight: int = 1) -> list[Row]:
    outcome = Replay(cache, ReplaySettings(in_flight=in_flight)).run(requests)
    check(cache, [])
    return rows_of(outcome)


class Small:
    """A cache of one-token pages; ``use`` takes a word. By default it computes one token more than the pages of the word."""

    def __init__(self, gpu: int, cpu: int = 0, **settings: Any) -> None:
        self.cache = make_cache(gpu, cpu, **settings)
        self.words = Words()
        self.running: list[RunningLease] = []

    def request(self, word: str, *, tail: int = 1, output: int = 0) -> Request:
        return self.words.request(word, tail=tail, output=output)

    def start(self, request: Request) -> Any:
        lease = self.cache.serve(request, request.prompt_tokens + request.output_tokens, 0.0)
        self.running += [lease] if isinstance(lease, RunningLease) else []
        check(self.cache, self.running)
        return lease

    def finish(self, lease: RunningLease) -> None:
        self.running.remove(lease)
        self.cache.finish_request(lease)
        check(self.cache, self.running)

    def use(self, *words: str, tail: int = 1, output: int = 0) -> Row:
        """Requests from beginning to end; the hits of the last one, (-1, 0) if it was rejected."""
        row = -1, 0
        for word in words:
            lease = self.start(self.request(word, tail=tail, output=output))
            row = -1, 0
            if lease is not NEVER_FITS:
                row = lease.hits[:2]
                self.finish(lease)
        return row

    def nodes(self) -> list[str]:
        """The letters of each node on the GPU, in order of their page ids."""
        nodes = sorted(self.cache.tree.root.descendants(), key=lambda node: node.runs)
        return [self.words.text(node.runs) for node in nodes]

    def on_cpu(self) -> str:
        """The letters on the CPU, the next to leave first; for CPU pages of one token."""
        store = self.cache.store
        assert store is not None
        return self.words.text(store.idle())


# --- the GPU ---------------------------------------------------------------------------------------------------------------


def test_the_last_token_is_always_computed() -> None:
    cache = Small(20)
    assert [cache.use("abcd", tail=0), cache.use("abcd", tail=0), cache.use("abcd", tail=1)] == [(0, 0), (3, 0), (4, 0)]


def test_a_prompt_is_found_once_its_request_has_finished() -> None:
    cache = Small(20)
    first, second = cache.start(cache.request("abc")), cache.start(cache.request("abc"))
    assert second.hits == (0, 0, 0)
    cache.finish(first)
    third = cache.start(cache.request("abc"))
    assert third.hits == (3, 0, 0)


def test_whole_leaves_leave_the_gpu_even_if_less_is_needed() -> None:
    cache = Small(10)
    cache.use("abcdef")
    cache.use("xyzw")
    assert cache.nodes() == ["xyzw"]


def test_what_is_cut_off_keeps_its_time() -> None:
    """SGLang's look-up refreshes both parts of a cut."""
    cache = Small(11)
    cache.use("abcd", "xy", "abe")
    assert cache.nodes() == ["ab", "cd", "xy", "e"]
    cache.use("pqrs")
    assert cache.nodes() == ["ab", "xy", "e", "pqrs"]


def test_a_request_needs_less_than_the_whole_gpu() -> None:
    cache = Small(5)
    assert [cache.use("abcde", tail=0), cache.use("abcd", tail=0), cache.use("abc", output=1)] == [(-1, 0), (0, 0), (-1, 0)]


def test_running_requests_count_in_full_even_what_they_share() -> None:
    cache = Small(10)
    cache.use("abcd")
    cache.start(cache.request("abcd"))
    assert cache.start(cache.request("abcd")) is None
    assert cache.cache.gpu.pool.free == 5
    assert cache.start(cache.request("abc")).hits == (3, 0, 0)


# --- the CPU ---------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_stored_on_the_cpu_when_it_finishes_without_the_page_of_its_last_token() -> None:
    cache = Small(20, 20)
    lease = cache.start(cache.request("abcd", tail=0, output=2))
    assert cache.on_cpu() == ""
    cache.finish(lease)
    assert cache.on_cpu() == "abc"


def test_cpu_hits_are_the_pages_found_there_beyond_the_gpu_s_match() -> None:
    cache = Small(8, 20)
    cache.use("abcdef", "abx", "pqr")
    assert cache.nodes() == ["ab", "x", "pqr"]
    assert cache.use("abcdef") == (2, 4)
    assert cache.use("abcdef") == (6, 0)
    assert cache.cache.counts.loaded_pages == 4


def test_a_prompt_is_lost_from_its_front() -> None:
    cache = Small(8, 5)
    cache.use("abcde")
    cache.use("xy")
    assert cache.on_cpu() == "cdexy"
    cache.use("pqrst", tail=0)
    assert cache.use("abcde") == (0, 0), "c, d and e are of no use without a"


def test_pages_found_stay_until_the_request_is_admitted() -> None:
    cache = Small(10, 4)
    cache.use("ab")
    running = cache.start(cache.request("uvwxy"))
    waiting = cache.request("abcd")
    assert cache.start(waiting) is None
    cache.finish(running)
    lease = cache.start(waiting)
    assert cache.on_cpu() == "uvab", "u and v took all other room; w had none, although a and b were older"
    assert lease.hits == (2, 0, 0)


def test_only_long_prompts_are_stored_if_placement_says_so() -> None:
    cache = Small(20, 20, min_tokens=4)
    cache.use("ab", "xyz")
    assert cache.on_cpu() == "xyz"


def test_a_page_of_the_cpu_may_be_several_of_the_gpu() -> None:
    cache = Small(12, 9, unit=2)
    cache.use("abcde")
    store = cache.cache.store
    assert store is not None
    assert (store.idle_pages, store.tier.pool.free) == (2, 5), "ab and cd; e is no whole page"
    cache.use("pqrstuvwxyz", tail=0)
    assert store.tier.pool.free == 1, "4 pages of the CPU fit"
    assert cache.cache.counts.no_room_pages == 2


# --- answers ---------------------------------------------------------------------------------------------------------------


def test_an_answer_is_kept_without_its_last_token_and_its_slots_are_not_taken_either() -> None:
    cache = Small(7, cache_output=True)
    request = make_request([0, 1], output_tokens=5, output_runs=((5, 4),))
    lease = cache.start(request)
    assert cache.cache.gpu.pool.free == 1
    cache.finish(lease)
    assert [node.runs for node in cache.cache.tree.root.descendants()] == [((0, 2), (5, 4))]


LINES = [
    {"timestamp": 0, "input_length": 20, "output_length": 13, "hash_ids": [1, 2, 3]},
    {"timestamp": 1, "input_length": 20, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"timestamp": 2, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5]},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of three requests, whose second one repeats the prompt of the first."""
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    return file


def test_unique_answers_take_room_and_are_never_hit(path: Path) -> None:
    for page_tokens, answers, hits in ((8, "none", [0, 2, 2]), (8, "unique", [0, 2, 2]), (1, "unique", [0, 16, 16])):
        trace = load_trace("mooncake", path=path, block_tokens=8, answers=answers, page_tokens=page_tokens)
        outcome = replay(trace, "preset=lightllm", f"rules.cache_output={answers == 'unique'}").outcome
        assert outcome.hit_pages[:, 0].tolist() == hits
        stored = {("none", 8): 5, ("unique", 8): 4 + 3, ("unique", 1): 32 + 4 + 24}[answers, page_tokens]
        assert outcome.tiers["gpu"].inserted_pages == stored


# --- settings --------------------------------------------------------------------------------------------------------------

TWO_TIERS = "tiers.cpu.capacity=100GiB"
THREE_TIERS = (TWO_TIERS, "tiers.disk.capacity=1000GiB")


def plan(*overrides: str, command: str = "replay") -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=["preset=lightllm", *overrides])
    return build_run(cfg, command=command, overrides=overrides)


def test_the_preset_is_the_engine_as_it_starts() -> None:
    """Single tokens on the GPU, no CPU cache, no disk, and answers where the trace has them; the CPU cache has larger pages."""
    built = plan()
    assert (built.page_tokens, [tier.name for tier in built.tiers], built.rules) == (1, ["gpu"], LightLLMRules(cache_output=None))
    assert [(tier.name, tier.unit_pages) for tier in plan(TWO_TIERS).tiers] == [("gpu", 1), ("cpu", 256)]


def test_answers_are_cached_if_the_trace_has_their_tokens(path: Path) -> None:
    """At the end, the tree has the first answer but for its last token; the tails of prompts are not among the trace's pages."""
    known, unknown = (load_trace("mooncake", path=path, block_tokens=8, answers=one, page_tokens=1) for one in ("unique", "none"))
    for trace, settings, inserted in (
        (known, (), 32 + 4 + 24),
        (known, ("rules.cache_output=false",), 40),
        (known, ("replay.hold_output=false",), 40),
        (unknown, (), 40),
    ):
        result = replay(trace, "preset=lightllm", *settings)
        assert result.outcome.tiers["gpu"].inserted_pages == inserted
        assert result.record["config"]["rules"]["cache_output"] is (inserted == 60)


def test_the_rules_are_for_all_commands_without_a_disk() -> None:
    built = plan(TWO_TIERS)
    assert isinstance(built.rules.server(build_setup(built, build_tiers(built), [])), LightLLMCache)
    assert built.rules == plan(command="simulate").rules == plan(TWO_TIERS, command="simulate").rules
    assert built.rules == plan(TWO_TIERS, "hardware=h200", "validate.measured=x", command="validate").rules
    assert plan(*THREE_TIERS).rules == plan(*THREE_TIERS, command="simulate").rules == Rules(cache_output=None)


def test_a_line_says_that_kvsim_s_own_rules_have_no_larger_cpu_pages() -> None:
    for command in ("replay", "simulate"):
        built = plan(*THREE_TIERS, command=command)
        assert built.rules_note == (
            f"kvsim's own: those of LightLLM do not cover kvsim {command} with tiers gpu, cpu, disk; "
            "tiers.cpu.page_tokens=256 does not apply"
        )
        assert {tier.unit_pages for tier in built.tiers} == {1}
        assert built.config["tiers"]["cpu"]["page_tokens"] is None
    chosen = plan(TWO_TIERS, "rules=default")
    assert [tier.unit_pages for tier in chosen.tiers] == [1, 1] and not chosen.rules_note


def test_elsewhere_the_same_policies_run_by_kvsim_s_own_rules() -> None:
    built = plan("trace.limit=50", *THREE_TIERS, command="simulate")
    requests = built.trace.load(built.page_tokens).requests
    requests[0].persistent = True
    hits = simulate(built, requests).hit_pages.tolist()
    by_default = plan("trace.limit=50", *THREE_TIERS, "rules=default", "rules.cache_output=true", command="simulate")
    assert hits == simulate(by_default, requests).hit_pages.tolist()


@pytest.mark.parametrize(
    ("overrides", "command", "words"),
    [
        (
            ["placement=write_through"],
            "replay",
            "rules: LightLLM stores whole prompts when they finish, but WriteThrough",
        ),
        (
            ["eviction@tiers.cpu.eviction=lfu"],
            "replay",
            "rules: LightLLM's CPU cache evicts the page used least recently, not by LFU: set",
        ),
        (["tiers.cpu.page_tokens=300"], "replay", "tiers.cpu.page_tokens must be a multiple of page_tokens=256, not 300"),
        (["tiers.cpu.page_tokens=0"], "replay", "tiers.cpu.page_tokens must be a multiple of page_tokens=256, not 0"),
        (["tiers.cpu.page_tokens=big"], "replay", "tiers.cpu.page_tokens must be a multiple of page_tokens=256, not 'big'"),
        (
            ["tiers.cpu.page_tokens=512", "tiers.cpu.capacity=1pages"],
            "replay",
            "tiers.cpu.capacity: 256 tokens are less than one page of tiers.cpu.page_tokens=512",
        ),
        (
            ["tiers.cpu.page_tokens=512", "tiers.cpu.capacity=0"],
            "replay",
            "tiers.cpu.page_tokens has no effect without that tier: set tiers.cpu.capacity",
        ),
        (["tiers.cpu.page_tokens=512", "rules=sglang"], "replay", "tiers.cpu.page_tokens: larger CPU pages work only with"),
        (
            ["tiers.cpu.page_tokens=512", "tiers.disk.capacity=1TiB"],
            "replay",
            "tiers.cpu.page_tokens: larger CPU pages work only with rules=lightllm, without a disk tier",
        ),
        (
            ["tiers.cpu.page_tokens=512", "tiers.disk.capacity=1TiB"],
            "simulate",
            "tiers.cpu.page_tokens: larger CPU pages work only with rules=lightllm",
        ),
    ],
)
def test_what_the_rules_do_not_support_is_an_error(overrides: list[str], command: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        run_plan(plan("page_tokens=256", TWO_TIERS, *overrides, command=command), [])
    assert str(error.value).startswith(words)


def test_equal_page_sizes_are_fine_with_any_rules() -> None:
    built = plan("page_tokens=256", TWO_TIERS, "tiers.cpu.page_tokens=256", "rules=default")
    assert [tier.unit_pages for tier in built.tiers] == [1, 1]


def test_the_preset_s_cpu_pages_are_never_smaller_than_those_of_the_gpu() -> None:
    built = plan("page_tokens=512", TWO_TIERS)
    assert [tier.unit_pages for tier in built.tiers] == [1, 1] and built.config["tiers"]["cpu"]["page_tokens"] is None
    assert [tier.unit_pages for tier in plan("page_tokens=64", TWO_TIERS).tiers] == [1, 4]
    with pytest.raises(UsageError, match=r"tiers\.cpu\.page_tokens must be a multiple of page_tokens=512, not 256"):
        plan("page_tokens=512", TWO_TIERS, "tiers.cpu.page_tokens=256")


# --- slower models, real traces, recorded hits -----------------------------------------------------------------------------


def with_answers(requests: list[Request], page_tokens: int) -> list[Request]:
    """The requests, with answers that have page ids of their own."""
    answered, next_page = [], 10_000
    for request in requests:
        tokens = request.prompt_tokens + max(request.output_tokens - 1, 0)
        pages = tokens // page_tokens - request.prompt_pages
        answered.append(replace(request, output_runs=((next_page, pages),) if pages else ()))
        next_page += pages
    return answered


@given(branching_requests(), st.integers(1, 20), st.integers(0, 20), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_all_small_workloads_hit_as_in_the_slow_model(
    requests: list[Request], gpu: int, cpu: int, unit: int, in_flight: int, cache_output: bool
) -> None:
    setting: dict[str, Any] = {"unit": unit, "page_tokens": 4, "cache_output": cache_output}
    requests = with_answers(requests, 4)
    mine = play(make_cache(gpu, cpu, **setting), requests, in_flight=in_flight)
    assert mine == play_slowly(SlowLightLLM(gpu, cpu, **setting), requests, in_flight=in_flight)


def test_random_traces_hit_as_in_the_slow_model() -> None:
    on_cpu = 0
    for seed in range(EXAMPLES):
        requests = with_answers(random_requests(seed), 4)
        gpu, cpu, in_flight = 4 + seed % 19, seed % 31, 1 + seed % 4
        setting: dict[str, Any] = {"unit": 1 + seed % 3, "page_tokens": 4, "cache_output": seed % 5 == 0}
        mine = play(make_cache(gpu, cpu, **setting), requests, in_flight=in_flight)
        assert mine == play_slowly(SlowLightLLM(gpu, cpu, **setting), requests, in_flight=in_flight), seed
        on_cpu += sum(row[1] for row in mine)
    assert on_cpu > 5 * EXAMPLES


@pytest.mark.parametrize(
    ("page_tokens", "gpu", "cpu", "unit", "in_flight"), [(16, 24, 60, 1, 1), (16, 90, 200, 2, 3), (512, 60, 90, 3, 4)]
)
def test_conversations_hit_as_in_the_slow_model(
    chats: dict[int, list[Request]], page_tokens: int, gpu: int, cpu: int, unit: int, in_flight: int
) -> None:
    mine = play(make_cache(gpu, cpu, unit=unit, page_tokens=page_tokens), chats[page_tokens], in_flight=in_flight)
    slow = SlowLightLLM(gpu, cpu, unit=unit, page_tokens=page_tokens)
    assert mine == play_slowly(slow, chats[page_tokens], in_flight=in_flight)
    assert sum(row[1] for row in mine) > 100


@pytest.mark.long
def test_random_traces_hit_as_in_the_model_beside_the_repository(shared: Path) -> None:
    model = reference(shared, "lightllm_model")
    for seed in range(200, 400):
        requests = random_requests(seed)
        gpu, cpu, in_flight, unit = 2 + seed % 23, seed % 37, 1 + seed % 4, 1 + seed % 3
        mine = play(make_cache(gpu, cpu, unit=unit, page_tokens=4), requests, in_flight=in_flight)
        assert mine == [row[2:] for row in model.play(as_records(requests), gpu, cpu, in_flight, unit, False, 4)], seed


SEQUENCES = [
    ("6000_12000", 6_000, 12_000, 1, 1),
    ("3000_3000_inflight4", 3_000, 3_000, 1, 4),
    ("6000_12000_cpupage2", 6_000, 12_000, 2, 1),
]


@pytest.mark.parametrize(("name", "gpu", "cpu", "unit", "in_flight"), SEQUENCES)
def test_conversation_hits_what_the_engine_hit(
    shared: Path, conversation: list[Request], name: str, gpu: int, cpu: int, unit: int, in_flight: int
) -> None:
    rows = golden_rows(shared, f"conv.lightllm_{name}", 2_000)
    assert play(make_cache(gpu, cpu, unit=unit, page_tokens=512), conversation, in_flight=in_flight) == rows


@pytest.mark.long
@pytest.mark.parametrize(("name", "gpu", "cpu", "unit", "in_flight"), SEQUENCES)
def test_the_whole_conversation_hits_what_the_engine_hit(
    shared: Path, name: str, gpu: int, cpu: int, unit: int, in_flight: int
) -> None:
    requests = Mooncake(path=str(shared / TRACE)).load(512).requests
    rows = golden_rows(shared, f"conv.lightllm_{name}", len(requests))
    assert play(make_cache(gpu, cpu, unit=unit, page_tokens=512), requests, in_flight=in_flight) == rows


@pytest.mark.parametrize("limit", [2_000, pytest.param(12_031, marks=pytest.mark.long)])
def test_single_tokens_on_the_gpu_hit_what_the_engine_hit(shared: Path, limit: int) -> None:
    rows = golden_rows(shared, "conv.lightllm_tokens_6000_12000_cpupage256tokens", limit)
    trace = load_trace("mooncake", path=shared / TRACE, limit=limit, answers="unique", page_tokens=1)
    sizes = (f"tiers.gpu.capacity={6_000 * 512}tokens", f"tiers.cpu.capacity={12_000 * 512}tokens", "tiers.cpu.page_tokens=256")
    outcome = replay(trace, "preset=lightllm", *sizes).outcome
    assert rows_of(outcome) == rows
