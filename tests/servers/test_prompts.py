"""Prompts as token ids: equal exactly as far as the page ids are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.request import Request, Reset
from kvsim.errors import UsageError
from kvsim.servers.prompts import PromptTokens, as_sent
from kvsim.trace.memory import trace_from_tokens
from tests.workloads import Words, make_request, pages_of

FIRST, COUNT = 1000, 50
WORDS = st.lists(st.tuples(st.text("abc", min_size=1, max_size=6), st.integers(0, 3)), min_size=1, max_size=8)


def requests_of(words: list[tuple[str, int]], page_tokens: int) -> list[Request]:
    """A request for each word, a page for each letter, and some tokens more that have no page."""
    index = Words()
    return [
        index.request(word, index=number, page_tokens=page_tokens, tail=min(tail, page_tokens - 1), output=9)
        for number, (word, tail) in enumerate(words)
    ]


def prompts_of(requests: list[Request], page_tokens: int, count: int = COUNT) -> list[list[int]]:
    tokens = PromptTokens(requests, page_tokens, FIRST, count)
    return [tokens.prompt(request, number).tolist() for number, request in enumerate(requests)]


def shared(one: list[int], other: list[int]) -> int:
    """How many leading items two lists share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(WORDS, st.integers(1, 6))
def test_prompts_are_equal_exactly_as_far_as_their_pages_are(words: list[tuple[str, int]], page_tokens: int) -> None:
    requests = requests_of(words, page_tokens)
    prompts = prompts_of(requests, page_tokens)
    for one, prompt in zip(requests, prompts, strict=True):
        assert len(prompt) == one.prompt_tokens
        assert all(FIRST <= token < FIRST + COUNT for token in prompt)
        for other, others in zip(requests, prompts, strict=True):
            if one is not other:
                assert shared(prompt, others) == page_tokens * shared(pages_of(one.runs), pages_of(other.runs))


@given(WORDS, st.integers(2, 6))
def test_with_too_few_token_ids_a_first_token_more_is_equal(words: list[tuple[str, int]], page_tokens: int) -> None:
    requests = requests_of(words, page_tokens)
    prompts = prompts_of(requests, page_tokens, count=4)
    for one, prompt in zip(requests, prompts, strict=True):
        for other, others in zip(requests, prompts, strict=True):
            if one is not other:
                pages = page_tokens * shared(pages_of(one.runs), pages_of(other.runs))
                assert pages <= shared(prompt, others) <= pages + 1


def test_ambiguous_pages_are_counted() -> None:
    tokens = PromptTokens(requests_of([(letter, 0) for letter in "abcde"], 2), 2, FIRST, 3)
    assert tokens.ambiguous_pages == 2, "the fourth and fifth begin like the first and second"


def test_pages_of_one_token_that_cannot_all_differ_are_refused() -> None:
    with pytest.raises(UsageError, match="more than 3 different tokens"):
        PromptTokens(requests_of([(letter, 0) for letter in "abcde"], 1), 1, FIRST, 3)


def test_prompts_do_not_depend_on_later_requests() -> None:
    requests = requests_of([("abc", 1), ("abd", 2), ("ab", 0), ("x", 1)], 4)
    assert prompts_of(requests[:2], 4) == prompts_of(requests, 4)[:2]


def test_a_partial_page_with_an_id_has_the_first_tokens_of_the_page() -> None:
    whole, partial = make_request([0, 1], prompt_tokens=8), make_request([0, 1], index=1, prompt_tokens=6)
    prompts = prompts_of([whole, partial], 4)
    assert prompts[1] == prompts[0][:6]


def test_the_tokens_of_a_trace_come_back_as_the_same_pages() -> None:
    """Read as a trace, the prompts have the pages that they were made of, at any page size."""
    requests = requests_of([("abc", 1), ("abd", 2), ("abce", 0), ("x", 1), ("abd", 3)], 4)
    prompts = prompts_of(requests, 4)
    for page_tokens in (1, 2, 4):
        again = trace_from_tokens(prompts, page_tokens=page_tokens).requests
        for one, read in zip(requests, again, strict=True):
            for other, others in zip(requests, again, strict=True):
                if one is not other:
                    common = shared(pages_of(one.runs), pages_of(other.runs)) * 4
                    assert shared(pages_of(read.runs), pages_of(others.runs)) == common // page_tokens


def test_other_prompts_share_no_token_with_those_of_requests() -> None:
    requests = requests_of([("abc", 1), ("x", 2), ("y", 0)], 4)
    tokens = PromptTokens(requests, 4, FIRST, COUNT)
    others = [tokens.other(number, 9) for number in range(4)]
    firsts = [prompt[0] for prompt in prompts_of(requests, 4)] + [int(other[0]) for other in others]
    assert len(set(firsts)) == 7 and all(len(other) == 9 for other in others)
    assert np.all((others[0] >= FIRST) & (others[0] < FIRST + COUNT))


def test_answers_as_sent_have_pages_of_their_own() -> None:
    """Page 2 of the second prompt is the answer of the first one in the trace; the server has generated another one."""
    first = make_request([0, 1], prompt_tokens=9, output_tokens=8, output_runs=((2, 2),))
    second = make_request([0, 1, 2, 5], index=1, prompt_tokens=16, output_tokens=1)
    sent = as_sent([first, second], 4)
    assert [pages_of(request.runs) for request in sent] == [[0, 1], [0, 1, 2, 5]]
    assert [request.output_runs for request in sent] == [((6, 2),), ()], "tokens 8 to 15 of 16, the last of which has no KV"
    assert sent[0].own_path == ((0, 2), (6, 2)) and sent[1].own_path == second.runs


def test_partial_pages_are_no_pages_of_what_is_sent() -> None:
    (sent,) = as_sent([make_request([0, 1, 7], prompt_tokens=10, output_tokens=2)], 4)
    assert pages_of(sent.runs) == [0, 1] and sent.prompt_pages == 2 and sent.output_runs == ()


@pytest.mark.parametrize(
    ("about", "what"),
    [
        ({"bigram": True}, "bigram"),
        ({"samples": 2}, "several samples"),
        ({"images": ((0, 2),)}, "images"),
        ({"persistent": True}, "persistent"),
        ({"resets": (Reset("now", 0.0),)}, "resets"),
    ],
)
def test_what_no_server_can_be_sent_is_refused(about: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        as_sent([make_request([0], prompt_tokens=4, **about)], 4)
