"""Requests as an SGLang has admitted them, step by step: pages of 4 tokens, and hits that can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.plans.plan import Plan
from tests.replaying.test_preempted import Played, engine, request


def sglang(pages: int, version: str = "0.5.15") -> Plan:
    one = engine(pages, preset="sglang")
    return replace(one, rules=replace(one.rules, version=version))


@pytest.mark.parametrize(("version", "hits"), [("0.5.15", [0, 0, 0, 0]), ("0.5.23", [0, 0, 0, 3])])
def test_until_version_0_5_15_as_much_is_evicted_as_a_step_needs_in_all(version: str, hits: list[int]) -> None:
    """Eight pages. When the third prompt comes, of 14 tokens, two pages and three are in the tree, and three are free. Room is
    made for five: the first prompt leaves, or both. The last request asks for the second one again."""
    asked = [
        (request(0, [0, 1]), 0.0, [1.0]), (request(1, [10, 11, 12]), 2.0, [3.0]), (request(2, [20, 21, 22]), 4.0, [5.0]),
        (request(3, [10, 11, 12]), 6.0, [7.0]),
    ]  # fmt: skip
    assert Played(sglang(8, version), asked, formed_s=np.array([0.0, 2.0, 4.0, 6.0])).hits == hits


@pytest.mark.parametrize(("version", "pages"), [("0.5.15", 2), ("0.5.23", 1)])
def test_until_version_0_5_15_a_request_decodes_once_more_while_its_last_token_is_computed(version: str, pages: int) -> None:
    """Six tokens of prompt and two of answer: the last one has memory only if it is decoded once more, and fills the second page.
    Steps are formed while the one before runs."""
    asked = [(request(0, [0], 2), 0.0, [1.0, 2.0])]
    played = Played(sglang(8, version), asked, formed_s=np.array([0.0, 0.1, 1.0]), steps_ahead=1)
    assert sum(node.pages for node in played.replay.server.tree.root.descendants()) == pages


def test_a_step_takes_memory_for_its_chunk_alone_and_its_pages_can_be_found_when_the_next_one_is_formed() -> None:
    """Steps of 8 tokens. The first prompt has 18: it holds two pages, then four, then five. The second request shares its first
    two pages, and is admitted to the third step, with six tokens left of it: in whole pages four, then two more."""
    one = engine(20, step_tokens=8, preset="sglang")
    asked = [(request(0, [0, 1, 2, 3]), 0.0, [3.0]), (request(1, [0, 1]), 2.0, [4.0])]
    played = Played(one, asked, formed_s=np.array([0.0, 1.0, 2.0, 3.0]))
    assert [played.held[at_s] for at_s in (0.0, 1.0, 2.0)] == [0, 2, 4], "taken when all at that time has happened"
    assert played.hits == [0, 2]


@pytest.mark.parametrize("formed_s", [(), (0.0, 1.0, 2.0, 3.0, 5.0, 9.0, 10.0)])
def test_a_retracted_request_leaves_its_prompt_in_the_tree_and_finds_it_again(formed_s: tuple[float, ...]) -> None:
    """Six pages. The first request has 10 tokens and, from its third token on, four pages. From 3 s to 9 s it has been retracted;
    its two full pages can be evicted. The other prompt of six tokens needs none of them, so they are found again."""
    first, second = request(0, [0, 1], output_tokens=6), request(1, [10])
    asked = [(first, 0.0, [1.0, 2.0, 3.0, 10.0, 11.0, 12.0]), (second, 5.0, [6.0]), (request(2, [0, 1]), 20.0, [21.0])]
    played = Played(sglang(6), asked, pauses_s={0: [(3.0, 9.0)]}, preemptions=1, formed_s=np.array(formed_s))
    assert (played.hits, played.held[3.0], played.held[12.0]) == ([0, 0, 2], 0, 0)
    assert played.held[10.0] >= 4
    assert played.replay.server.tiers[0].pool.capacity == 6


def test_who_waits_is_looked_up_when_another_has_ended() -> None:
    """Five pages. The waiting request has no room, and its page is looked up when the second one has ended: so the third prompt
    takes the place of the second one's pages, which are older then, and it finds its own."""
    asked = [
        (request(0, [0]), 0.0, [1.0]), (request(1, [10]), 2.0, [4.0]), (request(2, [20, 21]), 5.0, [6.0]),
        (request(3, [0]), 7.0, [8.0]),
    ]  # fmt: skip
    formed_s = np.array([0.0, 2.0, 4.0, 5.0, 7.0])
    waits = {"joined_s": np.array([0.0, 2.0, 5.0, 3.0])}
    looked_up = Played(sglang(5, "0.5.23"), asked, formed_s=formed_s, **waits)
    assert looked_up.hits == [0, 0, 0, 1]
    assert Played(sglang(5, "0.5.23"), asked, formed_s=formed_s).hits == [0, 0, 0, 0]
