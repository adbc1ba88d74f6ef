"""trace.tokenizer=bytes: about four bytes a token, without a file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.trace.byte_tokens import NOTE, ByteTokenizer
from kvsim.trace.openai import OpenAI

ASK = {"role": "user", "content": "What is the weather like today?"}
ANSWER = {"role": "assistant", "content": "It rains, as it always does in autumn."}
MORE = {"role": "user", "content": "And tomorrow?"}


def load(write, *lines, **settings):
    return OpenAI(path=write(*lines), tokenizer="bytes", **settings).load(2)


def test_four_bytes_are_a_token():
    tokens = ByteTokenizer().encode("abcdefgh é")
    assert tokens == [int.from_bytes(b"abcd", "little"), int.from_bytes(b"efgh", "little")]
    assert len(ByteTokenizer().encode("é€")) == 1  # 5 bytes
    assert len(ByteTokenizer().encode("a")) == 1
    assert ByteTokenizer().encode("") == []


@given(st.text(min_size=4), st.text(min_size=1), st.text())
def test_an_answer_goes_on_where_its_prompt_ends(prompt, answer, more):
    """Tokens of prompt and answer are those of the whole text, as far as it goes."""
    tokenizer = ByteTokenizer()
    begun = tokenizer.encode(prompt)
    whole = tokenizer.encode(prompt + answer + more)
    told = begun + tokenizer.encode_answer(prompt, answer)
    size = len((prompt + answer).encode()) // 4
    assert told[:size] == whole[:size]


def test_a_conversation_shares_what_it_repeats(write):
    trace = load(write, {"messages": [ASK, ANSWER, MORE, ANSWER]})
    first, second = trace.requests
    text = "user\nWhat is the weather like today?\nassistant\n"
    assert first.prompt_tokens == len(text) // 4
    assert first.output_tokens == (len(text) + len(ANSWER["content"])) // 4 - len(text) // 4 + 1
    pages = [page for start, count in (*first.runs, *first.output_runs) for page in range(start, start + count)]
    again = [page for start, count in second.runs for page in range(start, start + count)]
    assert again[: len(pages)] == pages
    assert len(pages) == (len(text) + len(ANSWER["content"])) // 8


def test_results_say_that_tokens_are_estimates(write, tmp_path, capsys):
    path = write({"messages": [ASK, ANSWER, MORE]})
    overrides = [f"trace.path={path}", "trace.tokenizer=bytes", "tiers.gpu.capacity=100pages", f"output={tmp_path / 'run'}"]
    assert main(["replay", *overrides]) == 0
    assert NOTE in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["trace_note"] == NOTE
    assert "tokens are estimates" in (tmp_path / "run" / "report.html").read_text()


def test_without_a_tokenizer_it_is_offered(write):
    with pytest.raises(UsageError, match=r"trace\.tokenizer=bytes for a first look, at about 4 bytes a token"):
        OpenAI(path=write({"messages": [ASK]})).load(2)
