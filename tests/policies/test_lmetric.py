"""LMetric by hand, in pages of 4 tokens."""

from kvsim.policies.routing.lmetric import LMetric
from tests.policies.small_routing import prompt, router, sent_to


def test_the_product_of_prefill_tokens_and_requests_decides() -> None:
    """The prompt has 33 tokens, and counts as a request. Engine 0 has 2 that decode: 33 * 3 = 99. Engine 1 has 28 of the tokens
    cached and 5 requests, one of them with 9 tokens to compute: (9 + 5) * 6 = 84. Engine 2 has one, with 37: 70 * 2 = 140."""
    small = router(LMetric())
    small.cached(1, (0, 7))
    for index in range(2):
        sent_to(small, 0, prompt(index=index), is_computed=True)
    for index in range(2, 6):
        sent_to(small, 1, prompt(index=index), is_computed=True)
    waiting = sent_to(small, 1, prompt((500, 2), index=6))
    sent_to(small, 2, prompt((600, 9), index=7))
    asked = prompt((0, 8), index=10)
    assert small.send(asked, 1.0) == 1
    small.ended(asked, 1, 1.0)
    for index in range(11, 13):
        sent_to(small, 1, prompt(index=index), is_computed=True)
    assert small.send(asked, 2.0) == 0, "(9 + 5) * 8 = 112"
    small.ended(asked, 0, 2.0)
    small.first_token(waiting, 1, 3.0)
    assert small.send(asked, 3.0) == 1, "5 * 8 = 40"


def test_an_engine_with_one_request_is_chosen_before_an_idle_one_if_it_has_more_than_half_of_the_prompt() -> None:
    """Of 33 tokens, 16 are cached: 17 * 2 = 34. Then 20: 13 * 2 = 26."""
    small = router(LMetric(), engines=2)
    small.cached(0, (0, 4))
    sent_to(small, 0, prompt(index=0), is_computed=True)
    asked = prompt((0, 8), index=1)
    assert small.send(asked, 0.0) == 1
    small.ended(asked, 1, 0.0)
    small.cached(0, (4, 1))
    assert small.send(asked, 1.0) == 0


def test_of_idle_engines_the_one_with_most_of_the_prompt_gets_it() -> None:
    small = router(LMetric())
    small.cached(2, (0, 1))
    small.cached(1, (0, 3))
    assert small.send(prompt((0, 8)), 0.0) == 1
    assert small.send(prompt((50, 8), index=1), 0.0) == 0, "of equals, the first"


def test_a_prompt_that_is_cached_as_a_whole_still_costs_a_token() -> None:
    """33 requests and one token are 33, and so are one request and 33 tokens: the fewest tokens decide. One more is too much."""
    small = router(LMetric(), engines=2)
    small.cached(0, (0, 9))
    for index in range(32):
        sent_to(small, 0, prompt(index=index), is_computed=True)
    asked = prompt((0, 8), index=99)
    assert small.send(asked, 0.0) == 0
    assert small.send(prompt((0, 8), index=100), 0.0) == 1


def test_engines_that_only_decode_are_chosen_by_their_requests() -> None:
    small = router(LMetric(), prefills=False)
    small.cached(0, (0, 8))
    assert [small.send(prompt((0, 8), index=index), 0.0) for index in range(5)] == [0, 1, 2, 0, 1]
