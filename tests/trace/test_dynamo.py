"""Dynamo's request trace."""

import json

import pytest

from kvsim.api import load_trace
from kvsim.errors import TraceError, UsageError
from kvsim.shadow.sources.lines import Line, Lines
from kvsim.shadow.sources.prompts import Prompts
from kvsim.shadow.sources.salt import Salt
from kvsim.trace.dynamo import Dynamo
from kvsim.trace.formats import recognise

T0 = 1777312800000


def row(begin_ms, end_ms, tokens, hashes, session=None, size=4, **request):
    """A row as Dynamo documents it; with a session, it has what requests with session headers have besides."""
    found = {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": T0 + end_ms,
        "request": {
            "request_id": f"r{begin_ms}", "request_received_ms": T0 + begin_ms, "output_tokens": 16,
            "replay": {"trace_block_size": size, "input_length": tokens, "input_sequence_hashes": hashes}, **request,
        },
    }  # fmt: skip
    if session is not None:
        found |= {"event_source": "dynamo", "agent_context": {"session_id": session, "parent_session_id": "planner"}}
        found["request"] |= {"input_tokens": tokens, "total_time_ms": end_ms - begin_ms, "model": "m"}
    return found


def tool(end_ms):
    return {
        "schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": T0 + end_ms,
        "agent_context": {"session_id": "a"}, "tool": {"tool_call_id": "c", "tool_class": "web_search", "status": "succeeded"},
    }  # fmt: skip


def load(write, *lines, page_tokens=4, **settings):
    return Dynamo(path=write(*lines), **{"block_tokens": 4, **settings}).load(page_tokens).requests


def test_a_row_is_a_request_at_the_time_it_was_received(write):
    large = [14879255164371896291, 274632075616497421, 7]
    requests = load(write, row(500, 600, 8, large[:2]), tool(700), row(0, 1000, 10, large))
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens, r.runs, r.session, r.after) for r in requests] == [
        (0.0, 10, 16, ((0, 2),), -1, -1),
        (0.5, 8, 16, ((0, 2),), -1, -1),
    ]


def test_rows_in_events_are_read(write):
    wrapped = {"timestamp": 1, "event": row(0, 5, 8, [1, 2])}
    assert recognise(write(wrapped))[0].name == "dynamo"
    assert load_trace(path=write(wrapped), page_tokens=4).requests[0].runs == ((0, 2),)


def test_the_block_size_is_found_behind_rows_without_it(write):
    trace = load_trace(path=write(tool(0), row(0, 5, 64, [1, 2], size=32)), page_tokens=32)
    assert (trace.block_tokens, len(trace.requests)) == (32, 1)


def test_models_share_no_pages(write):
    requests = load(write, *(row(at, at, 4, [1], model=model) for at, model in enumerate("aba")))
    assert [(request.runs, request.kind) for request in requests] == [(((0, 1),), "a"), (((1, 1),), "b"), (((0, 1),), "a")]


SESSION = [
    row(0, 100, 4, [1], "a"),
    row(150, 400, 8, [1, 2], "a"),
    row(200, 250, 4, [9], "b"),
    row(300, 350, 8, [1, 3], "a"),  # beside the second one
    row(500, 600, 12, [1, 2, 4], "a"),
]


def test_recorded_sessions_keep_their_times(write):
    requests = load(write, *sorted(SESSION, key=lambda line: line["event_time_unix_ms"]), rate=2)
    assert [(r.arrival_s, r.session, r.turn, r.after) for r in requests] == [
        (0.0, 0, 0, -1), (0.075, 0, 1, -1), (0.1, 1, 0, -1), (0.15, 0, 2, -1), (0.25, 0, 3, -1),
    ]  # fmt: skip


def test_in_a_closed_loop_a_request_waits_for_what_it_waited_for(write):
    requests = load(write, *SESSION, arrivals="closed_loop")
    assert [(r.session, r.turn, r.after, round(r.delay_s, 6)) for r in requests] == [
        (0, 0, -1, 0.0), (0, 1, 0, 0.05), (1, 0, -1, 0.0), (0, 2, 0, 0.2), (0, 3, 1, 0.1),
    ]  # fmt: skip


def test_a_closed_loop_needs_sessions(write):
    with pytest.raises(TraceError, match=r"arrivals=closed_loop has no effect: no request has an agent_context"):
        load(write, row(0, 1, 4, [1]), arrivals="closed_loop")


def test_limit_counts_requests(write):
    assert len(load(write, tool(0), *SESSION, limit=2)) == 2


def test_its_rows_are_not_lines_of_a_log_that_grows():
    salt = Salt(b"s" * 32)
    line = Line("log", 1, json.dumps(row(0, 1, 4, [1])).encode())
    with pytest.raises(UsageError, match="is a trace=dynamo, whose lines are no single requests"):
        Lines(4, salt, Prompts(4, salt, None)).read(line, 0.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({**row(0, 1, 4, [1]), "schema": "dynamo.request.trace.v2"}, "schema must be dynamo.request.trace.v1, not"),
        ({**row(0, 1, 4, [1]), "event_type": "request"}, 'event_type must be one of request_end, .*, not "request"'),
        (row(0, 1, 9, [1]), "input_sequence_hashes has 1 ids, but input_length=9 takes 3 blocks of 4 tokens"),
        (row(0, 1, 4, [1], size=64), "trace_block_size is 64, but block_tokens is 4: set trace.block_tokens=64"),
        (row(0, 1, 4, [1], replay=None), "replay must be a JSON object, not null"),
        (row(0, 1, 4, [1], request_received_ms="now"), 'request_received_ms must be a number of at least 0, not "now"'),
        ({**row(0, 1, 4, [1]), "agent_context": {}}, "session_id is missing"),
    ],
)
def test_a_bad_row_is_named(write, bad, message):
    path = write(row(0, 1, 4, [1]), bad)
    with pytest.raises(TraceError, match=f":2: {message}"):
        Dynamo(path=path, block_tokens=4).load(4)


def test_a_file_of_other_rows_has_no_requests(write):
    with pytest.raises(TraceError, match="no row is a request_end: it contains no requests"):
        load(write, tool(0))
