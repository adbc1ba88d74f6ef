"""SGLang's schedule in leaps: the steps, hits and times are those of its steps one by one."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from simpy import Event

import kvsim
from kvsim.engine.substrate import Work
from kvsim.engine.watch import EngineWatch
from kvsim.engines.sglang import running
from kvsim.engines.sglang.rules import SGLangRules
from kvsim.engines.sglang.running import steps_with_room
from kvsim.policies.routing.round_robin import RoundRobin
from tests.engines.test_sglang_schedule import BLOCK_TOKENS, SCHEDULING, Line, draw, line, requests_of, serve
from tests.workloads import EXAMPLES


class Works(EngineWatch):
    """The steps of each piece of work, in order."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def computes(self, work: Work, done: Event) -> None:
        done.callbacks.append(lambda event: self.steps.append(event.value))


class Reporting(RoundRobin):
    """Lets engines report after each step, so that they make steps one by one."""

    @property
    def needs_reports(self) -> bool:
        return True


def works(folder: Path, lines: Sequence[Line], capacity: int = 10_000, *, page_tokens: int = 1, **rules: Any) -> list[int]:
    watch = Works()
    serve(requests_of(lines, folder, BLOCK_TOKENS, page_tokens), capacity, page_tokens, SGLangRules(**rules), watches=[watch])
    return watch.steps


@pytest.mark.parametrize(("loop", "steps"), [("plain", [1, 8, 4]), ("overlap", [1, 7, 1, 3, 1])])
def test_a_leap_lasts_until_an_answer_ends(tmp_path: Path, loop: str, steps: list[int]):
    """Ahead of results, the last step before that is formed by itself, and the next pass takes place while it runs."""
    assert works(tmp_path, [line([1], 9), line([2], 13)], loop=loop) == steps


@pytest.mark.parametrize(("loop", "steps"), [("plain", [1, 4, 1, 36]), ("overlap", [1, 4, 1, 1, 34, 1])])
def test_a_request_that_arrives_ends_a_leap(tmp_path: Path, loop: str, steps: list[int]):
    """It comes in the fourth step of an answer. Ahead of results, the fifth one is formed by then."""
    assert works(tmp_path, [line([1], 41), line([2], 1, at_ms=23)], loop=loop) == steps


def test_nobody_who_waits_in_vain_ends_a_leap(tmp_path: Path):
    """The second request waits, without room, until the first has ended."""
    assert works(tmp_path, [line([1], 41), line([2, 3], 1)], 107, loop="plain") == [1, 40, 1]


def test_a_leap_ends_before_pages_run_out(tmp_path: Path):
    """When the second answer begins, 16 tokens are free. Steps need 1 each, and the first prompt is evicted after them."""
    lines = [line([1], 1), line([2], 41, at_ms=40)]
    assert works(tmp_path, lines, 32 + 32 + 16, loop="plain") == [1, 1, 16, 24]


@pytest.mark.parametrize("policy", SCHEDULING)
@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("seed", range(EXAMPLES // 3))
def test_leaps_change_no_step(tmp_path: Path, seed: int, loop: str, policy: str):
    random = Random(f"{seed} {loop} {policy}")
    lines = [one for _ in range(4) for one in draw(random)]
    lines.sort(key=lambda one: one["timestamp"])
    page_tokens = random.choice([1, 2, 16])
    longest = max(one["input_length"] + one["output_length"] for one in lines)
    rules = SGLangRules(
        loop=loop,
        mixed_chunk=random.random() < 0.3,
        schedule_conservativeness=random.choice([1.0, 0.3, 0.05]),
        declared_output_tokens=random.choice([None, 60]),
    )
    most = {"chunk": random.choice([32, 96, 8192]), "most": random.choice([2, 5, 256])}
    capacity = longest + 2 * page_tokens + 64 + random.choice([10, 150, 400, 2000])
    played, works = [], [Works(), Works()]
    for leaps, watch in zip((True, False), works, strict=True):
        requests = requests_of(lines, tmp_path, BLOCK_TOKENS, page_tokens)
        scheduling = SCHEDULING[policy]()
        played.append(serve(requests, capacity, page_tokens, rules, scheduling=scheduling, leaps=leaps, watches=[watch], **most))
    (rows, steps), (expected_rows, expected_steps) = played
    assert steps == expected_steps
    assert np.array(rows) == pytest.approx(np.array(expected_rows), rel=0, abs=1e-9)
    assert sum(works[0].steps) == sum(works[1].steps) == len(works[1].steps) > len(works[0].steps)


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("hardware", [["hardware=h100"], ["hardware=h200_measured", "hardware.noise=null"]])
def test_leaps_change_nothing_on_engines_that_fail_and_are_reset(tmp_path: Path, hardware: list[str], loop: str):
    """Of the second machine, a leap takes longer than its steps: here, this is part of each step."""
    random = Random(loop)
    lines = sorted([one for _ in range(20) for one in draw(random)], key=lambda one: one["timestamp"])
    requests_of(lines, tmp_path, BLOCK_TOKENS, 16)
    path = tmp_path / "trace.jsonl"
    trace = kvsim.load_trace("mooncake", path=path, block_tokens=BLOCK_TOKENS, answers="unique", page_tokens=16)
    settings = [
        "preset=sglang", *hardware, f"rules.loop={loop}", "tiers.gpu.capacity=1600tokens", "cluster.engines=2",
        "cluster.failures=[{engine: 0, at_s: 0.2137, back_after_s: 0.1}, {engine: 1, at_s: 0.5, back_after_s: 0.2}]",
        "engine.reset_at_s=[0.3, 0.7]", "rules.schedule_conservativeness=0.1",
    ]  # fmt: skip
    leapt, stepped = (kvsim.simulate(trace, *settings, routing=routing).outcome for routing in (RoundRobin(), Reporting()))
    for name, column in leapt.columns.items():
        assert column == pytest.approx(stepped.columns[name], rel=0, abs=1e-9, nan_ok=True)
    assert leapt.retractions == stepped.retractions > 0
    for use, expected in zip(leapt.engines, stepped.engines, strict=True):
        assert use.busy_s == pytest.approx(expected.busy_s, abs=0.02) and use.failures == 1, "but for the step that is cut off"
        assert (use.peak_pages, use.evicted_pages) == (expected.peak_pages, expected.evicted_pages)


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_steps_with_room_are_counted_exactly(page_tokens: int):
    random = Random(page_tokens)
    for _ in range(200):
        held = [random.randint(1, 90) for _ in range(random.randint(1, 6))]
        free = random.randint(0, 30)
        steps, left = 0, free
        while left >= len(held):
            left -= sum((tokens + steps) % page_tokens == 0 for tokens in held)
            steps += 1
        assert steps_with_room(held, free, page_tokens) == steps


@pytest.mark.skipif(not running.__file__.endswith(".py"), reason="a method of a compiled class cannot be replaced")
@pytest.mark.parametrize("placement", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("loop", ["overlap", "plain"])
@pytest.mark.parametrize("stored_pages", [0, 5000])
def test_leaps_beside_copies_are_steps(placement: str, loop: str, stored_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations that come back while others decode, on a GPU for a few of them and a host for most, or with storage."""
    random = Random(7)
    prompts, answers, arrivals_s, now = [], [], [], 0.0
    chats: list[list[int]] = [[] for _ in range(10)]
    for _ in range(120):
        chat = random.choice(chats)
        chat += [random.randrange(10**6) for _ in range(random.randrange(20, 160))]
        prompts.append(list(chat))
        answers.append([random.randrange(10**6) for _ in range(random.randrange(1, 120))])
        chat += answers[-1]
        if len(chat) > 1200:
            chat.clear()
        now += random.choice([0.0, 0.1, 1.0])
        arrivals_s.append(now)
    trace = kvsim.trace_from_tokens(prompts, answers=answers, arrivals_s=arrivals_s, page_tokens=16)
    settings = (
        "preset=sglang_hicache", f"placement={placement}", f"rules.loop={loop}", "tiers.gpu.capacity=250pages",
        "hardware.host_to_device_bytes_per_s=2e8", "hardware.device_to_host_bytes_per_s=2e8",
        "hardware.both_directions_bytes_per_s=4e8", "engine.max_batch_tokens=512",
        f"tiers.cpu.capacity={350 if stored_pages else 700}pages", f"tiers.disk.capacity={stored_pages}pages",
        *["hardware.disk_read_bytes_per_s=1e8", "hardware.disk_write_bytes_per_s=4e8"] * (stored_pages > 0),
    )  # fmt: skip
    in_leaps = kvsim.simulate(trace, *settings, "timeline=true").outcome
    monkeypatch.setattr(running.RunningBatch, "repetitions", lambda batch: 0)
    in_steps = kvsim.simulate(trace, *settings, "timeline=true").outcome
    assert in_leaps.hit_pages.tolist() == in_steps.hit_pages.tolist()
    for times in ("ttft_s", "e2e_s"):
        assert getattr(in_leaps, times).tolist() == pytest.approx(getattr(in_steps, times).tolist(), rel=0, abs=1e-9)
    assert in_leaps.hit_pages[:, 1:].sum() > 500 and in_leaps.hit_pages[:, 2:].sum() > (20 if stored_pages else -1)
    assert len(in_leaps.timeline.batches) < (0.9 if stored_pages else 0.8) * len(in_steps.timeline.batches)
