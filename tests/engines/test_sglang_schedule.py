"""``rules=sglang`` in a simulation: the schedule is SGLang's, pass by pass."""

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvsim.cli import main
from kvsim.cluster.cluster import Cluster
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request, RetentionRange
from kvsim.core.tier import Tier
from kvsim.core.transfer import Transfer
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.frontend import Frontend
from kvsim.engine.job import Job
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.schedule import Parts, Schedule, Step
from kvsim.engine.watch import EngineWatch
from kvsim.engines.sglang.budget import TokenRatio
from kvsim.engines.sglang.queue import NodeQueue
from kvsim.engines.sglang.rules import SGLangRules
from kvsim.engines.sglang.schedule import NodeSchedule
from kvsim.engines.sglang.stepped import SteppedNodes
from kvsim.engines.sglang.steps import NodeStep
from kvsim.engines.sglang.versions import LATEST, VERSIONS
from kvsim.hardware.spec import HardwareSpec, LinearHardware
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.eviction.lfu import LFU
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.dfs_weight import DfsWeight
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.policies.scheduling.longest_prefix import LongestPrefix
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.mooncake import Mooncake
from tests.engine.small import HARDWARE, MODEL
from tests.engines.sglang_schedule_model import Prompt, SlowSGLang
from tests.engines.small import empty_cache
from tests.policies.small import POLICIES, policy_of
from tests.workloads import EXAMPLES

FORMULA = LinearHardware(
    **HARDWARE, fixed_s=5e-3, prefill_token_s=2e-5, decode_request_s=1e-5, chunk_context_s=2.5e-9, decode_context_s=1e-8
)
SCHEDULING: dict[str, type[SchedulingPolicy]] = {"fcfs": FCFS, "lpm": LongestPrefix, "dfs-weight": DfsWeight}
Row = tuple[int, int, float, float]
"""Tokens found, retractions, seconds of the first and of the last token."""
Formed = tuple[str, int, int, int, int, int, int, int, float]
"""Kind of the step, requests, new tokens, decoding, waiting, running, free tokens, evictable tokens, ratio."""


class Spy(Schedule):
    """Records what each pass forms, and recounts the cache."""

    def __init__(self, schedule: NodeSchedule) -> None:
        self.own = schedule
        self.waiting = schedule.waiting
        self.looks_ahead = schedule.looks_ahead
        self.is_draining = False
        self.steps: list[Formed] = []

    def report_to(self, frontend: Frontend) -> None:
        self.own.report_to(frontend)

    def __len__(self) -> int:
        return len(self.own)

    @property
    def retractions(self) -> int:
        return self.own.retractions

    @property
    def admitted(self) -> int:
        return self.own.admitted

    def takes(self, request: Request) -> bool:
        return self.own.takes(request)

    def form(self) -> Any:
        step = yield from self.own.form()
        own = self.own
        own.cache.check()
        if step is not None:
            assert isinstance(step, NodeStep)
            chunks, answers, page_tokens = step.chunks, step.answers, own.page_tokens
            kind = "mixed" if chunks and answers else "prefill" if chunks else "decode"
            new = sum(chunk.end - chunk.begin for chunk in chunks) + len(answers)
            tokens = own.pool.free * page_tokens, own.gpu.evictable_pages * page_tokens
            counts = len(chunks) + len(answers), new, len(answers), len(own.queue), len(own.running)
            self.steps.append((kind, *counts, *tokens, own.ratio.value))
        return step

    def ended(self, step: Step, steps: int) -> None:
        assert isinstance(step, NodeStep)
        if steps > 1:
            self.repeat(step, steps - 1)
        self.own.ended(step, steps)

    def repeat(self, leap: NodeStep, steps: int) -> None:
        """Record ``steps`` repetitions of a leap's step; the step recorded last may be the one after the leap."""
        own, last = self.own, self.steps[-1]
        ratio = TokenRatio(own.settings.conservativeness)
        ratio.value = own.ratio.value
        held = [lease.tokens for _, lease in leap.answers]
        if self.looks_ahead:
            assert last[0] == "decode" and last[3] == len(leap.answers)
        for more in range(1, steps + 1):
            ratio.decay()
            begun = sum(-(-(tokens + more) // own.page_tokens) - -(-tokens // own.page_tokens) for tokens in held)
            tokens = (own.pool.free - begun) * own.page_tokens, own.gpu.evictable_pages * own.page_tokens
            self.steps.append((*last[:6], *tokens, ratio.value))

    def transfer_ended(self, transfer: Transfer) -> bool:
        return self.own.transfer_ended(transfer)

    def join(self, job: Job) -> None:
        self.own.join(job)

    def drop(self, job: Job, *, is_up: bool) -> None:
        self.own.drop(job, is_up=is_up)

    def stop(self, steps: int) -> list[Job]:
        return self.own.stop(steps)


def rows_of(outcome: Outcome) -> list[Row]:
    tokens, retractions = (outcome.hit_pages[:, 0] * outcome.page_tokens).tolist(), outcome.columns["retractions"].tolist()
    first, last = ((outcome.arrival_s + times).tolist() for times in (outcome.ttft_s, outcome.e2e_s))
    return list(zip(tokens, retractions, first, last, strict=True))


def serve(
    requests: list[Request],
    capacity: int,
    page_tokens: int,
    rules: SGLangRules,
    *,
    scheduling: SchedulingPolicy | None = None,
    eviction: EvictionPolicy | None = None,
    chunk: int = 8192,
    most: int = 256,
    leaps: bool = True,
    watches: Sequence[EngineWatch] = (),
) -> tuple[list[Row], list[Formed]]:
    """The schedule by SGLang's rules, request by request and step by step, with room for ``capacity`` tokens.

    Without ``leaps``, the engine reports after each step, so that it makes them one by one.
    """
    gpu = Tier("gpu", 0, SlotPool(capacity // page_tokens), eviction or LRU())
    known = {"requests": requests, "model": MODEL, "hardware": HardwareSpec(**HARDWARE), "empty_cache": empty_cache}
    gpu.eviction.bind(PolicyContext(tier=0, capacity_pages=capacity // page_tokens, page_tokens=page_tokens, **known))
    cache = SteppedNodes(gpu, page_tokens, caches_answers=rules.cache_output is not False, version=VERSIONS[rules.version])
    substrate = SimulatedSubstrate(MODEL, FORMULA, page_tokens, links="fifo")
    spies: list[Spy] = []
    make = rules.scheduler()

    def spy(parts: Parts) -> Spy:
        spies.append(Spy(make(parts)))
        return spies[0]

    settings = EngineSettings(max_batch_tokens=chunk, max_running_requests=most)
    prefetching = Prefetching(cache, NoPrefetch(), Offer)
    engine = Engine(substrate, cache, prefetching, settings, scheduling or FCFS(), schedule=spy, watches=watches)
    cluster = Cluster([engine])
    engine.reports = not leaps
    rows = rows_of(cluster.run(requests))
    cache.check()
    assert not cache.leases and gpu.pool.free + gpu.evictable_pages == gpu.pool.capacity
    return rows, spies[0].steps


Line = dict[str, Any]


def prompts_of(lines: Sequence[Line], block_tokens: int, declared: int | None = None) -> list[Prompt]:
    """The requests of a trace as the model reads them: token by token."""
    prompts = []
    for index, line in enumerate(lines):
        blocks = [np.arange(block * block_tokens, (block + 1) * block_tokens) for block in line["hash_ids"]]
        tokens, output = line["input_length"], max(1, line["output_length"])
        answer = -(index * 10**7 + 1 + np.arange(output))
        ids = np.concatenate([*blocks, np.zeros(0, np.int64)]).astype(np.int64)[:tokens]
        at = (line["timestamp"] - lines[0]["timestamp"]) / 1000
        prompts.append(Prompt(index, at, tokens, output, max(declared or 0, output), np.concatenate([ids, answer])))
    return prompts


def requests_of(lines: Sequence[Line], folder: Path, block_tokens: int, page_tokens: int) -> list[Request]:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Mooncake(path=str(path), block_tokens=block_tokens, answers="unique").load(page_tokens).requests


def assert_same(rows: list[Row], expected: list[Row]) -> None:
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert [row[2:] for row in rows] == [pytest.approx(row[2:], rel=0, abs=1e-6) for row in expected]


def assert_same_steps(steps: list[Formed], expected: list[Formed]) -> None:
    assert [step[:-1] for step in steps] == [step[:-1] for step in expected]
    assert [step[-1] for step in steps] == pytest.approx([step[-1] for step in expected], rel=0, abs=1e-6)


# --- the slow model ----------------------------------------------------------------------------------------------------------

BLOCK_TOKENS = 32


def draw(random: Random) -> list[Line]:
    """Prompts that share beginnings, many of them at the same time."""
    lines, now = list[Line](), 0.0
    families = random.randint(1, 4)
    for index in range(random.randint(2, 16)):
        now += random.choice([0, 0, 1, 5, 20, 100]) * random.random()
        family, shared = random.randrange(families), random.randint(0, 5)
        own = random.randint(1, 4) if random.random() < 0.7 else 0
        blocks = [1000 * family + at for at in range(shared)] + [10**5 + 10 * index + at for at in range(own)]
        blocks = blocks or [1000 * family]
        tokens = len(blocks) * BLOCK_TOKENS - random.choice([0, 0, 1, 7, 31])
        output = random.choice([1, 2, 5, 40, 90])
        lines.append({"timestamp": round(now), "input_length": tokens, "output_length": output, "hash_ids": blocks})
    return lines


@pytest.mark.parametrize("policy", SCHEDULING)
@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_the_schedule_is_that_of_the_slow_model(tmp_path: Path, seed: int, loop: str, policy: str):
    random = Random(seed)
    for version in (*VERSIONS, LATEST):
        lines = draw(random)
        page_tokens = random.choice([1, 1, 2, 16, 32])
        declared = random.choice([None, None, 60])
        longest = max(line["input_length"] + max(line["output_length"], declared or 0) for line in lines)
        capacity = longest + 3 * page_tokens + 4 + random.choice([0, 10, 60, 150, 400, 2000])
        chunks = random.random() < 0.8
        settings = {
            "mixed": chunks and random.random() < 0.4,
            "conservativeness": random.choice([1.0, 0.3, 0.05]),
            "ignore_eos": declared is None and random.random() < 0.2,
            "max_prefill": random.choice([16384, 16384, 100]),
        }
        chunk, most = random.choice([32, 64, 96, 8192]), random.choice([2, 5, 256])
        model = SlowSGLang(
            FORMULA,
            capacity=capacity,
            page=page_tokens,
            chunk=chunk if chunks else -1,
            max_running=most,
            policy=policy,
            overlap=loop == "overlap",
            is_old=version == "0.5.15",
            **settings,
        )
        found = model.run(prompts_of(lines, BLOCK_TOKENS, declared))
        rules = SGLangRules(
            loop=loop,
            mixed_chunk=settings["mixed"],
            chunked_prefill=chunks,
            schedule_conservativeness=settings["conservativeness"],
            ignore_eos=settings["ignore_eos"],
            max_prefill_tokens=settings["max_prefill"],
            declared_output_tokens=declared,
            cache_output=True,
            version=version,
        )
        requests = requests_of(lines, tmp_path, BLOCK_TOKENS, page_tokens)
        rows, steps = serve(requests, capacity, page_tokens, rules, scheduling=SCHEDULING[policy](), chunk=chunk, most=most)
        assert_same_steps(steps, [tuple(step[1:]) for step in model.steps])
        assert_same(rows, [(cached, retractions, first, last) for cached, first, last, retractions in found])


# --- the rules, one example each ---------------------------------------------------------------------------------------------


def line(blocks: Sequence[int], output: int, *, at_ms: int = 0) -> Line:
    tokens = len(blocks) * BLOCK_TOKENS
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": list(blocks)}


def play(
    folder: Path,
    lines: Sequence[Line],
    capacity: int = 10_000,
    *,
    page_tokens: int = 1,
    chunk: int = 8192,
    most: int = 256,
    scheduling: SchedulingPolicy | None = None,
    **rules: Any,
) -> tuple[list[Row], list[Formed]]:
    requests = requests_of(lines, folder, BLOCK_TOKENS, page_tokens)
    return serve(requests, capacity, page_tokens, SGLangRules(**rules), scheduling=scheduling, chunk=chunk, most=most)


def kinds(steps: Sequence[Formed]) -> list[str]:
    return [f"{step[0]} {step[2]}" for step in steps]


def test_answers_wait_for_all_chunks_of_a_prompt(tmp_path: Path):
    lines = [line([1], 4), line([2, 3], 2, at_ms=1)]
    _, steps = play(tmp_path, lines, chunk=32, loop="plain")
    assert kinds(steps) == ["prefill 32", "prefill 32", "prefill 32", "decode 2", "decode 1", "decode 1"]


def test_in_mixed_steps_answers_go_on_and_take_their_tokens_from_the_chunk(tmp_path: Path):
    lines = [line([1], 4), line([2, 3], 2, at_ms=1)]
    _, steps = play(tmp_path, lines, chunk=32, loop="plain", mixed_chunk=True)
    assert kinds(steps) == ["prefill 32", "mixed 32", "mixed 32", "mixed 3", "decode 1"]


def test_ahead_of_results_a_step_is_formed_before_a_request_arrives(tmp_path: Path):
    """The second request arrives during the first step. By then the next step has been formed, which decodes."""
    lines = [line([1], 4), line([2], 1, at_ms=1)]
    for loop, formed in (("plain", ["prefill 32", "prefill 32"]), ("overlap", ["prefill 32", "decode 1", "prefill 32"])):
        _, steps = play(tmp_path, lines, loop=loop)
        assert kinds(steps)[: len(formed)] == formed


def test_a_request_declared_longer_than_it_is_decodes_once_more_in_vain(tmp_path: Path):
    """Nobody knows that the token being computed is its last."""
    assert kinds(play(tmp_path, [line([1], 3)])[1]) == ["prefill 32", "decode 1", "decode 1"]
    known, steps = play(tmp_path, [line([1], 3), line([2], 9)], declared_output_tokens=9)
    assert [step[3] for step in steps] == [0, 2, 2, 2, 1, 1, 1, 1, 1]
    assert known[0][3] == known[0][2] + 2 * (5e-3 + 2e-5) + 1e-8 * (64 + 66)


def test_nobody_is_passed_over(tmp_path: Path):
    """The third request would fit beside the first, but the second does not."""
    lines = [line([1], 40), line([2, 3, 4], 4, at_ms=1), line([5], 1, at_ms=2)]
    rows, _ = play(tmp_path, lines, 120)
    assert rows[2][2] >= rows[1][2] > rows[0][3]


def test_the_shortest_answer_is_retracted_and_goes_to_the_end(tmp_path: Path):
    lines = [line([1], 60), line([2], 60, at_ms=60), line([3, 4], 5, at_ms=70)]
    rows, steps = play(tmp_path, lines, 170, loop="plain", schedule_conservativeness=0.05)
    assert [row[1] for row in rows][:2] == [0, 1]
    assert rows[1][3] > rows[2][3], "the one that waited goes first"
    assert max(step[-1] for step in steps) > 0.035, "more is kept for answers then"


@pytest.mark.parametrize(("page_tokens", "capacity"), [(1, 144), (16, 176)])
def test_a_retracted_request_finds_its_prompt_and_computes_its_answer_again(tmp_path: Path, page_tokens: int, capacity: int):
    lines = [line([1], 60), line([2], 60, at_ms=40)]
    rows, steps = play(tmp_path, lines, capacity, page_tokens=page_tokens, loop="plain", schedule_conservativeness=0.05)
    assert [row[1] for row in rows] == [0, 1]
    together = sum(kind == "decode" and requests == 2 for kind, requests, *_ in steps)
    assert [new for kind, _, new, *_ in steps if kind == "prefill"] == [32, 32, 1 + together]


def test_duplicates_come_last_by_longest_prefix(tmp_path: Path):
    lines = [line([1, 2], 1), line([1, 3], 1), line([7], 1)]
    rows, steps = play(tmp_path, lines, chunk=96, scheduling=LongestPrefix(), loop="plain")
    assert [step[1] for step in steps] == [2, 1]
    assert rows[2][2] < rows[1][2]
    assert rows[1][0] == 32, "it finds what the first has computed"


def test_depth_first_serves_the_heavier_branch_first(tmp_path: Path):
    """Once one of the two is served, both branches have the same weight, and the older one comes first."""
    warm = [line([1], 1), line([2], 1, at_ms=20)]
    later = [line([1, 5], 1, at_ms=100), line([2, 6], 1, at_ms=100), line([2, 7], 1, at_ms=100)]
    rows, _ = play(tmp_path, warm + later, chunk=32, scheduling=DfsWeight(), loop="plain")
    assert rows[3][2] < rows[2][2] < rows[4][2]


def tier_of(pages: int, eviction: EvictionPolicy, requests: list[Request]) -> Tier:
    """A GPU tier of single tokens."""
    gpu = Tier("gpu", 0, SlotPool(pages), eviction)
    known = {"requests": requests, "model": MODEL, "hardware": HardwareSpec(**HARDWARE), "empty_cache": empty_cache}
    eviction.bind(PolicyContext(tier=0, capacity_pages=pages, page_tokens=1, **known))
    return gpu


def test_a_prompt_is_rejected_that_leaves_no_room_for_its_answer(tmp_path: Path):
    requests = requests_of([line([1, 2], 2), line([3], 4)], tmp_path, BLOCK_TOKENS, 1)
    cache = SteppedNodes(tier_of(70, LRU(), requests), 1, caches_answers=True)
    substrate = SimulatedSubstrate(MODEL, FORMULA, 1, links="fifo")
    engine = Engine(
        substrate, cache, Prefetching(cache, NoPrefetch(), Offer), EngineSettings(), FCFS(), schedule=SGLangRules().scheduler()
    )
    outcome = Cluster([engine]).run(requests)
    assert outcome.status.tolist() == [1, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_any_eviction_policy_keeps_the_pool_right(tmp_path: Path, name: str):
    for seed in range(EXAMPLES // 8):
        random = Random(seed)
        lines = draw(random)
        requests = requests_of(lines, tmp_path, BLOCK_TOKENS, 1)
        for one in requests:
            one.turn, one.session = one.index, one.index % 7
            one.kind, one.priority = "chat", one.index % 3
            one.retention = (RetentionRange(0, one.prompt_tokens, 30 + 10 * one.priority, 5.0),)
        longest = max(line["input_length"] + line["output_length"] for line in lines)
        rules = SGLangRules(schedule_conservativeness=0.1)
        serve(requests, longest + 50, 1, rules, eviction=policy_of(name), most=8)


@pytest.mark.parametrize(("eviction", "nodes"), [(LRU(), 2), (LFU(), 1)])
def test_waiting_prompts_are_looked_up_only_if_eviction_goes_by_last_use(tmp_path: Path, eviction: EvictionPolicy, nodes: int):
    """A look-up cuts the node of the first prompt where the second one goes on otherwise."""
    first, second = requests_of([line([1, 2], 1), line([1, 3], 1)], tmp_path, BLOCK_TOKENS, 1)
    cache = SteppedNodes(tier_of(200, eviction, [first, second]), 1, caches_answers=False)
    lease = cache.nodes.serve(first, first.prompt_tokens, 0.0)
    assert lease is not None
    cache.nodes.finish_request(lease)
    queue = NodeQueue(FCFS(), cache)
    queue.push(Job(second, 0.0))
    queue.order()
    assert len(list(cache.tree.root.descendants())) == nodes


# --- what cannot be -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rules.loop=sideways"], "loop must be overlap or plain, not sideways"),
        (["rules.mixed_chunk=true", "rules.chunked_prefill=false"], "mixed_chunk has no effect with chunked_prefill=false"),
        (["rules.schedule_conservativeness=0"], "schedule_conservativeness"),
        (["rules.max_prefill_tokens=0"], "max_prefill_tokens"),
        (["rules.declared_output_tokens=0"], "declared_output_tokens"),
        (["rules.declared_output_tokens=9", "rules.ignore_eos=true"], "leave declared_output_tokens out"),
        (["page_tokens=16", "engine.max_batch_tokens=1000"], "must be a multiple of page_tokens=16"),
        (["scheduling=shortest_prompt"], "SGLang's schedule is by arrival, by prefix or depth first"),
        (["scheduling=priority"], "SGLang's schedule is by arrival, by prefix or depth first"),
        (["scheduling=longest_prefix", "scheduling.fcfs_above=5"], "scheduling.fcfs_above=5 is not SGLang's, which is 128"),
        (["rules.recompute_last_token=false"], "recompute_last_token=false is not supported by SGLang's schedule"),
        (["substrate=hardware"], "those of SGLang have no real memory"),
        (["tiers.cpu.capacity=1GiB", "rules.version=0.5.15", "rules.loop=plain"], "loop has no effect"),
        (["tiers.cpu.capacity=1GiB", "engine.overlap=none"], "engine.overlap=none"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(capsys: pytest.CaptureFixture[str], overrides: list[str], message: str):
    assert main(["simulate", "preset=sglang", "trace.limit=20", *overrides]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1


def test_a_replay_has_no_schedule(capsys: pytest.CaptureFixture[str]):
    assert main(["replay", "preset=sglang", "rules.mixed_chunk=true"]) == 2
    assert "mixed_chunk has no effect on kvsim replay" in capsys.readouterr().err


# --- recorded schedules ------------------------------------------------------------------------------------------------------

CASES = (
    "prefill-first", "prefill-first.overlap", "prefill-first.mixed", "prefill-first.mixed_overlap", "chunk-keys",
    "chunk-keys.overlap", "chunk-keys.p64", "retract", "retract.overlap", "retract.p16", "no-skipping", "no-skipping.lpm",
    "lpm-duplicates", "lpm-duplicates.overlap", "answer-first", "finishing-first", "full-cleared", "refused-lookup",
    "readmitted-answer", "idle-reset", "retract-room",
)  # fmt: skip
RUNS = (
    "stress2_r2.2_c20000", "stress2_r1.2_c12000_p16_chunk1024", "stress2_r2.2_c20000_lpm_p64_overlap",
    "mooncake_n1000_r0.3_c1500000", "mooncake_n1000_r0.3_c300000_overlap", "mooncake_n1000_r0.3_c300000_lpm_p16",
)  # fmt: skip


class Recorded:
    """A recorded schedule, and how it was played."""

    def __init__(self, shared: Path, folder: str, name: str) -> None:
        golden = shared / "golden" / "schedule_sglang"
        table = golden / folder / "cases.csv"
        if not table.is_file():
            pytest.skip("compares with a recorded schedule that is not part of the repository: ../shared/golden/schedule_sglang")
        self.case = next(row for row in csv.DictReader(table.read_text().splitlines()) if row["name"] == name)
        trace, self.is_small = self.case["trace"], folder == "cases"
        if self.is_small:
            self.trace = golden / "cases" / f"{trace}.jsonl"
            requests, _, steps = (golden / "cases" / f"{name}.sglang.txt").read_text().partition("# start")
        else:
            mooncake = shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
            self.trace = mooncake if trace == "mooncake" else golden.parent / "schedule" / f"{trace}.jsonl"
            requests, steps = (self.unzipped(golden / f"{name}.{what}.csv.gz") for what in ("requests", "steps"))
        self.requests, self.steps = self.rows(requests), self.rows(steps)
        self.page_tokens, self.capacity = int(self.case["page_size"]), int(self.case["capacity_tokens"])

    @staticmethod
    def unzipped(path: Path) -> str:
        return gzip.decompress(path.read_bytes()).decode() if path.is_file() else ""

    @staticmethod
    def rows(text: str) -> list[list[str]]:
        return [line.split(",") for line in text.splitlines() if line[:1].isdigit()]

    @property
    def expected(self) -> list[Row]:
        return [(int(row[2]), int(row[5]), float(row[3]), float(row[4])) for row in self.requests]

    def overrides(self) -> list[str]:
        case = self.case
        given = [
            "preset=sglang", "hardware=linear", f"page_tokens={self.page_tokens}", "trace=mooncake", f"trace.path={self.trace}",
            "trace.answers=unique", f"trace.limit={case['limit'] or 'null'}", f"trace.rate={case['rate']}",
            f"tiers.gpu.capacity={self.capacity}tokens", f"engine.max_running_requests={case['max_running_requests']}",
            f"engine.max_batch_tokens={case['chunked_prefill_size']}", f"rules.loop={self.loop}",
            f"rules.mixed_chunk={self.is_mixed}", f"rules.schedule_conservativeness={case['schedule_conservativeness']}",
        ]  # fmt: skip
        return [*given, "scheduling=longest_prefix"] if case["schedule_policy"] == "lpm" else given

    @property
    def loop(self) -> str:
        return "overlap" if self.case["loop"] == "overlap" else "plain"

    @property
    def is_mixed(self) -> bool:
        return self.case["mixed_chunk"] == "on"


def check_recorded(recorded: Recorded, folder: Path) -> None:
    """The command's rows are those recorded and, without the command, so are the steps."""
    assert main(["simulate", *recorded.overrides(), f"output={folder}"]) == 0
    with gzip.open(folder / "requests.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    names = ("hit_tokens_gpu", "retractions", "first_token_s", "last_token_s")
    found = [tuple(float(row[name]) for name in names) for row in rows]
    assert_same([(int(tokens), int(retractions), first, last) for tokens, retractions, first, last in found], recorded.expected)
    if not recorded.steps:
        return
    case, page_tokens = recorded.case, recorded.page_tokens
    trace = Mooncake(path=str(recorded.trace), answers="unique", rate=float(case["rate"]))
    rules = SGLangRules(
        loop=recorded.loop,
        mixed_chunk=recorded.is_mixed,
        schedule_conservativeness=float(case["schedule_conservativeness"]),
        cache_output=True,
    )
    _, steps = serve(
        trace.load(page_tokens).requests,
        recorded.capacity,
        page_tokens,
        rules,
        scheduling=SCHEDULING[case["schedule_policy"]](),
        chunk=int(case["chunked_prefill_size"]),
    )
    expected = [(row[1], *[int(number) for number in row[2:9]], float(row[9])) for row in recorded.steps]
    assert_same_steps(steps, expected)


@pytest.mark.parametrize("name", CASES)
def test_recorded_cases_are_played_exactly(shared: Path, tmp_path: Path, name: str):
    check_recorded(Recorded(shared, "cases", name), tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_recorded_runs_are_played_exactly(shared: Path, tmp_path: Path, name: str):
    check_recorded(Recorded(shared, ".", name), tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_slow_model_plays_recorded_cases(shared: Path, name: str):
    recorded = Recorded(shared, "cases", name)
    case = recorded.case
    model = SlowSGLang(
        FORMULA,
        capacity=recorded.capacity,
        page=recorded.page_tokens,
        chunk=int(case["chunked_prefill_size"]),
        policy=case["schedule_policy"],
        overlap=recorded.loop == "overlap",
        mixed=recorded.is_mixed,
        conservativeness=float(case["schedule_conservativeness"]),
    )
    lines = [json.loads(text) for text in recorded.trace.read_text().splitlines()]
    found = model.run(prompts_of(lines, 512))
    assert_same([(cached, retractions, first, last) for cached, first, last, retractions in found], recorded.expected)
    assert [step[0] for step in model.steps] == pytest.approx([float(row[0]) for row in recorded.steps], rel=0, abs=1e-6)
