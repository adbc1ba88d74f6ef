"""Traces that hold the tokens themselves."""

import pytest

from kvsim.errors import TraceError, UsageError
from kvsim.trace.tokens import Tokens


def line(tokens, **more):
    return {"token_ids": tokens, "output_length": 3, **more}


def runs(write, *lines, page_tokens=2, **settings):
    return [request.runs for request in Tokens(path=write(*lines), **settings).load(page_tokens).requests]


def test_prompts_that_begin_alike_share_pages(write):
    lines = line([1, 2, 3, 4, 5]), line([1, 2, 9, 4]), line([1, 2, 3, 4, 5, 6])
    assert runs(write, *lines) == [((0, 2),), ((0, 1), (2, 1)), ((0, 2), (3, 1))]


def test_a_line_is_a_request(write):
    path = write(line([1], timestamp=10), line([1, 2, 3], timestamp=2010, session_id="a"), name="tiny.jsonl.gz")
    trace = Tokens(path=path).load(2)
    request = trace.requests[1]
    assert (trace.name, trace.block_tokens, trace.page_tokens) == ("tiny.jsonl.gz", None, 2)
    assert (request.index, request.arrival_s, request.prompt_tokens, request.output_tokens) == (1, 2.0, 3, 3)
    assert (request.prompt_pages, request.session, request.turn) == (1, 0, 0)


def test_timestamps_are_optional(write):
    requests = Tokens(path=write(line([1]), line([2]))).load(2).requests
    assert [request.arrival_s for request in requests] == [0, 0]
    with pytest.raises(UsageError, match=r"rate=2\.0 has no effect on a file without timestamps"):
        Tokens(path=write(line([1])), rate=2.0).load(2)


def test_tenants_and_adapters_share_nothing(write):
    tokens = [1, 2]
    lines = line(tokens), line(tokens, tenant="a"), line(tokens, lora="a"), line(tokens, lora=7), line(tokens, tenant="a")
    assert runs(write, *lines) == [((0, 1),), ((1, 1),), ((2, 1),), ((3, 1),), ((1, 1),)]


def test_a_tenant_is_known_by_its_name(write):
    trace = Tokens(path=write(line([1, 2], tenant="a"), line([1, 2], tenant=7), line([1, 2]))).load(2)
    assert [request.tenant for request in trace.requests] == ["a", "7", ""]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"output_length": 1}, "token_ids is missing"),
        (line([]), "token_ids is empty; a request must have a prompt"),
        (line([1, -2]), "token_ids must be a list of non-negative integers"),
        (line([1.5]), "token_ids must be a list of non-negative integers"),
        (line([1 << 70]), "tokens must lie in 0 ... 2**63 - 1"),
        (line([1], tenant=1.5), "tenant must be a string or an integer"),
        (line([1], multimodal=[[0, 1]]), "multimodal must be a list of [start, stop, hash]"),
        (line([1], multimodal=[[0, 1, None]]), "multimodal must be a list of [start, stop, hash]"),
        (line([1], multimodal=[[0, 2, "cat"]]), "a span must lie within the prompt of 1 tokens, not at 0 ... 2"),
        (
            line([1, 2], multimodal=[[1, 2, "cat"], [0, 2, 7]]),
            "multimodal must not overlap: one begins at token 1, before another",
        ),
        (line([1], priority=10**30), "priority must be within 64 bits, not 1000"),
        (line([1], timestamp=1), "this line has a timestamp but an earlier one has none"),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    path = write(line([1]), bad)
    with pytest.raises(TraceError) as caught:
        Tokens(path=path).load(2)
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_the_pages_of_an_answer_go_on_with_the_prompts_without_its_last_token(write):
    first = line([1, 2, 3], output_token_ids=[4, 5, 6])
    follow_up = line([1, 2, 3, 4, 5, 6, 7, 8], output_token_ids=[9, 9, 9])
    one, other = Tokens(path=write(first, follow_up)).load(2).requests
    assert (one.runs, one.output_runs) == (((0, 1),), ((1, 1),))  # [1 2] and [3 4]; 5 stands alone, 6 has no KV
    assert (other.runs, other.output_runs) == (((0, 4),), ((4, 1),))
    assert Tokens(path=write(line([1, 2, 3]))).load(2).requests[0].output_runs is None


def test_an_answer_has_as_many_tokens_as_it_says(write):
    with pytest.raises(TraceError, match="output_token_ids has 1 tokens, but output_length is 3"):
        Tokens(path=write(line([1], output_token_ids=[2]))).load(2)


def test_prompts_may_be_persistent(write):
    requests = Tokens(path=write(line([1], persistent=True), line([2]), line([3], persistent=False))).load(2).requests
    assert [request.persistent for request in requests] == [True, False, False]
    with pytest.raises(TraceError, match="persistent must be true or false, not 1"):
        Tokens(path=write(line([1], persistent=1))).load(2)
