"""Sessions whose later lines list only what is new, against prompts put together token by token."""

import random

import pytest

from kvsim.errors import TraceError, UsageError
from kvsim.pages.extents import count_pages
from kvsim.trace.formats import recognise
from kvsim.trace.mooncake import Mooncake


def spelled(lines, block_tokens):
    """The tokens of each prompt, and of prompt and answer, written out; answers and prompts without ids are their own."""
    texts = {}
    for own, line in enumerate(lines):
        history = texts.get(line.get("session_id"), [])
        if "hash_ids" in line:
            added = [(block, at) for block in line["hash_ids"] for at in range(block_tokens)][: line["input_length"]]
        else:
            added = [("own", own, at) for at in range(line["input_length"])]
        prompt = history + added
        whole = prompt + [("answer", own, at) for at in range(line["output_length"])]
        if "session_id" in line:
            texts[line["session_id"]] = whole
        yield prompt, whole


def pages_of(extents):
    return [start + at for start, length in extents for at in range(length)]


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 8])
def test_prompts_are_put_together_as_if_token_by_token(write, page_tokens):
    rng = random.Random(page_tokens)
    lines = []
    for number in range(120):
        tokens = rng.randrange(1, 14)
        line = {"timestamp": number, "input_length": tokens, "output_length": rng.randrange(0, 9)}
        if rng.random() < 0.8:
            line["session_id"] = rng.randrange(12)
        if rng.random() < 0.7:
            line["hash_ids"] = [rng.randrange(3) + 10 * at for at in range(-(-tokens // 4))]
        lines.append(line)
    requests = Mooncake(path=write(*lines), block_tokens=4, turns="deltas").load(page_tokens).requests
    known: dict[tuple, int] = {}
    for request, (prompt, whole) in zip(requests, spelled(lines, 4), strict=True):
        assert request.prompt_tokens == len(prompt)
        path = pages_of(request.runs) + pages_of(request.output_runs)
        ends = range(page_tokens, max(len(whole) - 1, len(prompt)) + 1, page_tokens)
        assert len(path) == len(ends) and count_pages(request.runs) == request.prompt_pages == len(prompt) // page_tokens
        assert path == [known.setdefault(tuple(whole[:end]), page) for end, page in zip(ends, path, strict=True)]
    assert len(set(known.values())) == len(known)


def test_a_session_without_ids_is_known_from_itself(write):
    """AIPerf's sessions by length."""
    path = write(
        {"session_id": "abc", "input_length": 300, "output_length": 40},
        {"session_id": "abc", "delay": 2, "input_length": 150, "output_length": 20},
    )
    assert recognise(path)[0].name == "mooncake"
    first, second = Mooncake(path=path, turns="deltas").load(10).requests
    assert (second.prompt_tokens, second.after, second.delay_s) == (490, 0, 0.002)
    assert pages_of(second.runs)[:33] == (pages_of(first.runs) + pages_of(first.output_runs))[:33]
    with pytest.raises(TraceError, match="hash_ids is missing"):
        Mooncake(path=path).load(16)


@pytest.mark.parametrize(
    ("mode", "turns", "is_right"),
    [
        ("deltas_without_responses", "deltas", True),
        ("message_array_with_responses", "whole", True),
        ("deltas_without_responses", "whole", False),
        ("message_array_with_responses", "deltas", False),
    ],
)
def test_aiperfs_context_mode_must_agree(write, mode, turns, is_right):
    path = write({"session_id": 1, "input_length": 4, "output_length": 1, "hash_ids": [1], "context_mode": mode})
    source = Mooncake(path=path, block_tokens=4, turns=turns)
    if is_right:
        assert source.load(4).requests[0].prompt_pages == 1
    else:
        with pytest.raises(TraceError, match=f'context_mode is "{mode}", but turns={turns}'):
            source.load(4)


def test_what_deltas_do_not_know_is_refused(write):
    with pytest.raises(ValueError, match="answers=unique has no effect with turns=deltas"):
        Mooncake(path="x", turns="deltas", answers="unique")
    with pytest.raises(TraceError, match="n is not supported with turns=deltas"):
        Mooncake(path=write({"input_length": 4, "n": 2}), turns="deltas").load(4)
    with pytest.raises(UsageError, match="page_tokens must be at least 1"):
        Mooncake(path="x", turns="deltas").load(0)
