"""Results of clients and spans, of which kvsim reads lengths and times."""

import json

import pytest

from kvsim.errors import TraceError
from kvsim.trace.formats import recognise
from kvsim.trace.lengths import Lengths

T0 = 1759813207532900363


def aiperf(at_ms, prompt, output, session, turn=0, **more):
    """A line as in AIPerf's guide to its files."""
    return {
        "metadata": {
            "session_num": 0, "x_request_id": f"{at_ms}", "x_correlation_id": session, "conversation_id": "c", "turn_index": turn,
            "request_start_ns": T0 + at_ms * 1_000_000, "request_ack_ns": None, "request_end_ns": T0 + at_ms * 1_000_000 + 9,
            "worker_id": "w", "benchmark_phase": "profiling", "was_cancelled": False, "cancellation_time_ns": None,
        },
        "metrics": {
            "input_sequence_length": {"value": prompt, "unit": "tokens"},
            "time_to_first_token": {"value": 255.9, "unit": "ms"},
            "output_sequence_length": {"value": output, "unit": "tokens"},
        },
        "error": None, **more,
    }  # fmt: skip


FAILED = {**aiperf(1, 9, 9, "f"), "metrics": {"error_isl": {"value": 550, "unit": "tokens"}},
          "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"}}  # fmt: skip
WARMUP = aiperf(2, 9, 9, "w")
WARMUP["metadata"]["benchmark_phase"] = "warmup"
AIPERF = [aiperf(1500, 200, 20, "a", 1), aiperf(0, 100, 10, "a"), FAILED, WARMUP, aiperf(250, 64, 8, "b")]
BENCH = [
    {
        "date": "20260102-030405", "endpoint_type": "vllm", "completed": 3, "failed": 1, "input_lens": [100, 9, 64, 200],
        "output_lens": [10, 0, 8, 20], "ttfts": [0.1, 0, 0.2, 0.1], "itls": [[0.05], [], [0.1], [0.2]],
        "start_times": [7.0, 7.125, 7.25, 8.5], "errors": ["", "refused", "", ""],
    }
]  # fmt: skip


def value(of):
    return {"stringValue": of} if isinstance(of, str) else {"intValue": str(of)}


def otlp(*spans):
    """A line of OTLP's file exporter."""
    found = [
        {"traceId": "5b", "spanId": "ee", "name": "chat m", "kind": 3, "startTimeUnixNano": str(T0 + at_ms * 1_000_000),
         "attributes": [{"key": key, "value": value(of)} for key, of in attributes.items()]}
        for at_ms, attributes in spans
    ]  # fmt: skip
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": "s"}, "spans": found}]}]}


def usage(prompt, output, session, **more):
    return {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output, "gen_ai.conversation.id": session, **more,
    }  # fmt: skip


AGENT = usage(300, 30, "a", **{"gen_ai.operation.name": "invoke_agent"})
OTLP = [
    otlp((1500, usage(200, 20, "a")), (0, AGENT), (0, {"http.request.method": "POST"})),
    otlp((0, usage(100, 10, "a")), (250, usage(64, 8, "b"))),
]
FLAT = [
    {"name": "chat m", "context": {"span_id": "0x1"}, "start_time": f"2024-10-01T12:00:0{at}Z", "attributes": attributes}
    for at, attributes in (("1.500000", usage(200, 20, "a")), ("0.000000", usage(100, 10, "a")), ("0.250000", usage(64, 8, "b")))
]
OF_VLLM = {"name": "llm_request", "start_time": "2024-10-01T12:00:00Z",
           "attributes": {"gen_ai.usage.prompt_tokens": 37, "gen_ai.usage.completion_tokens": 5}}  # fmt: skip


@pytest.mark.parametrize("lines", [AIPERF, OTLP, FLAT])
def test_a_request_has_its_time_lengths_and_session(write, lines):
    requests = Lengths(path=write(*lines), prefixes=0.0).load(16).requests
    assert [(round(r.arrival_s, 6), r.prompt_tokens, r.output_tokens, r.session, r.turn) for r in requests] == [
        (0.0, 100, 10, 0, 0),
        (0.25, 64, 8, 1, 0),
        (1.5, 200, 20, 0, 1),
    ]
    assert requests[2].runs[0][0] == requests[0].runs[0][0]  # a later turn continues the turn before it


def test_a_benchmark_has_lists(write):
    requests = Lengths(path=write(*BENCH), prefixes=0.0).load(16).requests
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests] == [(0.0, 100, 10), (0.25, 64, 8), (1.5, 200, 20)]


def test_a_benchmark_without_times_begins_at_once(write):
    path = write({"input_lens": [100, 64], "output_lens": [10, 8]})
    assert [request.arrival_s for request in Lengths(path=path, prefixes=0.0).load(16).requests] == [0.0, 0.0]
    with pytest.raises(TraceError, match="rate has no effect: all requests have the same time"):
        Lengths(path=path, prefixes=0.0, rate=2).load(16)


def test_the_server_s_count_of_tokens_comes_first(write):
    line = aiperf(0, 100, 10, "a")
    line["metrics"] |= {"usage_prompt_tokens": {"value": 107, "unit": "tokens"}, "usage_completion_tokens": {"value": 11}}
    (request,) = Lengths(path=write(line), prefixes=0.0).load(16).requests
    assert (request.prompt_tokens, request.output_tokens) == (107, 11)


def test_earlier_names_of_the_attributes_are_known(write):
    (request,) = Lengths(path=write(OF_VLLM), prefixes=0.0).load(16).requests
    assert (request.prompt_tokens, request.output_tokens, request.session) == (37, 5, -1)


@pytest.mark.parametrize(
    ("lines", "name"),
    [(AIPERF, "AIPerf's profile_export.jsonl"), (BENCH, "a result of vllm bench serve"), (OTLP, "a log of OpenTelemetry's spans"),
     (FLAT, "a log of OpenTelemetry's spans")],
)  # fmt: skip
def test_without_prefixes_it_is_refused_by_name(write, lines, name):
    path = write(*lines)
    assert recognise(path)[0].name == "lengths"
    with pytest.raises(TraceError, match=rf"{name}.*not what they share.*trace\.prefixes=0\.5"):
        Lengths(path=path).load(16)


def test_a_result_may_be_one_object_over_several_lines(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(BENCH[0], indent=4))
    assert len(Lengths(path=str(path), prefixes=0.0).load(16).requests) == 3


WRONG = aiperf(0, 100, 10, "a")
WRONG["metrics"]["input_sequence_length"]["value"] = 1.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (WRONG, ":1: input_sequence_length must be a whole number of at least 0, not 1.5"),
        ({**BENCH[0], "output_lens": [1]}, ":1: output_lens has 1 elements, but input_lens has 4"),
        ({**BENCH[0], "input_lens": [100, 9, "x", 1]}, ':1: input_lens[2] must be a whole number of at least 0, not "x"'),
        (otlp((0, usage("x", 1, "a"))), ':1: gen_ai.usage.input_tokens must be a whole number of at least 0, not "x"'),
        ({**FLAT[0], "start_time": "2024-13"}, ':1: start_time must be a date such as 2023-11-16 18:15:46.68, not "2024-13"'),
        ({**FLAT[0], "attributes": {}}, ": no row has prompt tokens"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(write, line, message):
    path = write(line)
    with pytest.raises(TraceError) as caught:
        Lengths(path=path, prefixes=0.5).load(16)
    assert str(caught.value) == f"{path}{message}"
