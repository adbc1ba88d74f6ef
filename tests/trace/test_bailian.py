"""Traces in Qwen-Bailian's format."""

import pytest

from kvsim.errors import TraceError
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.workload_aware import WorkloadAware
from kvsim.trace.bailian import Bailian


def line(chat, tokens, ids, *, parent=-1, timestamp=0.0, kind="text", turn=1, **more):
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": 7,
        "type": kind,
        "turn": turn,
        "hash_ids": ids,
        **more,
    }


def load(write, *lines, page_tokens=16, **settings):
    return Bailian(path=write(*lines), **settings).load(page_tokens).requests


def test_a_line_is_a_request(write):
    path = write(line(5, 40, [3, 4, 9], timestamp=61.5), line(9, 32, [3, 4], timestamp=63.0, kind="search"), name="tiny.jsonl.gz")
    trace = Bailian(path=path).load(16)
    first, second = trace.requests
    assert (trace.name, trace.block_tokens, trace.page_tokens) == ("tiny.jsonl.gz", 16, 16)
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens, first.prompt_pages) == (0.0, 40, 7, 2)
    assert (second.arrival_s, second.kind, second.runs, second.after) == (1.5, "search", ((0, 2),), -1)


def test_turns_of_a_chat_are_one_session(write):
    requests = load(
        write,
        line(1, 16, [0]),
        line(2, 16, [1], timestamp=1.0),
        line(3, 32, [0, 2], parent=1, timestamp=2.0, turn=2),
        line(4, 48, [0, 2, 3], parent=3, timestamp=3.0, turn=3),
        line(5, 16, [4], parent=77, timestamp=4.0, turn=6),
    )
    sessions = [request.session for request in requests]
    assert sessions[0] == sessions[2] == sessions[3]
    assert len({sessions[0], sessions[1], sessions[4]}) == 3
    assert [request.turn for request in requests] == [0, 0, 1, 2, 5]


def test_lines_are_sorted_by_arrival(write):
    requests = load(
        write, line(1, 16, [0], timestamp=8.0), line(2, 16, [1], timestamp=5.0), line(3, 16, [2], timestamp=6.0), rate=2.0
    )
    assert [(request.index, request.arrival_s, request.session) for request in requests] == [
        (0, 0.0, 1),
        (1, 0.5, 2),
        (2, 1.5, 0),
    ]


def test_it_has_what_the_workload_aware_policy_needs(write):
    requests = load(write, line(1, 16, [0]), line(2, 32, [0, 1], parent=1, turn=2))
    WorkloadAware().bind(PolicyContext(requests=requests))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(1, 16, [0]), "chat_id 1 already belongs to an earlier line"),
        (line(2.5, 16, [0]), "chat_id must be a string or an integer"),
        (line(2, 16, [0], parent=None), "parent_chat_id must be a string or an integer"),
        (line(2, 64, [0, 1]), "hash_ids has 2 ids, but input_length=64 takes 4 blocks of 16 tokens"),
        (line(2, 16, [0], turn=0), "turn must be at least 1, not 0"),
        (line(2, 16, [0], kind=None), "type must be a string or an integer"),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    path = write(line(1, 16, [0]), bad)
    with pytest.raises(TraceError) as caught:
        Bailian(path=path).load(16)
    assert str(caught.value).startswith(f"{path}:2: {message}")
