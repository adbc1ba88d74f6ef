"""Logs of proxies in front of OpenAI's API."""

import json

import pytest

from kvsim.errors import TraceError
from kvsim.trace.formats import recognise
from kvsim.trace.proxy_log import ProxyLog
from kvsim.trace.tokenizer import Tokenizer
from tests.trace.models import make_model
from tests.workloads import pages_of

ASK = [{"role": "user", "content": "What is the weather like today?"}]
REST = [{"role": "assistant", "content": "It rains."}, {"role": "user", "content": "And tomorrow?"}]


def response(content, completion_tokens=9, **more):
    """A response as OpenAI documents it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 20, "completion_tokens": completion_tokens, "total_tokens": 29}
    return {"id": "c", "object": "chat.completion", "created": 1700000000, "choices": [choice], "usage": usage, **more}


def row(timestamp, messages=ASK, answer=None, **more):
    return {"timestamp": timestamp, "request": {"model": "m", "messages": messages}, "response": answer or response("It rains."),
            **more}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def load(write, model, *rows, **settings):
    return ProxyLog(path=write(*rows), tokenizer=model, **settings).load(4).requests


def test_a_row_is_a_request_with_the_tokens_of_its_answer(write, model):
    later = row("2023-11-14T22:13:22Z", [*ASK, *REST], response("As always."))
    path = write(later, row("2023-11-14 23:13:20+01:00"))
    assert recognise(path)[0].name == "proxy_log"
    first, second = ProxyLog(path=path, tokenizer=model).load(4).requests
    tokenizer = Tokenizer(model)
    prompt = tokenizer.render(ASK)
    tokenizer.encode_all([prompt, "It rains."])
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.0)
    assert first.prompt_tokens == len(tokenizer.encode(prompt))
    assert first.output_tokens == len(tokenizer.encode("It rains.")) + 1
    shared = (first.prompt_tokens + first.output_tokens - 1) // 4
    pages, again = pages_of((*first.runs, *first.output_runs)), pages_of(second.runs)
    assert len(pages) == shared
    assert again[:shared] == pages  # the second prompt continues the first one and its answer


@pytest.mark.parametrize(
    "times", [(1700000000, 1700000002), (1700000000000, 1700000002000), ("2023-11-14T22:13:20", "2023-11-14T22:13:22")]
)
def test_a_time_is_a_date_or_a_unix_time(write, model, times):
    assert [request.arrival_s for request in load(write, model, *map(row, times))] == [0.0, 2.0]


def test_without_a_time_that_of_the_response_counts(write, model):
    rows = [{**row(None), "response": response("It rains.", created=1700000000 + at)} for at in (5, 0)]
    assert [request.arrival_s for request in load(write, model, *rows)] == [0.0, 5.0]


def test_litellm_s_rows_and_texts_of_json_are_read(write, model):
    rows = [
        {"startTime": 1700000000.5, "messages": ASK, "response": response("It rains.")},
        {"startTime": 1700000001.0, "request": json.dumps({"messages": ASK}), "response": json.dumps(response("It rains."))},
        {"startTime": 1700000001.5, "request": {"method": "POST", "body": {"messages": ASK}},
         "response": {"status_code": 200, "body": response("It rains.")}},
    ]  # fmt: skip
    requests = load(write, model, *rows)
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 1.0]
    assert len({(request.runs, request.output_tokens) for request in requests}) == 1


@pytest.mark.parametrize(
    ("answer", "length", "samples"),
    [
        (response(None), 9, 1),
        (response("It rains.", usage={"completion_tokens": 30, "completion_tokens_details": {"reasoning_tokens": 25}}), 30, 1),
        (response("", choices=[{"message": {"content": "a"}}, {"message": {"content": "b"}}]), 5, 2),
        ({"choices": []}, 1, 1),
    ],
)  # fmt: skip
def test_without_the_text_of_all_that_was_generated_usage_tells_the_length(write, model, answer, length, samples):
    (request,) = load(write, model, row(1700000000, answer=answer))
    assert (request.output_tokens, request.samples, request.output_runs) == (length, samples, None)


def test_failed_requests_are_left_out(write, model):
    failed = [row(1700000000, answer={"error": {"message": "rate limit"}}), row(1700000000, answer={"status_code": 503})]
    assert len(load(write, model, *failed, row(1700000001))) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("2023-14-01"), "timestamp must be a date such as 2023-11-16 18:15:46.68, not"),
        (row("soon"), 'timestamp must be a number of at least 0, not "soon"'),
        (row(1, request="{"), "request must be a JSON object or the text of one"),
        (row(1, request={"model": "m"}), "messages is missing"),
        (row(1, response=[1]), "response must be a JSON object, not"),
    ],
)
def test_a_bad_row_is_named(write, model, bad, message):
    with pytest.raises(TraceError, match=f":1: {message}"):
        load(write, model, bad)
