"""LMetric by hand, in pages of 4 tokens."""

from kvsim.policies.routing.lmetric import LMetric
from tests.policies.small_routing import prompt, router, sent_to


def test_the_product_of_prefill_tokens_and_requests_decides() -> None:
    """The prompt has 33 tokens. Engine 0 has 2 requests that decode: 33 * 2 = 66. Engine 1 has 28 of the tokens cached and 4
    requests, one of them with 9 tokens to compute: (9 + 5) * 4 = 56. Engine 2 has one request, with 37 to compute: 70 * 1."""
    small = router(LMetric())
    small.cached(1, (0, 7))
    for index in range(2):
        sent_to(small, 0, prompt(index=index), is_computed=True)
    for index in range(2, 5):
        sent_to(small, 1, prompt(index=index), is_computed=True)
    waiting = sent_to(small, 1, prompt((500, 2), index=5))
    sent_to(small, 2, prompt((600, 9), index=6))
    asked = prompt((0, 8), index=9)
    assert small.send(asked, 1.0) == 1
    small.ended(asked, 1, 1.0)
    sent_to(small, 1, prompt(index=10), is_computed=True)
    assert small.send(asked, 2.0) == 0, "(9 + 5) * 5 = 70"
    small.ended(asked, 0, 2.0)
    small.first_token(waiting, 1, 3.0)
    assert small.send(asked, 3.0) == 1, "5 * 5 = 25"


def test_of_idle_engines_the_one_with_most_of_the_prompt_gets_it() -> None:
    small = router(LMetric())
    small.cached(2, (0, 1))
    small.cached(1, (0, 3))
    assert small.send(prompt((0, 8)), 0.0) == 1
    assert small.send(prompt((50, 8), index=1), 0.0) == 0, "of equals, the first"


def test_a_prompt_that_is_cached_as_a_whole_still_costs_a_token() -> None:
    """4 requests and one token are 4; no request and 33 tokens are 0."""
    small = router(LMetric(), engines=2)
    small.cached(0, (0, 9))
    for index in range(4):
        sent_to(small, 0, prompt(index=index), is_computed=True)
    assert small.send(prompt((0, 8), index=9), 0.0) == 1


def test_engines_that_only_decode_are_chosen_by_their_requests() -> None:
    small = router(LMetric(), prefills=False)
    small.cached(0, (0, 8))
    assert [small.send(prompt((0, 8), index=index), 0.0) for index in range(5)] == [0, 1, 2, 0, 1]
