"""MyPolicy by hand: requests are given by their arrival and the tokens of their prompts."""

import pytest

from kvsim.commands.templates.scheduling.my_policy import MyPolicy
from kvsim.core.queue_view import Waiting
from kvsim.core.request import Request


def order(policy: MyPolicy, *requests: tuple[float, int]) -> list[int]:
    """Return the numbers of the requests in the order in which they are tried."""
    ranks = []
    for index, (arrival_s, tokens) in enumerate(requests):
        request = Request(index=index, arrival_s=arrival_s, prompt_tokens=tokens, output_tokens=1, runs=(), prompt_pages=0)
        ranks.append((policy.rank(Waiting(request, arrival_s)), index))
    return [index for _, index in sorted(ranks)]


def test_a_long_prompt_comes_later() -> None:
    assert order(MyPolicy(seconds_per_1024_tokens=1024), (0.0, 64), (30.0, 32), (60.0, 16)) == [1, 0, 2]


def test_without_a_weight_for_tokens_it_is_first_come_first_served() -> None:
    assert order(MyPolicy(seconds_per_1024_tokens=0), (0.0, 64), (30.0, 32), (60.0, 16)) == [0, 1, 2]


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds_per_1024_tokens must be 0 or more, not -1"):
        MyPolicy(seconds_per_1024_tokens=-1)
