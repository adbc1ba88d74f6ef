"""Agent sessions in WEKA's format."""

import resource
from time import perf_counter

import pytest

from kvsim.errors import TraceError, UsageError
from kvsim.trace.statistics import trace_statistics
from kvsim.trace.weka import Weka


def call(t, tokens, rle, **more):
    return {"t": t, "type": "n", "in": tokens, "out": 7, "api_time": 2.0, "hash_ids_rle": rle, **more}


def subagent(t, *calls):
    return {"t": t, "type": "subagent", "requests": list(calls)}


def session(*calls, **more):
    return {"id": "same", "block_size": 4, "requests": list(calls), **more}


def load(write, *sessions, page_tokens=4, **settings):
    return Weka(path=write(*sessions), block_tokens=4, **settings).load(page_tokens).requests


def test_both_encodings_read_alike(write):
    packed = session(call(0, 22, [10, 3, 20, 2]))
    unpacked = session({"t": 0, "in": 22, "out": 7, "hash_ids": [10, 11, 12, 20, 21]})
    (left,), (right,) = load(write, packed), load(write, unpacked)
    assert left.runs == right.runs == ((0, 5),)
    assert (left.prompt_tokens, left.prompt_pages, left.output_tokens) == (22, 5, 7)


def test_ids_are_local_to_a_line_even_if_the_line_is_repeated(write):
    line = session(call(0, 8, [1, 2]), call(5, 12, [1, 3]))
    assert [request.runs for request in load(write, line, line)] == [((0, 2),), ((3, 2),), ((0, 3),), ((3, 3),)]


def test_subagents_share_the_ids_of_their_session(write):
    requests = load(write, session(call(0, 8, [1, 2]), subagent(3, call(0, 8, [1, 1, 9, 1])), call(9, 8, [1, 2])))
    assert [request.runs for request in requests] == [((0, 2),), ((0, 1), (2, 1)), ((0, 2),)]
    assert [request.kind for request in requests] == ["agent", "subagent", "agent"]
    assert [request.turn for request in requests] == [0, 1, 2]


def test_a_subagents_times_count_from_its_own_begin(write):
    requests = load(write, session(call(1, 4, [1, 1]), subagent(10, call(0, 4, [2, 1]), call(5, 4, [2, 1])), call(12, 4, [1, 1])))
    assert [(request.arrival_s, request.kind) for request in requests] == [
        (1, "agent"),
        (10, "subagent"),
        (12, "agent"),
        (15, "subagent"),
    ]


def test_a_lane_takes_the_next_session_when_its_session_has_ended(write):
    """Two lanes: the first session ends at 12 s, the second at 2 s, so the third follows the second and ends at 7 s."""
    long, short, third = (
        session(call(0, 4, [1, 1]), call(10, 4, [1, 1])),
        session(call(0, 4, [1, 1])),
        session(call(3, 4, [1, 1])),
    )
    requests = load(write, long, short, third, short, concurrent_sessions=2)
    assert [(request.session, request.arrival_s) for request in requests] == [(0, 0), (1, 0), (2, 5), (3, 7), (0, 10)]
    assert [request.index for request in requests] == [0, 1, 2, 3, 4]
    assert all(request.after == -1 for request in requests)


def test_a_rate_divides_arrivals(write):
    requests = load(write, session(call(0, 4, [1, 1]), call(10, 4, [1, 1])), rate=2.0)
    assert [request.arrival_s for request in requests] == [0, 5]


def test_in_a_closed_loop_a_request_waits_for_the_answer_before_it_as_long_as_in_the_recording(write):
    requests = load(write, session(call(1, 4, [1, 1]), call(10, 4, [1, 1])), arrivals="closed_loop")
    assert [(request.after, request.delay_s, request.arrival_s) for request in requests] == [(-1, 0, 1), (0, 7, 10)]


def test_in_a_closed_loop_parallel_subagents_wait_for_the_same_answer_and_their_parent_for_all_of_them(write):
    """Answers end at 2; 9 (slow) and 6 (quick); the last request waits for both, and comes 1 s after the slow one."""
    requests = load(
        write,
        session(
            call(0, 4, [1, 1]),
            subagent(4, call(0, 4, [2, 1], api_time=5.0)),
            subagent(4, call(0, 4, [3, 1])),
            call(10, 4, [1, 1]),
        ),
        arrivals="closed_loop",
    )
    assert [(request.after, request.delay_s) for request in requests] == [(-1, 0), (0, 2), (0, 2), (1, 1)]
    assert [request.joins for request in requests] == [(), (), (), (2,)]


def graph(write, *calls):
    """(requests waited for, delay) of each request of a session, in order of their begin."""
    requests = load(write, session(*calls), arrivals="closed_loop")
    return [(request.predecessors, request.delay_s) for request in requests]


def test_in_a_closed_loop_a_subagents_requests_wait_for_its_own_not_for_those_of_another(write):
    """One has answers until 6 and 12, the other one, which is in between, from 7 to 9 and from 10 to 13."""
    one = subagent(4, call(0, 4, [2, 1]), call(6, 4, [2, 1]))
    other = subagent(7, call(0, 4, [3, 1]), call(3, 4, [3, 1], api_time=3.0))
    found = graph(write, call(0, 4, [1, 1]), one, other, call(14, 4, [1, 1]))
    assert found == [((), 0), ((0,), 2), ((0,), 5), ((1,), 4), ((2,), 1), ((4, 3), 1)]


def test_in_a_closed_loop_nobody_waits_for_a_subagent_that_is_still_at_work(write):
    """It works from 3 to 5 and from 13 to 15: the second request goes on without it, and the third one waits for both."""
    background = subagent(3, call(0, 4, [2, 1]), call(10, 4, [2, 1]))
    found = graph(write, call(0, 4, [1, 1]), background, call(6, 4, [1, 1]), call(20, 4, [1, 1]))
    assert found == [((), 0), ((0,), 1), ((0,), 4), ((1,), 8), ((3, 2), 5)]


def test_in_a_closed_loop_a_subagent_of_a_subagent_is_waited_for_by_the_one_that_called_it(write):
    """The inner one works from 6 to 8, the outer one, which waits for it, from 3 to 5 and from 9 to 11."""
    inner = subagent(3, call(0, 4, [3, 1]))
    outer = subagent(3, call(0, 4, [2, 1]), inner, call(6, 4, [2, 1]))
    found = graph(write, call(0, 4, [1, 1]), outer, call(12, 4, [1, 1]))
    assert found == [((), 0), ((0,), 1), ((1,), 1), ((2,), 1), ((3,), 1)]


def test_in_a_closed_loop_a_session_begins_when_the_one_before_it_in_its_lane_has_ended(write):
    overlapping = session(call(0, 4, [1, 1], api_time=9.0), call(1, 4, [1, 1]))
    requests = load(write, overlapping, session(call(3, 4, [1, 1])), concurrent_sessions=1, arrivals="closed_loop")
    assert [(request.after, request.delay_s, request.arrival_s) for request in requests] == [(-1, 0, 0), (-1, 0, 1), (0, 3, 12)]


def test_a_request_without_a_recorded_duration_counts_as_answered_at_once(write):
    first = {"t": 0, "in": 4, "out": 7, "hash_ids_rle": [1, 1]}
    requests = load(write, session(first, call(5, 4, [1, 1])), arrivals="closed_loop")
    assert (requests[1].after, requests[1].delay_s) == (0, 5)


def test_a_prompt_shorter_than_a_block_has_no_page(write):
    (request,) = load(write, session(call(0, 3, [])))
    assert (request.runs, request.prompt_pages) == ((), 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (session(), "requests is empty: this agent has no requests"),
        (session(subagent(0)), "requests is empty: this subagent has no requests"),
        ({"id": "x"}, "requests is missing"),
        (session(block_size=32), "block_size is 32, but block_tokens is 4"),
        (session(call(5, 4, [1, 1]), call(4, 4, [1, 1])), "t must not decrease: 4 s after 5 s"),
        (session(call(-1, 4, [1, 1])), "t must be 0 or more, not -1"),
        (session(call(0, 4, [1, 1], api_time=-2)), "api_time must be 0 or more, not -2"),
        (session(call(0, 0, [])), "in must be at least 1, not 0"),
        (session(call(0, 4, [1, 1], out=-1)), "out must be 0 or more, not -1"),
        (session({"t": 0, "in": 4, "out": 1}), "hash_ids is missing"),
        (session(call(0, 8, [1, 1])), "a request has 1 block ids, but in=8 takes 2 full blocks of 4 tokens"),
        (session(call(0, 4, [1, 2])), "a request has 2 block ids, but in=4 takes 1 full blocks of 4 tokens"),
        (session(call(0, 4, [1])), "hash_ids_rle must contain pairs"),
        (session(call(0, 4, [1, 1, 5, 0])), "hash_ids_rle must contain pairs"),
        (session(call(0, 4, [-1, 1])), "hash_ids_rle must be a list of non-negative integers"),
        (session(7), "expected a JSON object, not 7"),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    path = write(session(call(0, 4, [1, 1])), bad)
    with pytest.raises(TraceError) as caught:
        Weka(path=path, block_tokens=4).load(4)
    assert str(caught.value).startswith(f"{path}:2: {message}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arrivals": "sometimes"}, "arrivals must be one of recorded, closed_loop, not 'sometimes'"),
        ({"concurrent_sessions": 0}, "concurrent_sessions must be at least 1, not 0"),
        ({"block_tokens": 0}, "block_tokens must be at least 1, not 0"),
        ({"arrivals": "closed_loop", "rate": 2.0}, "rate=2.0 has no effect in a closed loop"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Weka(path="trace.jsonl", **settings)


def test_a_page_size_that_does_not_fit_is_refused_before_the_file_is_read():
    with pytest.raises(UsageError, match="page_tokens=48 does not fit the trace's blocks of 64 tokens"):
        Weka(path="absent.jsonl").load(48)


# --- whole traces ---


def test_in_a_closed_loop_all_requests_but_the_first_of_each_lane_wait(write):
    """Forty sessions of one to six calls, some with a subagent of its own, in eight lanes."""
    lines = []
    for number in range(40):
        calls = [call(3 * turn, 4 * (turn + 1), [0, 1, 100 * number, turn] if turn else [0, 1]) for turn in range(1 + number % 6)]
        lines.append(session(*calls, *[subagent(20, call(0, 8, [0, 2]))] * (number % 3 == 0)))
    requests = load(write, *lines, arrivals="closed_loop", concurrent_sessions=8)
    waiting = [request for request in requests if request.after >= 0]
    assert len(requests) - len(waiting) == 8
    assert all(request.after < request.index and request.delay_s >= 0 for request in waiting)


@pytest.mark.long
def test_the_real_sessions_have_their_published_statistics(shared, record_property):
    begin = perf_counter()
    trace = Weka(path=str(shared / "traces" / "weka_claude_code_traces_rle.jsonl.gz")).load(64)
    record_property("load_s", perf_counter() - begin)
    record_property("peak_kib_of_the_process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    numbers = trace_statistics(trace)
    assert (numbers["requests"], numbers["sessions"]) == (49_334, 710)
    assert round(numbers["pages"] / 1e6, 1) == 94.3
    assert round(numbers["unique_pages"] / 1e6, 2) == 3.45
    assert round(numbers["page_hit_rate"], 6) == 0.963409
