"""Streams as servers send them, read by the client."""

import asyncio
import json

import pytest

from kvsim.servers.answer import Answer, Failed
from kvsim.servers.dialects.vllm import Vllm
from kvsim.servers.http import Http, message_of
from kvsim.servers.sender import ask
from tests.servers.stub import answering

ODD = "a\u2028\u2029\u0085"
"""Characters that end a line for Python, but not in a stream of events."""


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": None}]}, ensure_ascii=False)


def asked(stream: str) -> Answer:
    """The answer that is read from a stream."""

    async def follow(url: str) -> Answer:
        answer = Answer(8)
        async with Http(url, 5.0) as http:
            await ask(http, Vllm(), b"{}", answer, 5.0, 0.0)
        return answer

    with answering({"/v1/completions": stream}) as url:
        return asyncio.run(follow(url))


@pytest.mark.parametrize(
    "stream",
    [
        f"data: {chunk('a')}\n\ndata: {chunk('b')}\n\ndata: [DONE]\n\n",
        f"data:{chunk('a')}\r\n\r\ndata:{chunk('b')}\r\n\r\ndata:[DONE]",
        f": a comment\nevent: token\ndata: {chunk('a')}\n\nid: 7\ndata: {chunk('b')}\n\n\n\ndata: [DONE]\n",
        f"data: {chunk(ODD)}\n\ndata: {chunk(ODD)}\n\ndata: [DONE]\n\n",
    ],
    ids=["plain", "carriage returns", "other fields", "line separators in text"],
)
def test_events_are_read_however_they_are_written(stream: str) -> None:
    answer = asked(stream)
    assert answer.output_tokens == len(answer.chunk_times_s) == 2 and answer.end_s == answer.chunk_times_s[1]


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        ("", "the server ended its answer early"),
        ("data: [DONE]\n\n", "the server's answer has no token"),
        (f"data: {chunk('a')}\n\n", "the server ended its answer early"),
        ("data: {\n\n", "the server's answer cannot be read"),
    ],
)
def test_streams_that_are_no_answers_fail(stream: str, problem: str) -> None:
    with pytest.raises(Failed, match=problem):
        asked(stream)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"error": {"message": "too\\n long", "code": 400}}', "too long"),
        ('{"object": "error", "message": "no"}', "no"),
        ('{"detail": "Not Found"}', "Not Found"),
        ("<html>\n Bad  gateway</html>", "<html> Bad gateway</html>"),
        ("", "without a message"),
        ("x" * 500, "x" * 200 + "..."),
    ],
)
def test_what_an_error_says_is_one_short_line(text: str, line: str) -> None:
    assert message_of(text) == line
