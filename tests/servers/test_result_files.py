"""Files of other clients, made by their published formats: which request is which, and what is known of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.results.observed import NOT_TOLD, ObservedRun
from kvsim.results.observed_file import write_observed
from kvsim.servers.results.formats import facts_of, read_file, read_results, result_files

VLLM = {
    "endpoint_type": "openai", "backend": "openai", "model_id": "m", "completed": 2, "input_lens": [32, 48, 16],
    "output_lens": [3, 2, 0], "ttfts": [0.5, 0.25, 0.0], "itls": [[0.1, 0.2], [0.1], []], "start_times": [100.0, 101.0, 102.0],
    "errors": ["", "", "Server disconnected"],
}  # fmt: skip
SGLANG = {
    "backend": "sglang", "dataset_name": "mooncake", "completed": 3, "server_info": {}, "input_lens": [32, 48, 16],
    "output_lens": [3, 2, 1], "ttfts": [0.5, 0.25, 0.125], "itls": [[0.1, 0.2], [0.1], []], "errors": ["", "", ""],
    "cached_tokens": [0, 32, 16],
    "cached_tokens_details": [None, {"device": 16, "host": 16}, {"device": 0, "host": 0, "storage": 16, "storage_backend": "x"}],
}  # fmt: skip


def requests(sessions: Sequence[tuple[int, int]] = ((-1, 0),) * 3) -> list[Request]:
    """Three prompts of 32, 48 and 16 tokens, a second apart, with the session and turn of each."""
    return [
        Request(
            index=number, arrival_s=float(number), prompt_tokens=tokens, output_tokens=2, runs=((0, tokens // 16),),
            prompt_pages=tokens // 16, session=session, turn=turn,
        )
        for number, (tokens, (session, turn)) in enumerate(zip((32, 48, 16), sessions, strict=True))
    ]  # fmt: skip


def read(folder: Path, *documents: dict[str, Any], **more: Any) -> ObservedRun:
    (run,) = read_all(folder, *documents, **more)
    return run


def read_all(folder: Path, *documents: dict[str, Any], **more: Any) -> list[ObservedRun]:
    path = folder / "run.json"
    path.write_text("\n".join(map(json.dumps, documents)))
    return read_file(path, requests(**more))


def aiperf_line(number: int, sent_s: float, prompt: int, cached: int | None, **metadata: Any) -> dict[str, Any]:
    metrics = {
        "time_to_first_token": {"value": 500.0, "unit": "ms"},
        "request_latency": {"value": 800.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [100.0, 200.0], "unit": "ms"},
        "usage_prompt_tokens": {"value": prompt, "unit": "tokens"},
        "usage_completion_tokens": {"value": 3, "unit": "tokens"},
    }
    if cached is not None:
        metrics["usage_prompt_cache_read_tokens"] = {"value": cached, "unit": "tokens"}
    about = {"session_num": number, "request_start_ns": int(sent_s * 1e9), "request_end_ns": int((sent_s + 0.9) * 1e9)}
    return {"metadata": about | {"benchmark_phase": "profiling"} | metadata, "metrics": metrics, "error": None}


def guidellm_request(at_s: float | None, sent_s: float, prompt: int, **more: Any) -> dict[str, Any]:
    times = {"request_start": sent_s, "first_token_iteration": sent_s + 0.5, "last_token_iteration": sent_s + 0.75}
    info = {"status": "completed", "timings": times, "settings": {"relative_timestamp": at_s}, "error": None}
    return {"info": info | more, "prompt_tokens": prompt, "output_tokens": 2, "cached_tokens": prompt // 2}


def test_vllm_bench_has_times_in_the_order_of_the_trace_and_no_hits(tmp_path: Path) -> None:
    run = read(tmp_path, VLLM)
    assert run.client == "vllm bench" and run.errors == [None, None, "Server disconnected"]
    assert run.sent_s.tolist() == [0, 1, 2] and run.first_token_s[:2].tolist() == [0.5, 1.25]
    assert run.end_s[:2].tolist() == pytest.approx([0.8, 1.35]) and np.isnan(run.end_s[2])
    assert run.token_gaps_s[0].tolist() == [0.1, 0.2] and run.output_tokens.tolist() == [3, 2, 0]
    assert run.cached_tokens.tolist() == [NOT_TOLD] * 3 and not run.notes


def test_newer_files_of_vllm_bench_have_latencies_and_times_in_the_queue(tmp_path: Path) -> None:
    run = read(
        tmp_path, VLLM | {"latencies": [0.9, 0.5, 0.0], "queue_times": [0.25, None, None], "server_ttfts": [0.2, None, None]}
    )
    assert run.end_s[:2].tolist() == [0.9, 1.5]
    assert (run.queued_s[0], run.prefill_s[0]) == (0.25, 0.2) and np.isnan([run.queued_s[1], run.prefill_s[1]]).all()


def test_every_run_that_was_appended_is_read(tmp_path: Path) -> None:
    assert [run.output_tokens[0] for run in read_all(tmp_path, VLLM, VLLM | {"output_lens": [5, 2, 0]})] == [3, 5]


def test_sglang_bench_has_hits_by_tier_and_no_times_of_sending(tmp_path: Path) -> None:
    run = read(tmp_path, SGLANG)
    assert run.client == "sglang bench" and run.cached_tokens.tolist() == [0, 32, 16]
    assert {medium: tokens.tolist() for medium, tokens in run.tier_tokens.items()} == {
        "device": [0, 16, 0], "host": [0, 16, 0], "storage": [0, 0, 16],
    }  # fmt: skip
    assert run.sent_s.tolist() == [0, 1, 2] and "the trace's arrivals stand in" in run.notes[0]


def test_aiperf_lines_are_in_the_order_of_issue_without_the_warm_up(tmp_path: Path) -> None:
    lines = [aiperf_line(2, 12.0, 16, 16), aiperf_line(0, 10.0, 32, None), aiperf_line(1, 11.0, 48, 32)]
    run = read(tmp_path, aiperf_line(0, 1.0, 99, 0, benchmark_phase="warmup"), *lines)
    assert run.client == "aiperf" and run.cached_tokens.tolist() == [0, 32, 16] and not run.notes
    assert run.sent_s.tolist() == [0, 1, 2] and run.end_s.tolist() == pytest.approx([0.8, 1.8, 2.8])
    assert run.token_gaps_s[1].tolist() == pytest.approx([0.1, 0.2])


def test_aiperf_conversations_are_the_sessions_of_the_trace(tmp_path: Path) -> None:
    about = [("b", 0, 32), ("c", 0, 48), ("b", 1, 16)]
    lines = [
        aiperf_line(number, 10.0 + number, prompt, prompt - 16, conversation_id=name, turn_index=turn)
        for number, (name, turn, prompt) in enumerate(about)
    ]
    sessions = ((7, 0), (7, 1), (3, 0))
    run = read(tmp_path, *lines, sessions=sessions)
    assert run.cached_tokens.tolist() == [16, 0, 32]
    with pytest.raises(UsageError, match="no request for turn 2 of session 0"):
        read(tmp_path, *lines, sessions=((7, 0), (7, 2), (3, 0)))


def test_what_failed_in_aiperf_has_a_reason(tmp_path: Path) -> None:
    failed = {"metadata": aiperf_line(1, 11.0, 0, 0)["metadata"], "metrics": {}, "error": {"message": "timed out", "code": 504}}
    run = read(tmp_path, aiperf_line(0, 10.0, 32, 0), failed, aiperf_line(2, 12.0, 16, 0, was_cancelled=True))
    assert run.errors == [None, "timed out", "cancelled"] and run.cached_tokens.tolist() == [0, NOT_TOLD, NOT_TOLD]
    assert np.isnan(run.end_s[1])


def test_guidellm_requests_are_in_the_order_of_the_trace(tmp_path: Path) -> None:
    failed = guidellm_request(1.0, 51.0, 48, status="errored", error="refused")
    found = {"successful": [guidellm_request(2.0, 52.0, 16), guidellm_request(0.0, 50.0, 32)], "errored": [failed]}
    run = read(tmp_path, {"benchmarks": [{"requests": found | {"incomplete": [], "total": None}}]})
    assert run.client == "guidellm" and run.errors == [None, "refused", None]
    assert run.sent_s.tolist() == [0, 1, 2] and run.cached_tokens.tolist() == [16, NOT_TOLD, 8]
    assert run.end_s[0] - run.sent_s[0] == 0.75


def test_prompts_of_another_length_are_noted(tmp_path: Path) -> None:
    run = read(tmp_path, VLLM | {"input_lens": [33, 50, 16]})
    assert run.notes == ["2 prompts are not as long as in the trace, by up to 2 tokens: hits differ for that alone"]


def test_a_run_that_kvsim_saved_is_read_as_it_was(tmp_path: Path) -> None:
    run = read(tmp_path, SGLANG)
    path = tmp_path / "1.jsonl.gz"
    write_observed(path, run)
    (same,) = read_file(path, requests())
    assert same.client == "sglang bench" and same.cached_tokens.tolist() == [0, 32, 16] and same.notes == run.notes
    assert result_files([tmp_path]) == [path] and facts_of(path) is None
    with pytest.raises(UsageError, match="has 3 requests, but the trace has 2: choose the trace that was sent"):
        read_file(path, requests()[:2])
    (other,) = read_file(path, [replace(one, prompt_tokens=32) for one in requests()])
    assert other.notes[-1].startswith("2 prompts are not as long as in the trace, by up to 16 tokens")


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (VLLM | {"input_lens": [32, 48]}, r"has 2 requests, but the trace has 3: set trace.limit=2"),
        (SGLANG | {"itls": [[0.1]]}, "is not as sglang bench writes it: its lists are not of the same length"),
        (VLLM | {"ttfts": "fast"}, "is not as vllm bench writes it: Expected `array`, got `str`"),
        ({name: value for name, value in VLLM.items() if name != "ttfts"}, "repeat vllm bench serve with --save-detailed"),
        ({name: value for name, value in SGLANG.items() if name != "ttfts"}, "repeat bench_serving with --output-details"),
        ({"metadata": {}, "metrics": {}}, "is not as aiperf writes it: Object missing required field `session_num`"),
        ({"benchmarks": []}, "has no benchmark"),
        (VLLM | {"input_lens": [2**63, 48, 16]}, "request 0: prompt tokens must be from 0 to 1099511627776, not 92233720368547"),
        (VLLM | {"output_lens": [3, -1, 0]}, "request 1: output tokens must be from 0 to"),
        (VLLM | {"ttfts": [0.5, 1e300, 0.0]}, r"request 1: time to first token must be from -1e\+12 to 1e\+12, not 1e\+300"),
        (VLLM | {"itls": [[1e13], [], []]}, "request 0: time to its end must be from"),
        (SGLANG | {"cached_tokens_details": [{"device": "x"}, {}, {}]}, "not as sglang bench writes it: Expected `int`"),
        (aiperf_line(0, 1e12, 32, 0), r"Expected `int` <= 9223372036854775807 - at `\$\[0\]\.metadata\.request_start_ns`"),
        ({"hit_rate": 1}, "is of no known format: kvsim reads a run that kvsim has saved, AIPerf's"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, document: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        read(tmp_path, document)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"results: {tmp_path}")


def test_a_measure_that_is_no_number_is_said(tmp_path: Path) -> None:
    lines = [aiperf_line(number, 10.0 + number, 16, 0) for number in range(3)]
    lines[1]["metrics"]["inter_chunk_latency"]["value"] = [100.0, "x"]
    with pytest.raises(UsageError, match="a measure in ms is 'x', which is no finite number"):
        read(tmp_path, *lines)
    lines[1]["metrics"] = {"usage_prompt_tokens": {"value": 10**400, "unit": "tokens"}}
    with pytest.raises(UsageError, match=r"a measure in tokens is 10\*\*400 or more, which is no finite number"):
        read(tmp_path, *lines)


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(json.dumps(VLLM).encode().replace(b"openai", b"\xffpenai"))
    with pytest.raises(UsageError, match=r"run.jsonl:1: not JSON: 'utf-8' codec can't decode byte 0xff"):
        read_file(path, requests())


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(SGLANG) + "\n{broken\n")
    with pytest.raises(UsageError, match=r"run.jsonl:2: not JSON"):
        read_file(path, requests())
    path.write_text("")
    with pytest.raises(UsageError, match="has no results"):
        read_file(path, requests())
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_results([tmp_path / "none.json"], requests())
