"""Answers inferred from the prompts that go on from them; pages are of one token unless said otherwise."""

import json
from pathlib import Path
from random import Random

import pytest

from kvsim.api import load_trace, replay
from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.trace.answers import infer_answers
from kvsim.trace.bailian import Bailian
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.weka import Weka
from tests.workloads import make_requests, pages_of, random_word


def slow_answer(requests: list[Request], index: int, page_tokens: int) -> list[int]:
    """By looking at all later prompts, page by page."""
    request, own = requests[index], pages_of(requests[index].runs)
    most = (request.prompt_tokens + request.output_tokens - 1) // page_tokens
    for later in requests[index + 1 :]:
        theirs = pages_of(later.runs)
        if own and theirs[: len(own)] == own and len(theirs) > len(own):
            return theirs[len(own) : max(most, len(own))]
    return []


@pytest.mark.parametrize("seed", range(12))
def test_the_answers_are_those_of_comparing_all_prompts(seed: int) -> None:
    random = Random(seed)
    words = [random_word(random, "aab", longest=9) for _ in range(40)]
    requests = make_requests(words, output_tokens=random.randint(0, 4))
    infer_answers(requests, 1)
    for index, request in enumerate(requests):
        found = pages_of(request.output_runs or ())
        assert found == slow_answer(requests, index, 1)


MOONCAKE = [
    {"timestamp": 0, "input_length": 1_100, "output_length": 500, "hash_ids": [1, 2, 3]},
    {"timestamp": 1_000, "input_length": 2_100, "output_length": 50, "hash_ids": [1, 2, 4, 5, 6]},
]
WEKA = {
    "id": "a",
    "requests": [{"t": 0, "in": 140, "out": 70, "hash_ids": [1, 2]}, {"t": 1, "in": 300, "out": 9, "hash_ids": [1, 2, 3, 4]}],
}


def test_mooncake_bailian_and_weka_infer_answers_on_demand(tmp_path: Path) -> None:
    """1,100 + 500 - 1 tokens are three pages of 512; 140 + 70 - 1 are three of 64. The prompts have two each."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    first, second = Mooncake(path=str(path), answers="inferred").load(512).requests
    assert first.output_runs == (((second.runs[-1][0] + second.runs[-1][1] - 2), 1),)
    assert second.output_runs == ()
    assert all(request.output_runs is None for request in Mooncake(path=str(path)).load(512).requests)
    chats = [
        line | {"chat_id": number, "parent_chat_id": number - 1 if number else -1, "type": "text", "turn": number + 1}
        for number, line in enumerate(MOONCAKE)
    ]
    path.write_text("\n".join(map(json.dumps, chats)))
    again = Bailian(path=str(path), block_tokens=512, answers="inferred").load(512).requests
    assert [request.output_runs for request in again] == [first.output_runs, ()]
    path.write_text(json.dumps(WEKA))
    first, second = Weka(path=str(path), answers="inferred").load(64).requests
    assert (first.runs, first.output_runs, second.runs) == (((0, 2),), ((2, 1),), ((0, 4),))
    first, second = Weka(path=str(path), answers="inferred").load(16).requests
    assert (first.runs, first.output_runs) == (((0, 8),), ((8, 5),)), "209 tokens are 13 pages, of which 8 have been named"


def test_inferred_answers_are_cached_and_hit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    setting = ("tiers.gpu.capacity=100pages", "rules.cache_output=true")
    trace = load_trace("mooncake", path=path, answers="inferred", page_tokens=512)
    assert replay(trace, *setting).hit_pages.sum(axis=1).tolist() == [0, 3]
    with pytest.raises(UsageError, match=r"set trace.answers=inferred \(mooncake, weka, bailian\)"):
        replay(load_trace("mooncake", path=path, page_tokens=512), *setting)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="answers must be one of none, inferred, not 'guessed'"):
        Weka(path="x", answers="guessed")
    for reader in (Mooncake, Bailian):
        with pytest.raises(ValueError, match="answers=inferred needs tail=full"):
            reader(path="x", tail="all", answers="inferred")


def test_unique_answers_have_pages_that_no_prompt_has(tmp_path: Path) -> None:
    """In pages of 256 tokens, line by line; the second answer fills no page."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, [*MOONCAKE, MOONCAKE[0] | {"timestamp": 2_000}])))
    first, second, third = Mooncake(path=str(path), answers="unique").load(256).requests
    assert (first.runs, first.output_runs, first.own_path) == (((0, 4),), ((4, 2),), ((0, 6),))
    assert (second.runs, second.output_runs, second.own_path) == (((0, 4), (6, 4)), (), ((0, 4), (6, 4)))
    assert (third.runs, third.output_runs, third.own_path) == (((0, 4),), ((10, 2),), ((0, 4), (10, 2)))


@pytest.mark.parametrize("page_tokens", [1, 4, 8, 24])
def test_a_partial_block_is_shared_in_prompts_and_unique_in_own_paths(tmp_path: Path, page_tokens: int) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 45, "output_length": 30, "hash_ids": [1, 2, 3, 4, 5, 6]}
    path.write_text("\n".join(map(json.dumps, [line] * 3)))
    requests = Mooncake(path=str(path), answers="unique", block_tokens=8).load(page_tokens).requests
    whole = 40 // page_tokens
    for request in requests:
        own, others = pages_of(request.own_path or ()), [pages_of(r.own_path or ()) for r in requests if r is not request]
        assert request.runs == requests[0].runs
        assert len(own) == (45 + 30 - 1) // page_tokens == request.prompt_pages + len(pages_of(request.output_runs or ()))
        assert own[:whole] == pages_of(request.runs)[:whole]
        assert all(set(own) & set(other) == set(own[:whole]) for other in others)
        assert own[request.prompt_pages :] == pages_of(request.output_runs or ())


def test_unique_answers_do_not_depend_on_how_much_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    whole = Mooncake(path=str(path), answers="unique").load(16).requests
    assert Mooncake(path=str(path), answers="unique", limit=1).load(16).requests[0].output_runs == whole[0].output_runs
    with pytest.raises(ValueError, match="answers=unique needs tail=full"):
        Mooncake(path=str(path), answers="unique", tail="all")
    with pytest.raises(ValueError, match="answers must be one of none, inferred, not 'unique'"):
        Weka(path=str(path), answers="unique")
