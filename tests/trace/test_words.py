"""Prompts written out in the configuration."""

import json
from pathlib import Path

import pytest

from kvsim.trace.tokens import Tokens
from kvsim.trace.words import Words

PROMPTS = ["a b c d e", "a b c x", "a b"]


def test_equal_beginnings_are_equal_pages() -> None:
    trace = Words(prompts=PROMPTS, output_tokens=3).load(1)
    assert [request.runs for request in trace.requests] == [((0, 5),), ((0, 3), (5, 1)), ((0, 2),)]
    assert [request.prompt_tokens for request in trace.requests] == [5, 4, 2]
    assert [request.arrival_s for request in trace.requests] == [0.0, 1.0, 2.0]
    assert {request.output_tokens for request in trace.requests} == {3}


def test_pages_are_full_unless_tails_count() -> None:
    full, whole = (Words(prompts=PROMPTS, tail=tail).load(2).requests for tail in ("full", "all"))
    assert [request.prompt_pages for request in full] == [2, 2, 1]
    assert [request.prompt_pages for request in whole] == [3, 2, 1]


def test_limit_and_rate() -> None:
    trace = Words(prompts=PROMPTS, limit=2, rate=4.0).load(1)
    assert [request.arrival_s for request in trace.requests] == [0.0, 0.25]


def test_pages_are_named_by_their_words() -> None:
    assert Words(prompts=PROMPTS).page_names(1) == dict(enumerate("abcdex"))
    assert Words(prompts=PROMPTS, tail="all").page_names(2) == {0: "a b", 1: "c d", 2: "e", 3: "c x"}


def test_pages_of_a_file_of_tokens_are_named_by_their_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2, "token_ids": [7, 8, 9], "output_length": 1},
        {"timestamp": 3, "token_ids": [7, 5], "output_length": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    source = Tokens(path=str(path))
    assert [request.runs for request in source.load(1).requests] == [((0, 3),), ((0, 1), (3, 1))]
    assert source.page_names(1) == {0: "7", 1: "8", 2: "9", 3: "5"}


@pytest.mark.parametrize("prompts", [[], ["a", " "]])
def test_every_prompt_has_a_word(prompts: list[str]) -> None:
    with pytest.raises(ValueError, match="prompts must be a list of texts with at least one word each"):
        Words(prompts=prompts)


def test_answers_have_no_negative_length() -> None:
    with pytest.raises(ValueError, match="output_tokens must be from 0 to 16777216, not -1; max_tokens sets the most"):
        Words(prompts=PROMPTS, output_tokens=-1)
