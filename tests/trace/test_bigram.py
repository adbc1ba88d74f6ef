"""EAGLE's keys: a page is known by its tokens and the one after it."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from kvsim import load_trace, replay
from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.trace.base import TraceSource
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.synthetic import Synthetic
from kvsim.trace.tokens import Tokens
from kvsim.trace.weka import Weka
from kvsim.trace.words import Words
from tests.workloads import pages_of


def requests_of(prompts: list[str], page_tokens: int, **settings: Any) -> list[Request]:
    """A request for each prompt; a letter is a token."""
    return Words(prompts=[" ".join(prompt) for prompt in prompts], bigram=True, **settings).load(page_tokens).requests


def pairs(tokens: Any) -> list[Any]:
    return list(pairwise(tokens))


def test_n_tokens_have_a_key_less_so_a_full_last_page_has_none() -> None:
    prompts = ["a", "ab", "abc", "abcd", "abcde"]
    assert [request.prompt_pages for request in requests_of(prompts, 2)] == [0, 0, 1, 1, 2]
    assert [request.prompt_pages for request in requests_of(prompts, 2, tail="all")] == [0, 1, 1, 2, 2]


def test_a_look_up_leaves_out_the_last_token_and_with_it_a_pair() -> None:
    """Of abcde only abcd is looked up: three pairs, one page of two."""
    assert [request.lookup_pages(2) for request in requests_of(["abcd", "abcde", "abcdef", "a"], 2)] == [1, 1, 2, 0]


@pytest.mark.parametrize("rules", ["default", "sglang"])
@pytest.mark.parametrize(("bigram", "hits"), [(False, 2), (True, 1)])
def test_a_repeated_prompt_loses_the_page_whose_next_token_is_its_last(rules: str, bigram: bool, hits: int) -> None:
    trace = load_trace("words", prompts=["a b c d e", "a b c d e", "a b c d e f"], bigram=bigram, page_tokens=2)
    outcome = replay(trace, f"rules={rules}", "tiers.gpu.capacity=20pages")
    assert outcome.hit_pages[:, 0].tolist() == [0, hits, 2]


def common(one: list[Any], other: list[Any]) -> int:
    """How many items two lists begin with in common."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("page_tokens", [1, 2, 3])
def test_random_prompts_share_pages_and_hit_as_their_pairs_do(page_tokens: int) -> None:
    random = Random(page_tokens)
    prompts = ["".join(random.choice("ab") for _ in range(random.randint(1, 12))) for _ in range(150)]
    requests = requests_of(prompts, page_tokens)
    stored: list[list[Any]] = []
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.prompt_pages == len(pairs(prompt)) // page_tokens
        looked_up = pairs(prompt[:-1])
        most = max((common(looked_up, other) for other in stored), default=0)
        shared = max((common(pages_of(request.runs), pages_of(other.runs)) for other in requests[: request.index]), default=0)
        assert min(shared, request.lookup_pages(page_tokens)) == most // page_tokens
        stored.append(pairs(prompt)[: request.prompt_pages * page_tokens])


def test_answers_go_on_where_the_prompt_s_pairs_end(write: Any) -> None:
    lines = (
        {"token_ids": [1, 2, 3, 4], "output_length": 3, "output_token_ids": [5, 6, 7]},
        {"token_ids": [1, 2, 3, 4, 5, 6, 8, 9], "output_length": 1, "output_token_ids": [1]},
    )
    one, other = Tokens(path=write(*lines), bigram=True).load(2).requests
    # The first prompt has one page; with the pair (4, 5) the answer completes the second one. Its last token has no KV.
    assert (one.runs, one.output_runs) == (((0, 1),), ((1, 1),))
    assert (other.runs, other.output_runs) == (((0, 3),), ())


def spelled(source: Synthetic) -> list[list[int]]:
    """The token names of all prompts, in order of arrival."""
    return [pages_of(request.runs) for request in source.load(1).requests]


@pytest.mark.parametrize("page_tokens", [1, 8])
def test_generated_prompts_share_pages_as_their_pairs_do(page_tokens: int) -> None:
    settings: dict[str, Any] = {"sessions": 8, "max_prompt_tokens": 20_000}
    tokens, requests = spelled(Synthetic(**settings)), Synthetic(**settings, bigram=True).load(page_tokens).requests
    for at, request in enumerate(requests):
        assert request.bigram and request.prompt_pages == (request.prompt_tokens - 1) // page_tokens
        answer_pages = (request.prompt_tokens + request.output_tokens - 2) // page_tokens - request.prompt_pages
        assert sum(pages for _, pages in request.output_runs or ()) == answer_pages
        for before in range(at):
            same = common(pages_of(request.runs), pages_of(requests[before].runs))
            assert same == max(0, common(tokens[at], tokens[before]) - 1) // page_tokens


@pytest.mark.parametrize("source", [Mooncake, Weka])
def test_block_ids_do_not_tell_the_next_token(source: type[TraceSource]) -> None:
    with pytest.raises(
        ValueError, match=r"^bigram must be false for traces of block ids: .*; use trace=tokens or trace=synthetic$"
    ):
        source(path="trace.jsonl", bigram=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("rules", ["vllm", "lightllm", "fastdeploy"])
def test_rules_of_other_engines_have_no_such_keys(rules: str) -> None:
    trace = load_trace("words", prompts=["a b c"], bigram=True, page_tokens=2)
    with pytest.raises(UsageError, match=r"^trace.bigram: only SGLang has keys of token pairs: set trace.bigram=false"):
        replay(trace, f"rules={rules}")
