"""The FreeInference agentic trace; files are made by the rules by which the published ones are."""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from random import Random
from struct import pack
from typing import Any

import pytest

from kvsim.__main__ import main
from kvsim.api import load_trace
from kvsim.core.request import Request
from kvsim.errors import TraceError
from kvsim.trace import stored
from kvsim.trace.freeinference import FreeInference
from kvsim.trace.mooncake import Mooncake

BEGIN_MS = 1_778_977_459_236
SYSTEM = range(40)


class Week:
    """Writes sessions as the release does: chained hashes of full blocks of 16 tokens become ids that count up in a week."""

    def __init__(self, week: str = "2026-05-17_2026-05-23") -> None:
        self.week = week
        self.ids: dict[bytes, int] = {}

    def block_ids(self, tokens: Sequence[int]) -> list[int]:
        found, previous = [], b""
        for end in range(16, len(tokens) + 1, 16):
            previous = blake2b(previous + pack("<16I", *tokens[end - 16 : end]), digest_size=8, key=b"salt").digest()
            found.append(self.ids.setdefault(previous, len(self.ids) + 1))
        return found

    def call(self, start_ms: int, end_ms: int, tokens: Sequence[int], *tools: Any, **more: Any) -> dict[str, Any]:
        """A request at milliseconds after the begin; each tool is the session that it started, or None."""
        system = min(40, len(tokens))
        return {
            "start_ms": BEGIN_MS + start_ms, "end_ms": BEGIN_MS + end_ms, "ttft_ms": 1, "model": "glm-5.1", "provider": "B",
            "provider_tokens": {"prompt": len(tokens) + 9, "completion": 7, "cached": None},
            "role_tokens": {
                "system": system, "user": len(tokens) - system, "assistant": 0, "tool": 0, "tool_definitions": 0,
            },
            "block_ids": self.block_ids(tokens),
            "tool_calls": [
                {"call_index": at, "name": "terminal", "category": "Subagent" if started else "*Interpreter",
                 "latency_ms": None, "subagent": started}
                for at, started in enumerate(tools)
            ],
        } | more  # fmt: skip

    def session(self, *calls: dict[str, Any], user: str = "u") -> dict[str, Any]:
        requests = [
            {"step": step, "link_reason": None if step == 0 else "tool_call_id", **call} for step, call in enumerate(calls)
        ]
        for call, following in pairwise(requests):
            for tool in call["tool_calls"]:
                tool["latency_ms"] = following["start_ms"] - call["end_ms"]
        times = {"start_ms": min(call["start_ms"] for call in calls), "end_ms": max(call["end_ms"] for call in calls)}
        return {"session_id": f"{len(self.ids):032x}", "user_id": user, "harness": "claude-code", **times, "requests": requests}

    def line(self, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"week": self.week, "day": "2026-05-17", **self.session(*calls, **more)}


def load(write: Any, *lines: object, page_tokens: int = 16, **settings: Any) -> Sequence[Request]:
    return FreeInference(path=write(*lines), **settings).load(page_tokens).requests


def graph(write: Any, *lines: object) -> list[tuple[float, tuple[int, ...], float]]:
    """(arrival, requests waited for, delay) of each request in a closed loop."""
    requests = load(write, *lines, arrivals="closed_loop")
    return [(request.arrival_s, request.predecessors, request.delay_s) for request in requests]


def test_a_request_has_its_recorded_time_prompt_and_answer(write: Any) -> None:
    week = Week()
    lines = [
        week.line(week.call(500, 900, range(50)), week.call(1250, 1300, range(70))),
        week.line(week.call(100, 200, range(48))),
    ]
    first, second, third = load(write, *lines)
    assert [request.arrival_s for request in (first, second, third)] == [0, 0.4, 1.15]
    assert [request.prompt_tokens for request in (first, second, third)] == [48, 50, 70]
    assert [request.runs for request in (first, second, third)] == [((0, 3),), ((0, 3),), ((0, 4),)]
    assert [(request.session, request.turn) for request in (first, second, third)] == [(1, 0), (0, 0), (0, 1)]
    assert {(request.output_tokens, request.kind, request.tenant, request.after) for request in (first, second, third)} == {
        (7, "agent", "u", -1)
    }


def test_in_a_closed_loop_a_request_waits_for_the_one_before_it_and_for_the_tools(write: Any) -> None:
    """The pause after a request is what the release calls the latency of its tool calls."""
    week = Week()
    line = week.line(
        week.call(0, 1000, range(50), None, None), week.call(3500, 4000, range(90)), week.call(9000, 9500, range(95))
    )
    assert graph(write, line) == [(0, (), 0), (3.5, (0,), 2.5), (9, (1,), 5)]
    assert [tool["latency_ms"] for tool in line["requests"][0]["tool_calls"]] == [2500, 2500]


def test_in_a_closed_loop_subagents_wait_for_their_call_and_are_waited_for(write: Any) -> None:
    """Two begin 0.5 s and 0.7 s after the answer at 1 s, and end at 4 s and 6 s; their parent goes on at 6.25 s."""
    week = Week()
    one = week.session(week.call(1500, 2000, range(100, 140)), week.call(3000, 4000, range(100, 180)))
    other = week.session(week.call(1700, 6000, range(200, 240)))
    requests = load(
        write,
        week.line(week.call(0, 1000, range(50), one, other), week.call(6250, 7000, range(90))),
        arrivals="closed_loop",
    )
    assert [(request.kind, request.predecessors, request.delay_s) for request in requests] == [
        ("agent", (), 0), ("subagent", (0,), 0.5), ("subagent", (0,), 0.7), ("subagent", (1,), 1), ("agent", (2, 3, 0), 0.25),
    ]  # fmt: skip
    assert [(request.session, request.turn) for request in requests] == [(0, turn) for turn in range(5)]


def test_in_a_closed_loop_a_subagent_in_the_background_is_waited_for_when_it_has_ended(write: Any) -> None:
    week = Week()
    background = week.session(week.call(1500, 5000, range(100, 140)))
    calls = week.call(0, 1000, range(50), background), week.call(2000, 3000, range(60)), week.call(5500, 6000, range(70))
    assert graph(write, week.line(*calls)) == [(0, (), 0), (1.5, (0,), 0.5), (2, (0,), 1), (5.5, (1, 2), 0.5)]


def test_in_a_closed_loop_a_subagent_of_a_subagent_is_waited_for_by_that_one(write: Any) -> None:
    week = Week()
    inner = week.session(week.call(2000, 2500, range(300, 340)))
    outer = week.session(week.call(1100, 1500, range(100, 140), inner), week.call(2600, 3000, range(100, 160)))
    found = graph(write, week.line(week.call(0, 1000, range(50), outer), week.call(3500, 4000, range(60))))
    assert found == [(0, (), 0), (1.1, (0,), 0.1), (2, (1,), 0.5), (2.6, (2, 1), 0.1), (3.5, (3, 0), 0.5)]


def test_in_a_closed_loop_nobody_waits_for_what_begins_later_or_less_than_no_time(write: Any) -> None:
    """A request before its predecessor's end follows at once; a sub-agent may begin 30 s before its tool call's request ends."""
    week = Week()
    early = week.session(week.call(0, 500, range(100, 140)))
    calls = week.call(1000, 3000, range(50), early), week.call(2500, 4000, range(60))
    assert graph(write, week.line(*calls)) == [(0, (), 0), (1, (), 0), (2.5, (1, 0), 0)]


def test_models_and_weeks_share_no_pages(write: Any) -> None:
    """The same ids in another week are other blocks, and the same blocks of another model have another KV."""
    first, second = Week(), Week("2026-05-24_2026-05-30")
    calls = [first.call(0, 1, range(32)), first.call(2, 3, range(32), model="other"), first.call(4, 5, range(32))]
    requests = load(write, first.line(*calls), second.line(second.call(6, 7, range(32))))
    assert [request.runs for request in requests] == [((0, 2),), ((2, 2),), ((0, 2),), ((4, 2),)]


def test_an_answer_without_a_count_has_no_tokens(write: Any) -> None:
    week = Week()
    (request,) = load(write, week.line(week.call(0, 1, range(20), provider_tokens={"prompt": None, "completion": None})))
    assert request.output_tokens == 0


def lines_at_random(number: int, random: Random) -> tuple[list[dict[str, Any]], list[tuple[int, ...]]]:
    """Sessions with histories that grow, shrink and branch, and the prompts of their requests, each with as many answer tokens as
    its position among them."""
    week, prompts = Week(), list[tuple[int, ...]]()

    def session(depth: int, at_ms: int) -> dict[str, Any]:
        history, calls = [*SYSTEM], []
        for _ in range(random.randint(1, 4)):
            history = history[: random.choice((40, len(history)))] + [random.randint(0, 2) for _ in range(random.randint(1, 40))]
            prompts.append(tuple(history))
            at_ms, prompt = at_ms + random.randint(0, 900), tuple(history)
            counts, ids = {"completion": len(prompts) - 1}, week.block_ids(prompt)
            started = [session(depth + 1, at_ms) for _ in range(random.randint(0, 2 - depth))] if depth < 2 else []
            calls.append(week.call(at_ms, at_ms + random.randint(0, 900), prompt, *started, None, provider_tokens=counts))
            assert calls[-1]["block_ids"] == ids
        return week.session(*calls)

    return [{"week": week.week, "day": "d", **session(0, 100 * at)} for at in range(number)], prompts


@pytest.mark.parametrize("page_tokens", [8, 16, 32])
def test_pages_are_equal_exactly_where_prompts_are(page_tokens: int, write: Any) -> None:
    lines, prompts = lines_at_random(12, Random(3))
    requests = load(write, *lines, page_tokens=page_tokens)
    assert len(requests) == len(prompts) > 40
    of_page: dict[int, tuple[int, ...]] = {}
    for request in requests:
        tokens = prompts[request.output_tokens]
        pages = [start + at for start, length in request.runs for at in range(length)]
        assert len(pages) == len(tokens) // 16 * 16 // page_tokens
        for at, page in enumerate(pages):
            prefix = (at, *tokens[: -(-(at + 1) * page_tokens // 16) * 16])
            assert of_page.setdefault(page, prefix) == prefix
    assert len(set(of_page.values())) == len(of_page)


def test_who_waits_has_the_higher_index_whatever_the_times(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = lines_at_random(20, Random(5))
    path = write(*lines)
    requests = FreeInference(path=path, arrivals="closed_loop").load(16).requests
    assert all(0 <= other < request.index for request in requests for other in request.predecessors)
    assert sum(request.after >= 0 for request in requests) >= len(requests) - 20
    monkeypatch.setattr(stored, "MOST_IN_MEMORY", 500)
    kept = FreeInference(path=path, arrivals="closed_loop").load(16).requests
    assert isinstance(kept, stored.StoredRequests) and [*map(repr, kept)] == [*map(repr, requests)]


def test_a_converted_file_is_the_same_graph(write: Any, tmp_path: Any) -> None:
    lines, _ = lines_at_random(6, Random(7))
    path, out = write(*lines, name="day.jsonl.zst"), str(tmp_path / "out.jsonl")
    assert main(["trace", "convert", path, out, "trace.arrivals=closed_loop"]) == 0
    found, expected = (
        Mooncake(path=out, block_tokens=16).load(16).requests,
        load_trace(path=path, arrivals="closed_loop").requests,
    )
    for copy, request in zip(found, expected, strict=True):
        assert (copy.predecessors, copy.prompt_tokens, copy.kind) == (request.predecessors, request.prompt_tokens, request.kind)
        assert copy.delay_s == pytest.approx(request.delay_s) and copy.turn == request.turn


def test_a_limit_counts_sessions_and_a_rate_divides_arrivals(write: Any) -> None:
    week = Week()
    lines = [week.line(week.call(at, at + 1, range(20)), week.call(at + 400, at + 500, range(30))) for at in (0, 200, 300)]
    assert [request.arrival_s for request in load(write, *lines, limit=2, rate=2.0)] == [0, 0.1, 0.2, 0.3]


def test_answers_are_inferred_from_the_next_prompt(write: Any) -> None:
    week = Week()
    calls = week.call(0, 1, range(32), provider_tokens={"completion": 20}), week.call(2, 3, range(64))
    first, _ = load(write, week.line(*calls), answers="inferred")
    assert (first.runs, first.output_runs) == (((0, 2),), ((2, 1),))


def deep(week: Week, depth: int) -> dict[str, Any]:
    return week.session(week.call(depth, depth + 1, range(20), *([deep(week, depth + 1)] if depth < 120 else [])))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "requests is empty: this session": ({"requests": []}, ""),
    "more than 100 agents wait for each other": (deep(Week(), 0), ""),
    "block_ids has 1 ids, but role_tokens=": ({"block_ids": [1]}, "call"),
    "role_tokens has no tokens": ({"role_tokens": {"user": 0}, "block_ids": []}, "call"),
    "role_tokens must be a JSON object": ({"role_tokens": 20}, "call"),
    "user must be 0 or more, not -1": ({"role_tokens": {"user": -1}}, "call"),
    "the sum of role_tokens is 99999999 tokens, more than trace.max_tokens": ({"role_tokens": {"user": 99_999_999}}, "call"),
    "completion is 99999999 tokens, more than": ({"provider_tokens": {"completion": 99_999_999}}, "call"),
    "start_ms is missing": ({"start_ms": None}, "call"),
    "tool_calls must be a list": ({"tool_calls": 3}, "call"),
    "subagent must be a JSON object": ({"tool_calls": [{"subagent": 4}]}, "call"),
    "expected a JSON object, not 5": ({"tool_calls": [5]}, "call"),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_line_is_named(message: str, write: Any) -> None:
    change, where = BAD[message]
    week = Week()
    call = week.call(0, 1, range(40)) | (change if where else {})
    call = {name: value for name, value in call.items() if value is not None}
    path = write(
        week.line(week.call(0, 1, range(20))),
        week.line(week.call(0, 1, range(20))) | {"requests": [call]} | ({} if where else change),
    )
    with pytest.raises(TraceError) as caught:
        FreeInference(path=path).load(16)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


def test_an_unknown_way_to_arrive_is_refused() -> None:
    with pytest.raises(ValueError, match="arrivals must be one of recorded, closed_loop, not 'sometimes'"):
        FreeInference(path="a", arrivals="sometimes")


def test_agents_are_played_in_time(write: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The sub-agent begins 0.5 s after the first answer, and the second request 0.6 s after the sub-agent's."""
    week = Week()
    helper = week.session(week.call(1500, 2000, range(100, 140)))
    path = write(week.line(week.call(0, 1000, range(50), helper, None), week.call(2600, 3000, range(90))))
    words = "trace.arrivals=closed_loop", "page_tokens=16", "tiers.gpu.capacity=100pages", f"output={tmp_path}/out"
    assert main(["simulate", f"trace.path={path}", *words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sessions")]
    assert line.startswith("sessions    1 finished in 1.")
