"""Prompts in memory are the trace that a file of the same content is."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.core.request import Request
from kvsim.errors import UsageError

PROMPTS = [list(range(40)), [*range(40), 7, 8, 9], [1, 2, 3], [*range(40), 7, 8, 9, 5, 5]]
ANSWERS = [[7, 8, 9], [5, 5], [4], [6]]
ARRIVALS_S = [10.0, 10.1, 12.25, 13.0]
SESSIONS = ["a", "a", "b", "a"]


def described(requests: list[Request]) -> list[dict[str, Any]]:
    return [{field.name: repr(getattr(request, field.name)) for field in fields(Request)} for request in requests]


def test_it_equals_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "token_ids": prompt,
            "output_length": len(answer),
            "output_token_ids": answer,
            "timestamp": 1000 * at,
            "session_id": name,
        }
        for prompt, answer, at, name in zip(PROMPTS, ANSWERS, ARRIVALS_S, SESSIONS, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    read = kvsim.load_trace("tokens", path=path, page_tokens=4)
    made = kvsim.trace_from_tokens(
        [np.array(PROMPTS[0]), tuple(PROMPTS[1]), *PROMPTS[2:]],
        answers=ANSWERS, arrivals_s=ARRIVALS_S, sessions=SESSIONS, page_tokens=4,
    )  # fmt: skip
    assert described(made.requests) == described(read.requests)
    settings = ("tiers.gpu.capacity=20pages", "rules.cache_output=true")
    one, other = (kvsim.replay(trace, *settings) for trace in (read, made))
    assert (one.hit_pages == other.hit_pages).all() and one.hit_rate > 0


def test_without_times_and_answers_there_are_defaults() -> None:
    trace = kvsim.trace_from_tokens(PROMPTS, output_tokens=5, page_tokens=4, name="mine")
    assert {(request.arrival_s, request.output_tokens, request.output_runs) for request in trace.requests} == {(0.0, 5, None)}
    assert trace.name == "mine"
    assert [request.output_tokens for request in kvsim.trace_from_tokens(PROMPTS).requests] == [1] * 4


def test_different_prompts_are_different_traces() -> None:
    hashes = {
        kvsim.replay(kvsim.trace_from_tokens(prompts), "tiers.gpu.capacity=100pages").record["config_hash"]
        for prompts in (PROMPTS, PROMPTS[:3], PROMPTS)
    }
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": [[1], [1.5]]}, ":2: token_ids must be a list of non-negative integers"),
        ({"prompts": [[1]], "answers": [[1]], "output_tokens": 2}, "output_tokens follows from answers"),
        ({"prompts": [[1]], "sessions": [1, 2]}, "sessions has 2 entries, but there are 1 prompts"),
        ({"prompts": [[1], [2]], "arrivals_s": [2, 1]}, ":2: timestamps must not decrease"),
    ],
)
def test_mistakes_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.trace_from_tokens(**arguments)
