"""Traces in Mooncake's format."""

import pytest

from kvsim.errors import TraceError
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.statistics import trace_statistics
from tests.workloads import long_conversations, write_trace


def line(tokens, ids, timestamp=0, **more):
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 9, "hash_ids": ids, **more}


def runs(write, *lines, page_tokens=4, **settings):
    trace = Mooncake(path=write(*lines), block_tokens=4, **settings).load(page_tokens)
    assert [request.index for request in trace.requests] == list(range(len(lines)))
    assert all(request.prompt_pages == sum(pages for _, pages in request.runs) for request in trace.requests)
    return [request.runs for request in trace.requests]


def test_a_line_is_a_request(write):
    path = write(line(10, [0, 1, 2], timestamp=1000), line(4, [0], timestamp=2500), name="tiny.jsonl.gz")
    trace = Mooncake(path=path, block_tokens=4).load(2)
    request = trace.requests[1]
    assert (trace.name, trace.block_tokens, trace.page_tokens) == ("tiny.jsonl.gz", 4, 2)
    assert (request.index, request.arrival_s, request.prompt_tokens, request.output_tokens) == (1, 1.5, 4, 9)
    assert (request.runs, request.prompt_pages, request.after, request.session) == (((0, 2),), 2, -1, -1)


def test_a_line_may_have_a_priority(write):
    path = write(line(4, [0], priority=3), line(4, [0]), line(4, [0], priority=-1))
    assert [request.priority for request in Mooncake(path=path, block_tokens=4).load(4).requests] == [3, 0, -1]


def test_a_line_needs_only_a_prompt(write):
    request = (
        Mooncake(path=write({"block_size": 4, "hash_ids": [2001, 2002], "input_length": 8}), block_tokens=4).load(4).requests[0]
    )
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens, request.runs) == (0.0, 8, 1, ((0, 2),))


def test_dynamo_has_other_names_for_some_fields(write):
    fields = {"session_id": "a", "input_tokens": 8, "output_tokens": 3, "hash_ids": [1, 2]}
    path = write({**fields, "created_time": 100}, {**fields, "delay_ms": 250})
    requests = Mooncake(path=path, block_tokens=4).load(4).requests
    assert [(r.arrival_s, r.after, r.delay_s, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0.0, -1, 0.0, 8, 3),
        (0.25, 0, 0.25, 8, 3),
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(0, []), "input_length must be at least 1, not 0"),
        (line(4, [0], output_length=-1), "output_length must be 0 or more, not -1"),
        (line(4, [0], block_size=64), "block_size is 64, but block_tokens is 4: set trace.block_tokens=64"),
        (line(4, [-1]), "hash_ids must be a list of non-negative integers"),
        (line(12, [0, 1]), "hash_ids has 2 ids, but input_length=12 takes 3 blocks of 4 tokens"),
        (line(4, [0], priority="high"), 'priority must be a whole number, not "high"'),
        (line(4, [0], timestamp=-1), "timestamp must be 0 or more, not -1"),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    path = write(line(4, [0]), bad)
    with pytest.raises(TraceError) as caught:
        Mooncake(path=path, block_tokens=4).load(4)
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_a_partial_block_needs_an_id_if_it_counts(write):
    with pytest.raises(TraceError, match="hash_ids has 2 ids, but input_length=10 takes 3 blocks"):
        runs(write, line(10, [0, 1]), tail="all")


# --- whole traces ---


@pytest.fixture
def long_trace(tmp_path):
    """A trace file of long conversations, and the requests in it."""
    requests = long_conversations(requests=1_500, page_tokens=512)
    return str(write_trace(tmp_path / "conversations.jsonl.gz", requests)), requests


def test_ids_that_are_chained_and_numbered_by_appearance_are_kept(long_trace):
    path, requests = long_trace
    assert [request.runs for request in Mooncake(path=path, tail="all").load(512).requests] == [r.runs for r in requests]


def test_the_conversation_trace_has_its_published_statistics(shared):
    path = str(shared / "traces" / "mooncake_conversation_trace.jsonl.gz")
    numbers = trace_statistics(Mooncake(path=path, tail="all").load(512))
    assert (numbers["requests"], numbers["pages"], numbers["unique_pages"]) == (12_031, 288_500, 182_790)
    assert round(numbers["page_hit_rate"], 6) == 0.366412
    assert round(numbers["hit_rate"], 6) == 0.373624
    assert (round(numbers["prompt_tokens_mean"]), round(numbers["output_tokens_mean"])) == (12_035, 343)
    assert round(numbers["duration_s"]) == 3_537
