"""What an answer says is read on its way, however it is cut, and nothing in it can make the reader fail."""

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.shadow.sources import answers
from kvsim.shadow.sources.answers import AnswerReader

SSE = "text/event-stream; charset=utf-8"
USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def events(*contents: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in contents) + b"data: [DONE]\n\n"


def read(data: bytes, kind: str = SSE, encoding: str = "", *, cuts: list[int] | None = None) -> AnswerReader:
    """Read an answer that comes in pieces."""
    reader, begin = AnswerReader(kind, encoding), 0
    for cut in [*sorted(cuts or []), len(data)]:
        reader.feed(data[begin:cut])
        begin = max(begin, cut)
    reader.end()
    return reader


def told(reader: AnswerReader) -> tuple[Any, ...]:
    return reader.text, reader.token_ids, reader.prompt_tokens, reader.output_tokens, reader.cached_tokens


COMPLETION = events(
    {"choices": [{"index": 0, "text": " a", "token_ids": [5]}]},
    {"choices": [{"index": 1, "text": " other"}]},
    {"choices": [{"index": 0, "text": " b", "token_ids": [6, 7]}]},
    {"choices": [], "usage": USAGE},
)


@given(st.lists(st.integers(0, len(COMPLETION)), max_size=10))
def test_a_stream_is_read_however_it_is_cut(cuts: list[int]) -> None:
    assert told(read(COMPLETION, cuts=cuts)) == (" a b", [5, 6, 7], 40, 3, 16)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)])
def test_a_compressed_answer_is_read(encoding: str, pack: Any) -> None:
    assert told(read(pack(COMPLETION), encoding=encoding, cuts=[3, 50])) == (" a b", [5, 6, 7], 40, 3, 16)


def test_an_encoding_that_is_not_known_leaves_the_answer_unknown() -> None:
    assert told(read(COMPLETION, encoding="br")) == (None, [], None, 0, None)
    assert told(read(b"not gzip", encoding="gzip")) == (None, [], None, 0, None)


def test_an_answer_in_one_piece_is_read() -> None:
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Yes."}}], "usage": USAGE}).encode()
    assert told(read(body, "application/json", cuts=[7])) == ("Yes.", [], 40, 3, 16)


def test_tokens_are_counted_where_the_server_does_not_say() -> None:
    reader = read(events(*({"choices": [{"delta": {"content": text}}]} for text in ("", "a", "b"))))
    assert told(reader) == ("ab", [], None, 2, None) and reader.has_begun


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
def test_what_no_later_prompt_has_like_this_is_not_known(field: str) -> None:
    reader = read(
        events({"choices": [{"delta": {field: [{"a": 1}]}}]}, {"choices": [{"delta": {"content": "a"}}], "usage": USAGE})
    )
    assert reader.text is None


def meta(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 9, "completion_tokens": tokens, "cached_tokens": 4}


@pytest.mark.parametrize("is_whole", [True, False])
def test_sglangs_stream_repeats_the_answer_so_far_or_adds_to_it(is_whole: bool) -> None:
    texts, ids = (["a", "ab", "abc"], [[1], [1, 2], [1, 2, 3]]) if is_whole else (["a", "b", "c"], [[1], [2], [3]])
    stream = events(
        *(
            {"text": text, "output_ids": one, "meta_info": meta(at + 1)}
            for at, (text, one) in enumerate(zip(texts, ids, strict=True))
        )
    )
    assert told(read(stream)) == ("abc", [1, 2, 3], 9, 3, 4)


def test_of_several_answers_of_sglang_the_first_is_read() -> None:
    both = [{"text": text, "output_ids": ids, "meta_info": meta(2)} for text, ids in (("ab", [1, 2]), ("xy", [8, 9]))]
    whole = read(json.dumps(both).encode(), "application/json")
    assert told(whole) == ("ab", [1, 2], 9, 2, 4) and whole.has_begun
    stream = [
        {"index": index, "text": text, "output_ids": ids, "meta_info": meta(len(ids))}
        for index, text, ids in ((1, "x", [8]), (0, "a", [1]), (0, "ab", [1, 2]), (1, "xyz", [8, 9, 7]))
    ]
    assert told(read(events(*stream))) == ("ab", [1, 2], 9, 2, 4)
    assert read(events(stream[0])).has_begun


def test_of_several_answers_whose_sum_is_told_one_is_the_mean() -> None:
    choices = [{"index": index, "text": "a"} for index in range(3)]
    body = {"choices": choices, "usage": {"prompt_tokens": 40, "completion_tokens": 24}}
    assert told(read(json.dumps(body).encode(), "application/json")) == ("a", [], 40, 8, None)
    assert told(read(events(*({"choices": [one]} for one in choices), {"choices": [], "usage": body["usage"]})))[3] == 8


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
def test_an_answer_without_text_has_begun_and_its_tokens_are_known(field: str) -> None:
    reader = read(
        events({"choices": [{"delta": {"content": None, field: [{"a": 1}]}}]}, {"choices": [], "usage": USAGE}),
        cuts=[30],
    )
    assert reader.has_begun and told(reader) == (None, [], 40, 3, 16)


def test_an_answer_that_is_an_error_has_not_begun() -> None:
    reader = read(events({"error": {"message": "too long"}}))
    assert reader.has_failed and not reader.has_begun


def test_a_line_that_never_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LONGEST_BYTES", 100)
    reader = AnswerReader(SSE)
    for _ in range(50):
        reader.feed(b"data: " + b"x" * 40)
    assert len(reader._begun) <= 100 and reader.text is None


@given(st.binary(max_size=200), st.sampled_from([SSE, "application/json", ""]), st.sampled_from(["", "gzip", "br"]))
def test_bytes_that_are_no_answer_are_no_error(data: bytes, kind: str, encoding: str) -> None:
    for content in (data, b"data: " + data + b"\n\n", b'data: {"choices": ' + data + b"}\n"):
        reader = read(content, kind, encoding, cuts=[len(content) // 2])
        assert reader.output_tokens >= 0 and reader.cached_tokens is None
