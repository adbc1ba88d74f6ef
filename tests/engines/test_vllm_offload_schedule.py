"""``rules=vllm`` with a CPU tier, and with the overlap loop, in a simulation: schedule and copies are vLLM's, step by step."""

import csv
import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvsim
from kvsim.cli import main
from kvsim.cluster.cluster import Cluster, Failure
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup
from kvsim.core.serving import RulesError
from kvsim.core.tier import Tier, chain
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.watch import EngineWatch
from kvsim.engines.vllm.block_numbers import BlockNumbers
from kvsim.engines.vllm.offloading import OffloadingCache
from kvsim.engines.vllm.rules import VLLMRules
from kvsim.engines.vllm.versions import LATEST
from kvsim.errors import UsageError
from kvsim.hardware.spec import LinearHardware
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.arc import ARC
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.policies.scheduling.priority import Priority
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import HARDWARE, MODEL, PAGE_BYTES
from tests.engines.recorded_schedules import CASES, RUNS, Recorded, Row, assert_same_rows, recorded
from tests.engines.slow_offload_schedule import Offloading, SlowOffloadSchedule
from tests.engines.slow_offload_schedule_25 import SlowSchedule25
from tests.workloads import EXAMPLES, Words, extents_of, make_request

PAGE_TOKENS = 4
LATENCY_S = 1e-4
SLOW: dict[str, type[SlowOffloadSchedule]] = {LATEST: SlowOffloadSchedule, "0.25.1": SlowSchedule25}


class Small:
    """One engine with pages of four tokens, and what it should do by the slow model. Sizes are in pages, of the CPU in chunks."""

    def __init__(self, gpu: int, cpu: int = 0, *, is_async: bool = False, policy: str = "lru", threshold: int = 0,
                 chunk: int = 1, prompt_only: bool = True, load_page_s: float = 1e-4, store_page_s: float = 1e-4,
                 batch_tokens: int = 64, seats: int = 16, tracked: int = 64_000, version: str = LATEST) -> None:  # fmt: skip
        rates = {"host_to_device_bytes_per_s": PAGE_BYTES / load_page_s, "device_to_host_bytes_per_s": PAGE_BYTES / store_page_s}
        self.hardware = LinearHardware(
            **{**HARDWARE, **rates, "both_directions_bytes_per_s": sum(rates.values()), "host_latency_s": LATENCY_S},
            fixed_s=5e-3, prefill_token_s=2e-5, decode_request_s=1e-5, chunk_context_s=2.5e-9, decode_context_s=1e-8,
        )  # fmt: skip
        self.rules = VLLMRules(
            cache_output=True, loop="overlap" if is_async else "plain", blocks_per_chunk=chunk, offload_prompt_only=prompt_only,
            version=version,
        )  # fmt: skip
        self.settings = EngineSettings(max_batch_tokens=batch_tokens, max_running_requests=seats)
        tiers = [Tier("gpu", 0, Pool(gpu), LRU())]
        placements = []
        offloading = None
        if cpu:
            tiers.append(Tier("cpu", 1, Pool(cpu * chunk), {"lru": LRU, "arc": ARC}[policy]()))
            placements.append(StoreThreshold(k=threshold, tracker_pages=tracked))
            offloading = Offloading(
                chunks=cpu, policy=policy, threshold=threshold, tracked=tracked, blocks_per_chunk=chunk, prompt_only=prompt_only,
                load_block_s=load_page_s, store_block_s=store_page_s, latency_s=LATENCY_S,
            )  # fmt: skip
        for tier in tiers:
            known = PolicyContext(tier=tier.index, capacity_pages=tier.pool.capacity, page_tokens=PAGE_TOKENS)
            tier.eviction.bind(known)
        self.setup = CacheSetup(tiers=tiers, edges=chain(tiers, placements), page_tokens=PAGE_TOKENS)
        self.slow = SLOW[version](self.hardware, PAGE_TOKENS, gpu, batch_tokens, seats, is_async=is_async, offloading=offloading)

    def run(self, requests: list[Request], watches: Sequence[EngineWatch] = (), failures: Sequence[Failure] = ()) -> list[Row]:
        """Hit pages on GPU and CPU, preemptions and times; everything is recounted whenever a request ends."""
        cache = self.rules.cache(self.setup)
        substrate = SimulatedSubstrate(MODEL, self.hardware, PAGE_TOKENS, links="fifo")
        prefetching = Prefetching(cache, NoPrefetch(), Offer)
        engine = Engine(substrate, cache, prefetching, self.settings, FCFS(), watches=watches, schedule=self.rules.scheduler())
        outcome = Cluster([engine], failures=failures).run(requests, lambda _: cache.check())
        assert cache.gpu.pool.free + cache.gpu.evictable_pages == cache.gpu.pool.capacity
        if isinstance(cache, OffloadingCache):
            tier = cache.offload
            assert tier.order.pages * tier.chunk_pages == tier.tier.pool.capacity - tier.tier.pool.free <= tier.tier.pool.capacity
        hits = outcome.hit_pages.tolist()
        first, last = ((outcome.arrival_s + times).tolist() for times in (outcome.ttft_s, outcome.e2e_s))
        retractions = outcome.columns["retractions"].tolist()
        return [(*map(int, pages[:2]), *rest) for pages, *rest in zip(hits, retractions, first, last, strict=True)]

    def check(self, requests: list[Request]) -> list[Row]:
        """Play both, and compare."""
        rows = self.run(requests)
        assert_same_rows(rows, self.slow.run(requests, names_answers=True))
        return rows


# --- against the slow model --------------------------------------------------------------------------------------------------


def draw(random: Random) -> list[Request]:
    """Requests whose prompts share beginnings and often end with a page; answers are unique."""
    words, requests, now = Words(), list[Request](), 0.0
    for index in range(random.randint(2, 25)):
        now += random.choice([0.0, 0.0, 0.004, 0.02, 0.1]) * random.random()
        prompt = tuple(random.choices("abc", [5, 2, 1], k=random.randint(1, 12)))
        tail, output = random.choice([0, 0, 1, 3]), random.randint(1, 30)
        requests.append(words.answered(prompt, index=index, page_tokens=PAGE_TOKENS, tail=tail, output=output, arrival_s=now))
    return requests


def drawn(random: Random, *, is_async: bool, version: str) -> tuple[list[Request], Small]:
    """Requests, and a small machine for them."""
    requests = draw(random)
    largest = max(-(-(one.prompt_tokens + one.output_tokens) // PAGE_TOKENS) for one in requests)
    return requests, Small(
        largest + random.choice([0, 1, 2, 5, 10, 30]),
        random.choice([2, 5, 12, 40]),
        is_async=is_async,
        policy=random.choice(["lru", "lru", "arc"]),
        threshold=random.choice([0, 0, 2, 3]),
        tracked=random.choice([6, 64_000]),
        chunk=random.choice([1, 1, 2, 3]),
        prompt_only=random.random() < 0.5,
        load_page_s=random.choice([1e-5, 1e-3, 6e-3]),
        store_page_s=random.choice([1e-5, 1e-3, 6e-3, 3e-2]),
        batch_tokens=random.choice([7, 16, 64]),
        seats=random.choice([1, 2, 4, 16]),
        version=version,
    )


@pytest.mark.parametrize("version", SLOW)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_the_schedule_with_offloading_is_that_of_the_slow_model(seed: int, is_async: bool, version: str) -> None:
    random = Random(seed)
    for _ in range(8):
        requests, small = drawn(random, is_async=is_async, version=version)
        try:
            rows = small.run(requests)
        except RulesError:
            assert version == "0.25.1", "only there, requests can block each other; the slow model would go on for ever"
            continue
        assert_same_rows(rows, small.slow.run(requests, names_answers=True))


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_the_overlap_loop_without_offloading_is_that_of_the_slow_model(seed: int) -> None:
    random = Random(seed)
    for _ in range(5):
        requests = draw(random)
        largest = max(-(-(one.prompt_tokens + one.output_tokens) // PAGE_TOKENS) for one in requests)
        gpu = largest + random.choice([0, 1, 2, 5, 10, 30])
        Small(gpu, is_async=True, batch_tokens=random.choice([7, 16, 64]), seats=random.choice([1, 2, 4, 16])).check(requests)


# --- a rule each -------------------------------------------------------------------------------------------------------------


class Story:
    """Prompts that are words, a page for each letter, with the times at which they arrive."""

    def __init__(self) -> None:
        self.words = Words()
        self.requests: list[Request] = []

    def add(self, word: str, at_s: float, *, tail: int = 1, output: int = 2) -> "Story":
        about: Any = {"page_tokens": PAGE_TOKENS, "tail": tail, "output": output, "arrival_s": at_s}
        self.requests.append(self.words.answered(word, index=len(self.requests), **about))
        return self


def evicted() -> Story:
    """abc is stored in CPU memory, and xyzuvw pushes it out of a GPU of eight pages."""
    return Story().add("abc", 0.0).add("xyzuvwk", 0.1)


def test_pages_that_left_the_gpu_are_loaded_and_the_request_runs_in_the_step_after_the_next() -> None:
    """Decided at 1 s; the load takes 3 x 1.5 ms, is seen at the poll 5 ms later, and its request runs 1 ms after that one."""
    rows = Small(8, 20, load_page_s=1.5e-3).check(evicted().add("abcd", 1.0).requests)
    assert rows[2][:2] == (0, 3)
    assert rows[2][3] == pytest.approx(1.006 + 5e-3 + 5 * 2e-5 + 5 * 12 * 2.5e-9)


def test_with_the_overlap_loop_the_request_runs_one_poll_later() -> None:
    rows = Small(8, 20, load_page_s=1.5e-3, is_async=True).check(evicted().add("abcd", 1.0).requests)
    assert rows[2][3] == pytest.approx(1.007 + 5e-3 + 5 * 2e-5 + 5 * 12 * 2.5e-9)


def test_a_prompt_that_is_loaded_whole_computes_its_last_token_again() -> None:
    rows = Small(8, 20).check(evicted().add("abc", 1.0, tail=0).requests)
    assert rows[2][1] == 3
    assert rows[2][3] == pytest.approx(1.002 + 5e-3 + 2e-5 + 11 * 2.5e-9)


def test_two_requests_do_not_load_the_same_chunks() -> None:
    """The second waits for the load of the first, and finds its pages on the GPU."""
    rows = Small(12, 20).check(Story().add("abc", 0.0).add("xyzuvwklmno", 0.1).add("abcd", 1.0).add("abce", 1.0).requests)
    assert [row[:2] for row in rows[2:]] == [(0, 3), (3, 0)]


def test_a_chunk_is_found_as_a_whole() -> None:
    """Chunks of two pages: of abc only ab is stored, and only a whole chunk beyond the GPU's hit is loaded."""
    rows = Small(8, 10, chunk=2).check(evicted().add("abcd", 1.0).requests)
    assert rows[2][:2] == (0, 2)


def test_answers_are_stored_if_not_only_prompts_are() -> None:
    def loaded(prompt_only: bool) -> int:
        story = Story().add("a", 0.0, tail=0, output=9)
        ids = story.words.pages(("a", "0-0", "0-1"))
        again = make_request(
            ids, index=2, prompt_tokens=13, output_tokens=1, arrival_s=1.0, output_runs=(), own_path=extents_of(ids)
        )
        return Small(8, 20, prompt_only=prompt_only).check([*story.add("xyzuvwk", 0.2).requests, again])[2][1]

    assert (loaded(True), loaded(False)) == (1, 3)


def test_a_step_waits_for_stores_that_read_blocks_which_others_get() -> None:
    """Slow stores: the second prompt takes the first one's blocks, and its step begins when they have been read."""
    rows = Small(8, 20, store_page_s=0.1).check(Story().add("abc", 0.0).add("xyzuvwk", 0.05).requests)
    stored_s = 5e-3 + 13 * 2e-5 + 3 * 0.1 + LATENCY_S
    assert rows[1][3] == pytest.approx(stored_s + 5e-3 + 29 * 2e-5)


def test_a_threshold_stores_a_chunk_when_it_is_offered_again() -> None:
    story = evicted().add("abc", 1.0).add("xyzuvwk", 1.1).add("abc", 2.0)
    assert [row[1] for row in Small(8, 20, threshold=2).check(story.requests)] == [0, 0, 0, 0, 3]
    assert [row[1] for row in Small(8, 20, threshold=3).check(story.requests)] == [0, 0, 0, 0, 0]


def test_a_request_in_flight_is_preempted_only_without_offloading() -> None:
    """Two answers outgrow the GPU."""
    story = Story().add("ab", 0.0, output=30).add("xy", 0.0, output=30)
    plain = Small(12, is_async=True).check(story.requests)
    assert [row[2] for row in plain] == [0, 1]
    assert [row[2] for row in Small(12, 20, is_async=True).check(story.requests)] == [0, 1]


def test_in_0_25_every_request_behind_one_without_room_is_preempted_since_blocks_come_back_late() -> None:
    """Three answers outgrow 24 blocks. In 0.33, the last one is preempted when it is not in flight, and in 0.25 all three at
    once, by the first one that needs a block: with the overlap loop, all are always in flight. Two find room again."""
    story = Story().add("a", 0.0, output=40).add("x", 0.0, output=40).add("k", 0.0, output=40)
    for is_async, preemptions in ((False, [0, 0, 1]), (True, [1, 1, 1])):
        rows = Small(24, 20, is_async=is_async, version="0.25.1").check(story.requests)
        assert [row[2] for row in rows] == preemptions, is_async
    assert [row[2] for row in Small(24, 20, is_async=True).check(story.requests)] == [0, 0, 1]


def test_the_overlap_loop_decides_the_first_two_steps_at_once() -> None:
    """A request that arrives within the first step is computed in the third, not in the second."""
    story = Story().add("a", 0.0, output=4).add("x", 0.001, output=1)
    rows = [Small(20, is_async=is_async).check(story.requests) for is_async in (False, True)]
    prefill_s, decode_s = 5 * 2e-5, 1e-5
    assert rows[0][1][3] == pytest.approx(2 * 5e-3 + 2 * prefill_s + decode_s, abs=1e-6)
    assert rows[1][1][3] == pytest.approx(3 * 5e-3 + 2 * prefill_s + 2 * decode_s, abs=1e-6)


# --- recorded schedules, by the command --------------------------------------------------------------------------------------


def simulated(tmp_path: Path, run: Recorded) -> list[Row]:
    """The schedule that the command writes, with hits in tokens."""
    given = run.settings
    arguments = [
        "preset=vllm", "hardware=linear", "trace=mooncake", f"trace.path={run.trace}", "trace.answers=unique",
        "rules.cache_output=true", f"tiers.gpu.capacity={given['capacity_tokens']}tokens", f"trace.rate={given['rate']}",
        f"trace.limit={given['limit'] or 'null'}", f"engine.max_batch_tokens={given['max_batched_tokens']}",
        f"engine.max_running_requests={given['max_num_seqs']}",
        f"rules.loop={'overlap' if given['async_scheduling'] == 'on' else 'plain'}", f"output={tmp_path}",
    ]  # fmt: skip
    if given["cpu_tokens"]:
        load, store = given["load_bytes_per_s"], given["store_bytes_per_s"]
        arguments[0] = "preset=vllm_offload"
        arguments += [
            "model=llama3_8b", f"tiers.cpu.capacity={given['cpu_tokens']}tokens", f"placement.k={given['store_threshold']}",
            f"eviction@tiers.cpu.eviction={given['eviction_policy']}", f"rules.blocks_per_chunk={given['blocks_per_chunk']}",
            f"rules.offload_prompt_only={given['offload_prompt_only']}", f"hardware.host_to_device_bytes_per_s={load}",
            f"hardware.device_to_host_bytes_per_s={store}", f"hardware.host_latency_s={given['latency_s']}",
            f"hardware.both_directions_bytes_per_s={float(load) + float(store)}",
        ]  # fmt: skip
    assert main(["simulate", *arguments]) == 0
    with gzip.open(tmp_path / "requests.csv.gz", "rt") as file:
        return [
            (int(row["hit_tokens_gpu"]), int(row["hit_tokens_cpu"]), int(row["retractions"]),
             float(row["first_token_s"]), float(row["last_token_s"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *RUNS])
def test_recorded_schedules_are_played_exactly(shared: Path, tmp_path: Path, name: str) -> None:
    run = recorded(shared, name)
    assert_same_rows(simulated(tmp_path, run), run.rows)


# --- what does not go together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "preset", "override", "message"),
    [
        ("replay", "vllm_offload", "rules.loop=overlap", "loop=overlap has no effect on kvsim replay"),
        ("replay", "vllm_offload", "rules.version=0.25.1", "version=0.25.1 has no effect on kvsim replay of a trace"),
        ("simulate", "vllm", "rules.version=0.9", "version must be 0.33.0 or 0.25.1, not 0.9"),
        ("replay", "vllm_offload", "rules.blocks_per_chunk=2", "blocks_per_chunk=2 has no effect on kvsim replay"),
        ("simulate", "vllm", "rules.blocks_per_chunk=2", "blocks_per_chunk=2 has no effect on a run without a CPU tier"),
        ("simulate", "vllm_offload", "rules.offload_prompt_only=false", "offload_prompt_only=false needs cache_output=true"),
        ("simulate", "vllm", "rules.loop=async", "loop must be overlap or plain, not async"),
        ("simulate", "vllm_offload", "rules.blocks_per_chunk=0", "blocks_per_chunk must be"),
        ("simulate", "vllm_offload", "tiers.gpu.capacity=unlimited", "set a size"),
        ("simulate", "vllm_offload", "eviction@tiers.cpu.eviction=fifo", "FIFO cannot order .*: choose lru or arc"),
        ("simulate", "vllm_offload", "rules.version=0.25.1 eviction@tiers.cpu.eviction=fifo", "FIFO cannot order .*: choose lru"),
        ("simulate", "vllm_offload", "placement=write_through", "choose placement=store_threshold"),
        ("simulate", "vllm", "rules.loop=overlap scheduling=priority", "Priority: with the overlap loop or CPU offloading"),
        ("simulate", "vllm_offload", "scheduling=longest_prefix", "LongestPrefix: vLLM's schedule is by arrival"),
        ("simulate", "vllm_offload", "tiers.disk.capacity=1GiB", "no disk tier"),
    ],
)
def test_what_does_not_go_together_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, preset: str, override: str, message: str
) -> None:
    arguments = [f"preset={preset}", "tiers.gpu.capacity=500pages", *override.split(), "trace.limit=20", f"output={tmp_path}"]
    if override.startswith("tiers.gpu"):
        del arguments[1]
    assert main([command, *arguments]) == 2
    captured = capsys.readouterr()
    error = captured.err.strip()
    assert "\n" not in error
    assert re.search(message, error), error


def test_slots_of_the_gpu_are_numbered_where_copies_read_them() -> None:
    small = Small(8, 20)
    cache = small.rules.cache(small.setup)
    assert isinstance(cache, OffloadingCache) and isinstance(cache.gpu.pool, BlockNumbers)


def test_another_order_than_by_arrival_is_refused() -> None:
    small = Small(8, 20)
    cache = small.rules.cache(small.setup)
    substrate = SimulatedSubstrate(MODEL, small.hardware, PAGE_TOKENS, links="fifo")
    with pytest.raises(UsageError, match="set scheduling=fcfs"):
        Engine(
            substrate,
            cache,
            Prefetching(cache, NoPrefetch(), Offer),
            small.settings,
            Priority(),
            schedule=small.rules.scheduler(),
        )


@pytest.mark.parametrize("seed", range(4))
def test_one_request_at_a_time_hits_what_a_replay_hits(seed: int) -> None:
    """Conversations whose answers are in their next prompts; GPU and CPU memory for a few of them.

    A replay counts a page for an answer's last token, whose KV is never computed: no answer ends with the first token of one.
    It also keeps what a request loads until its pages have been stored, which only ARC would show.
    """
    random = Random(seed)
    prompts, answers = [], []
    chats: list[list[int]] = [[] for _ in range(8)]
    for _ in range(90):
        chat = random.choice(chats)
        chat += [random.randrange(10**6) for _ in range(random.randrange(1, 40))]
        prompts.append(list(chat))
        answer_tokens = random.randrange(1, 12)
        answer_tokens += (len(chat) + answer_tokens) % 4 == 1
        answers.append([random.randrange(10**6) for _ in range(answer_tokens)])
        chat += answers[-1]
        if len(chat) > 120:
            chat.clear()
    trace = kvsim.trace_from_tokens(prompts, answers=answers, arrivals_s=[100.0 * n for n in range(len(prompts))], page_tokens=4)
    settings = (
        "preset=vllm_offload", "model=tiny", "tiers.gpu.capacity=45pages", "tiers.cpu.capacity=110pages",
        "eviction@tiers.cpu.eviction=lru", "placement.k=0",
    )  # fmt: skip
    replayed = kvsim.replay(trace, *settings, "replay.in_flight=1")
    simulated = kvsim.simulate(trace, *settings)
    assert replayed.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert replayed.record["config"]["rules"]["cache_output"] is True
    assert replayed.hit_pages[:, 0].sum() > 100 and replayed.hit_pages[:, 1].sum() > 50


def test_requests_that_block_each_other_for_good_end_the_run_with_one_line() -> None:
    """Three requests have loaded, behind one that finds no room beside them; vLLM 0.25.1 makes empty passes from then on."""
    random = Random(24)
    lines = []
    for _ in range(8):
        requests, small = drawn(random, is_async=True, version="0.25.1")
        try:
            small.run(requests)
        except RulesError as error:
            lines.append(str(error))
    (line,) = lines
    assert line.startswith("tiers.gpu.capacity: 3 requests have loaded and wait for good behind one")
