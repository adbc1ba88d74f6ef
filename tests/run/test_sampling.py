"""A replay of samples: what it estimates, its interval, and what it refuses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.plans.arguments import arguments_of
from kvsim.plans.from_python import plan_for
from kvsim.plans.plan import Plan
from kvsim.results.records import read_requests, read_result
from kvsim.results.statistics import student_t
from kvsim.run.execute import execute
from kvsim.run.sample_estimates import LEFT
from kvsim.trace.base import Trace
from kvsim.trace.subtrees import Subtrees
from tests.report.test_html import Page
from tests.workloads import EXAMPLES, make_requests

PLAIN = ("replay.hold_output=false", "rules.recompute_last_token=false")
FIELDS = ("hit_rate", "page_hit_rate", "hit_tokens", "hit_pages", "hit_requests", "requests", "rejected", "prompt_tokens",
          "warmup_requests", "tiers", "placement")  # fmt: skip


def trace_of(words: Sequence[str]) -> Trace:
    return Trace(name="words", requests=make_requests(words), page_tokens=1, block_tokens=None)


def families(number: int) -> list[str]:
    """Three turns of each of many conversations below a system prompt, mixed so that they compete for room."""
    turns = [(at * (1 + turn % 3) % number, turn) for turn in range(3) for at in range(number)]
    return ["sy" + chr(500 + family) + "abcdef"[: 2 * turn + family % 3] for family, turn in turns]


@pytest.fixture(scope="module")
def conversations() -> Trace:
    return trace_of(families(300))


@cache
def plan_of(*given: str) -> Plan:
    return plan_for("replay", trace_of(["a"]), arguments_of(given, {}))


def played(trace: Trace, *given: str) -> dict[str, Any]:
    """The record of a replay, whose configuration is composed once."""
    return execute("replay", plan_of(*given).with_own_policies(), trace).record


@settings(max_examples=EXAMPLES // 2)
@given(
    words=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=25),
    given=st.sampled_from([
        ("tiers.gpu.capacity=6pages", "eviction=s3_fifo"),
        ("tiers.gpu.capacity=9pages", "eviction=arc", "warmup=0.3"),
        ("tiers.gpu.capacity=6pages", "tiers.cpu.capacity=9pages", "placement=write_back"),
        ("tiers.gpu.capacity=6pages", "tiers.cpu.capacity=9pages"),
    ]),
)  # fmt: skip
def test_a_sample_of_everything_is_the_replay(words: list[str], given: tuple[str, ...]) -> None:
    trace = trace_of(words)
    whole, sampled = played(trace, *given), played(trace, *given, "sample=100%")
    assert {name: sampled[name] for name in FIELDS} == {name: whole[name] for name in FIELDS}
    hit_rate = pytest.approx(whole["hit_rate"])
    assert sampled["sample"]["hit_rate"] == {"low": hit_rate, "high": hit_rate}
    assert sampled["warnings"] == whole["warnings"]


def rate(trace: Trace, pages: int, policy: str) -> float:
    """The hit rate of a replay with one tier."""
    plan = plan_of(*PLAIN, f"eviction={policy}")
    tiers = [replace(plan.tiers[0], capacity_pages=pages)]
    found: float = execute("replay", replace(plan, tiers=tiers).with_own_policies(), trace).record["hit_rate"]
    return found


def slow_estimate(trace: Trace, pages: int, policy: str, share: float, draws: int, seed: int) -> tuple[float, float]:
    """The estimate and half of its interval, from replays of LRU and of the policy on each sample as a trace of its own."""
    subtrees, unlimited = Subtrees(trace.requests), 10_000
    whole, most = rate(trace, pages, "lru"), rate(trace, unlimited, "lru")

    def told(numbers: set[int]) -> tuple[float, float]:
        words = [word for word, number in zip(WORDS, subtrees.of_request.tolist(), strict=True) if number in numbers]
        all_pages = len({word[:end] for word in words for end in range(3, len(word) + 1)})
        every_page = len({word[:end] for word in WORDS for end in range(3, len(word) + 1)})
        room = 2 + round(all_pages / every_page * (pages - 2))
        part = trace_of(words)
        lru = rate(part, room, "lru")
        return rate(part, room, policy) + whole - lru, lru + most - rate(part, unlimited, "lru") - whole

    parts = [set(drawn.tolist()) for drawn in subtrees.draws(share, draws, seed=seed)]
    rates = [told(part)[0] for part in parts]
    estimate, error = told(set().union(*parts))
    mean = sum(rates) / draws
    spread = student_t(draws - 1) * math.sqrt(sum((one - mean) ** 2 for one in rates) / (draws - 1) / draws)
    return estimate, math.hypot(spread, LEFT * (mean - estimate), error)


WORDS = families(300)


@pytest.mark.parametrize("policy", ["fifo", "lfu"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_estimate_and_its_interval_are_those_of_replays_of_each_sample(conversations: Trace, policy: str, seed: int) -> None:
    pages, share, draws = 400, 0.1, 4
    given = (*PLAIN, f"tiers.gpu.capacity={pages}pages", f"eviction={policy}", f"sample={share}", f"sample_draws={draws}")
    result = kvsim.replay(conversations, *given, seed=seed).record
    estimate, half = slow_estimate(conversations, pages, policy, share, draws, seed)
    most = rate(conversations, 10_000, "lru")
    assert result["hit_rate"] == pytest.approx(estimate, abs=1e-4), "hits are whole numbers"
    ends = result["sample"]["hit_rate"]
    assert ends["low"] == pytest.approx(estimate - half) and ends["high"] == pytest.approx(min(estimate + half, most))


@pytest.mark.parametrize("seed", range(3))
def test_lru_is_known_exactly(conversations: Trace, seed: int) -> None:
    """All that a sample tells is how far a replay is from LRU, whose hits are known."""
    given = (*PLAIN, "tiers.gpu.capacity=400pages")
    whole = kvsim.replay(conversations, *given).record
    sampled = kvsim.replay(conversations, *given, "sample=5%", seed=seed).record
    assert [sampled[name] for name in FIELDS[:4]] == [whole[name] for name in FIELDS[:4]]


def test_the_interval_covers_what_a_replay_of_all_requests_hits(conversations: Trace) -> None:
    """Of the intervals under 8 seeds, one may miss."""
    given = ("tiers.gpu.capacity=600pages", "eviction=s3_fifo")
    truth = played(conversations, *given)["hit_rate"]
    plans = [replace(plan_of(*given, "sample=6%"), seed=seed) for seed in range(8)]
    ends = [execute("replay", plan.with_own_policies(), conversations).record["sample"]["hit_rate"] for plan in plans]
    assert sum(end["low"] <= truth <= end["high"] for end in ends) >= 7


def test_each_tier_has_an_estimate_and_they_add_up(conversations: Trace) -> None:
    given = ("tiers.gpu.capacity=200pages", "tiers.cpu.capacity=300pages", "placement=write_back")
    whole, sampled = kvsim.replay(conversations, *given).record, kvsim.replay(conversations, *given, "sample=10%").record
    assert sampled["hit_rate"] * sampled["prompt_tokens"] == pytest.approx(sum(sampled["hit_tokens"].values()))
    for name in ("gpu", "cpu"):
        low, high = sampled["sample"]["tiers"][name].values()
        assert low <= sampled["hit_tokens"][name] / sampled["prompt_tokens"] + 1e-4 and high <= 1
        assert sampled["tiers"][name]["capacity_pages"] == whole["tiers"][name]["capacity_pages"]
        assert sampled["tiers"][name]["inserted_pages"] == pytest.approx(whole["tiers"][name]["inserted_pages"], rel=0.2)


def test_requests_that_are_too_large_are_rejected_and_the_warm_up_is_left_out() -> None:
    trace = trace_of([*families(200), "z" * 500, *families(200)])
    given = ("tiers.gpu.capacity=400pages", "warmup=0.4")
    whole, sampled = kvsim.replay(trace, *given).record, kvsim.replay(trace, *given, "sample=20%").record
    counts = ("requests", "warmup_requests", "rejected", "prompt_tokens", "prompt_pages")
    assert sampled["rejected"] == 1
    assert [sampled[name] for name in counts] == [whole[name] for name in counts]


def test_a_sampled_result_is_marked_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["trace.sessions=400", "tiers.gpu.capacity=40000pages"]
    assert main(["replay", *tiers, "sample=10%", f"output={tmp_path}/one"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "hits are estimated from 5 samples of 10%" in told and "with 95% confidence the hit rate is between" in told
    assert "hits are estimated from 5 samples of 10%" in Page((tmp_path / "one" / "report.html").read_text()).text
    assert main(["replay", *tiers, f"output={tmp_path}/two"]) == 0
    capsys.readouterr()
    assert main(["report", f"{tmp_path}/one", f"{tmp_path}/two", f"output={tmp_path}/both"]) == 0
    both = Page((tmp_path / "both" / "report.html").read_text()).text
    assert "hits are estimated from 5 samples of 10%" in both and "at least" in both and "at most" in both
    record = read_result(tmp_path / "one")
    assert "bounds" not in record and record["sample"]["draws"] == 5
    rows = read_requests(tmp_path / "one", record)
    assert len(rows["request"]) == record["sample"]["requests"] < record["requests"]


def refused(trace: Trace, *given: Any) -> str:
    with pytest.raises(UsageError) as caught:
        kvsim.replay(trace, *given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("sample=0",), "sample must be above 0"),
        (
            ("sample=x%",),
            "sample must be a number above 0 and at most 1, not 'x%'; it is a share of the trace, such as 1%",
        ),
        (("sample=30%",), "sample must be at most 25%, or 100%, not 30%: more of it is as much work as the whole trace"),
        (("sample=1%", "sample_draws=1"), "sample_draws must be at least 2, not 1; an interval needs several samples"),
        (("sample_draws=4",), "sample_draws has no effect without sample: set sample=1%, or leave it out"),
        (("sample=5%", "events=true"), "sample: events would show a sample, not the trace: leave out one of them"),
        (("sample=5%", "print_tree=true"), "sample: print_tree would show a sample, not the trace: leave out one of them"),
        (
            ("sample=5%", "model=qwen3_next_80b"),
            "sample: recurrent states cannot be scaled down with the pages",
        ),
        (("sample=1%", "tiers.gpu.capacity=60pages"), "sample=1% of 60 pages of tiers.gpu.capacity is "),
        (("sample=0.0001%", "tiers.gpu.capacity=400pages"), "sample=0.0001% has no request in a sample: sample more"),
        (("sample=5%", "tiers.gpu.capacity=7pages"), "sample=5% of 7 pages of tiers.gpu.capacity is "),
    ],
)
def test_what_cannot_be_sampled_is_refused(conversations: Trace, given: tuple[str, ...], expected: str) -> None:
    assert expected in refused(conversations, *given)


def test_common_prefixes_larger_than_the_tier_are_refused() -> None:
    """Prompts that fit share prefixes that do not fit together: 10 pages and 5 first digits below each of three letters."""
    trace = trace_of([letter * 10 + str(at) for at in range(60) for letter in "pqr"])
    assert refused(trace, "sample=25%", "tiers.gpu.capacity=20pages").startswith(
        "sample: the prefixes that many requests share have 45 pages, and tiers.gpu.capacity is 20: replay the whole trace"
    )


@pytest.mark.parametrize("command", ["simulate", "curve", "saturate"])
def test_other_commands_have_no_samples(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, "trace.sessions=5", "sample=1%"]) == 2
    told = capfd.readouterr().err
    assert f"sample has no effect on kvsim {command}" in told
    assert ("queues depend on all requests" in told) == (command != "curve")
