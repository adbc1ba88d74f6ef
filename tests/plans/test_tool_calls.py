"""Where prefetch=tool_calls can be simulated, and what has no effect on it."""

import json
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.errors import NoEffect, UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.plans.tool_calls import check_calls_known
from kvsim.settings.configuration import compose_with_choices

ON_CPU = ("prefetch=tool_calls", "tiers.cpu.capacity=10GiB")


def plan(*overrides: str, command: str = "simulate") -> Plan:
    config, choices = compose_with_choices(list(overrides))
    return build_run(config, command=command, overrides=overrides, choices=choices)


def test_no_disk_is_needed() -> None:
    assert plan(*ON_CPU).prefetch.follows_calls and not plan("tiers.cpu.capacity=10GiB").prefetch.follows_calls


@pytest.mark.parametrize(
    ("overrides", "command", "message"),
    [
        (
            ["prefetch=tool_calls"],
            "simulate",
            "prefetch: ToolCallPrefetch has no effect without a CPU tier: set tiers.cpu.capacity",
        ),
        (
            ON_CPU,
            "replay",
            "prefetch: ToolCallPrefetch has no effect on kvsim replay, in which no time passes during a tool call",
        ),
        (
            [*ON_CPU, "prefetch.uploads=false", "prefetch.keep_s=3"],
            "simulate",
            "prefetch.keep_s has no effect with these settings of ToolCallPrefetch",
        ),
        (
            [*ON_CPU, "prefetch.offloads=false", "prefetch.margin=3"],
            "simulate",
            "prefetch.margin has no effect with these settings of ToolCallPrefetch",
        ),
        (
            ["prefetch=tool_calls", "tiers.disk.capacity=10GiB", "tiers.disk.below=gpu"],
            "simulate",
            "prefetch: ToolCallPrefetch has no effect without a CPU tier",
        ),
    ],
)
def test_it_is_refused_where_it_would_change_nothing(overrides: list[str], command: str, message: str) -> None:
    with pytest.raises(NoEffect, match=message):
        plan(*overrides, command=command)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["substrate=hardware", "model=tiny"],
            "by substrate=hardware, which loads pages for running requests only: set substrate",
        ),
        (["rules=vllm"], "by the rules of vLLM, which know no offload of idle pages: set rules=default"),
        (["model=nemotron_h_8b"], "with recurrent layers, whose states would have to move, too"),
        (["cluster.prefill=1", "cluster.decode=1"], "where prefill and decode are apart"),
        (["cluster.engines=2", "autoscaling=target_utilization"], "where engines are started and stopped: set autoscaling=none"),
        (["cluster.engines=2", "cluster.workers=2", "routing=session_affinity"], "by several processes: set cluster.workers=1"),
    ],
)
def test_what_is_not_simulated_is_refused(more: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=f"^prefetch: ToolCallPrefetch is not simulated {message}"):
        plan(*ON_CPU, *more)


def test_an_emulated_server_does_not_know_which_request_continues_another() -> None:
    with pytest.raises(UsageError, match="prefetch: ToolCallPrefetch must know which request continues another one"):
        check_calls_known(plan(*ON_CPU))
    check_calls_known(plan("tiers.cpu.capacity=10GiB"))


CALLS = ("simulate", "page_tokens=128", "trace.block_tokens=128", "tiers.gpu.capacity=100pages", "tiers.cpu.capacity=100pages")


def written(path: Path, delay_ms: int) -> Path:
    """A session of eight turns, each of which adds a block, on a trace of blocks; ``delay_ms`` between them, 0: none waits."""
    rows = [
        {"session_id": "a", "request_id": turn, "timestamp": 1000 * turn, "input_length": 128 * (turn + 2), "output_length": 5,
         "hash_ids": list(range(turn + 2))}
        | ({"after": [turn - 1], "delay": delay_ms} if turn and delay_ms else {})
        for turn in range(8)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_trace_without_tool_times_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "open.jsonl", 0)
    assert main([*CALLS, f"trace.path={path}", "prefetch=tool_calls", f"output={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err == (
        "kvsim: prefetch of the cpu tier: ToolCallPrefetch needs requests that arrive when others have ended "
        "(trace.arrivals=closed_loop), which this trace does not have: choose another trace or policy\n"
    )


def test_a_result_says_what_pages_did_during_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of 7 calls is not known; the second request leaves 3 pages, the seventh 8."""
    path = written(tmp_path / "closed.jsonl", 700)
    more = ("prefetch=tool_calls", "prefetch.only_for_waiting=false", f"output={tmp_path / 'out'}")
    assert main([*CALLS, f"trace.path={path}", *more]) == 0
    calls = json.loads((tmp_path / "out" / "result.json").read_text())["tool_calls"]
    assert calls["calls"] == 7 and calls["offloads"] == calls["uploads"] == 6
    assert calls["offloaded_pages"] == calls["uploaded_pages"] == calls["used_pages"] == 3 + 4 + 5 + 6 + 7 + 8
    assert calls["ttft_s"]["mean"] > 0 and "tool calls" in capsys.readouterr().out
    assert "found on the GPU by the request that continues the call" in (tmp_path / "out" / "report.html").read_text()


def test_other_policies_have_no_such_counts(tmp_path: Path) -> None:
    path = written(tmp_path / "closed.jsonl", 700)
    assert main([*CALLS, f"trace.path={path}", f"output={tmp_path / 'out'}"]) == 0
    assert "tool_calls" not in json.loads((tmp_path / "out" / "result.json").read_text())
