"""The generated workload."""

from itertools import pairwise

import numpy as np
import pytest

from kvsim.trace.statistics import trace_statistics
from kvsim.trace.synthetic import Kind, Synthetic, shares_up_to
from tests.workloads import pages_of


def kind(**settings):
    plain = {"weight": 1, "systems": 1, "system_tokens": 10, "turns": 1, "message_tokens": 6, "answer_tokens": 4, "pause_s": 5}
    return Kind(**plain | settings)


def load(page_tokens=4, **settings):
    return Synthetic(**{"spread": 0.0} | settings).load(page_tokens).requests


def test_a_system_prompt_is_shared_and_what_follows_is_not():
    """Prompts of 10 + 6 tokens: the pages at 0 and 4 lie within the system prompt."""
    left, right = load(sessions=2, mix={"chat": kind()})
    assert (left.prompt_tokens, left.output_tokens) == (16, 4)
    assert (pages_of(left.runs), pages_of(right.runs)) == ([0, 1, 2, 3], [0, 1, 4, 5])


def test_a_turn_continues_prompt_and_answer_of_the_one_before_it():
    """Prompts of 16, 26, 36 ... tokens, until one has no room in 40 with its answer."""
    turns = load(sessions=1, max_prompt_tokens=40, mix={"chat": kind(turns=1e9)})
    assert [turn.prompt_tokens for turn in turns] == [16, 26, 36]
    for before, after in pairwise(turns):
        assert pages_of(after.runs)[: before.prompt_pages] == pages_of(before.runs)
    assert [(turn.turn, turn.session, turn.kind) for turn in turns[:2]] == [(0, 0, "chat"), (1, 0, "chat")]


def test_the_partial_page_of_a_turn_is_not_the_full_page_of_the_next():
    first, second = load(sessions=1, max_prompt_tokens=27, mix={"chat": kind(turns=1e9, message_tokens=5)}, tail="all")[:2]
    assert (first.prompt_tokens, second.prompt_tokens) == (15, 24)
    assert pages_of(second.runs)[:3] == pages_of(first.runs)[:3]
    assert pages_of(first.runs)[3] not in pages_of(second.runs)


def test_questions_about_a_document_share_it_but_not_each_other():
    """10 + 8 tokens of system prompt and document, then 6 of question: 4 shared pages, 2 own ones."""
    questions = load(sessions=1, mix={"document": kind(document_tokens=8, turns=1e3, remembers=False)})
    assert all(question.prompt_tokens == 24 for question in questions)
    assert [pages_of(question.runs)[:4] for question in questions] == [[0, 1, 2, 3]] * len(questions)
    own = [page for question in questions for page in pages_of(question.runs)[4:]]
    assert len(set(own)) == len(own) == 2 * len(questions) > 2


def test_in_a_closed_loop_a_turn_waits_for_the_one_before_it():
    turns = load(sessions=1, max_prompt_tokens=40, mix={"chat": kind(turns=1e9)}, arrivals="closed_loop")
    assert [turn.after for turn in turns] == [-1, 0, 1]
    assert turns[0].delay_s == 0 < turns[1].delay_s
    assert turns[1].arrival_s == pytest.approx(4 * 0.02 + turns[1].delay_s)


def test_in_an_open_loop_turns_come_at_the_same_times_without_waiting():
    settings = {"sessions": 30, "mix": {"chat": kind(turns=3)}}
    closed, opened = load(**settings), load(**settings, arrivals="open_loop")
    assert [turn.arrival_s for turn in opened] == [turn.arrival_s for turn in closed]
    assert {(turn.after, turn.delay_s) for turn in opened} == {(-1, 0.0)}


def test_a_rate_divides_all_arrivals_of_an_open_loop_and_leaves_the_pauses_of_a_closed_one():
    mix = {"chat": kind(turns=3)}
    settings = {"sessions": 50, "mix": mix}
    slow, fast = load(arrivals="open_loop", **settings), load(arrivals="open_loop", **settings, rate=2.0)
    assert [turn.arrival_s for turn in fast] == pytest.approx([turn.arrival_s / 2 for turn in slow])
    slow, fast = load(**settings), load(**settings, rate=2.0)
    assert sorted(turn.delay_s for turn in fast) == sorted(turn.delay_s for turn in slow)


def outline(requests):
    return [(r.session, r.turn, r.kind, r.arrival_s, r.prompt_tokens, r.output_tokens, r.after, r.delay_s) for r in requests]


def test_the_same_seed_gives_the_same_requests_at_any_page_size():
    one, other, another = Synthetic(sessions=50), Synthetic(sessions=50), Synthetic(sessions=50, seed=1)
    assert outline(one.load(16).requests) == outline(other.load(512).requests) == outline(one.load(1).requests)
    assert [r.runs for r in one.load(16).requests] == [r.runs for r in other.load(16).requests]
    assert outline(one.load(16).requests) != outline(another.load(16).requests)


def test_a_limit_keeps_the_requests_that_arrive_first():
    whole, part = Synthetic(sessions=50).load(16).requests, Synthetic(sessions=50, limit=20).load(16).requests
    assert outline(part) == outline(whole)[:20]


def test_more_tokens_to_a_page_do_not_mean_more_extents():
    extents = [
        sum(len(request.runs) for request in Synthetic(sessions=200).load(page_tokens).requests) for page_tokens in (512, 16, 1)
    ]
    assert extents[0] <= extents[1] <= extents[2] < 2.2 * 1000


def test_the_defaults_lie_between_the_real_traces():
    """Chats hit like the Mooncake conversation trace (.37), agents like the WEKA traces (.96), in pages of 512 and 64 tokens."""
    numbers = trace_statistics(Synthetic(tail="all").load(512))
    assert 4_500 < numbers["requests"] < 5_500
    assert 10_000 < numbers["prompt_tokens_mean"] < 14_000
    assert 0.37 < numbers["page_hit_rate"] < 0.96
    assert rate_of("chat", page_tokens=512) == pytest.approx(0.37, abs=0.05)
    assert rate_of("agent", page_tokens=64) == pytest.approx(0.96, abs=0.02)


def rate_of(name, page_tokens):
    mix = {name: Synthetic().mix[name]}
    return trace_statistics(Synthetic(mix=mix, sessions=300, tail="all").load(page_tokens))["page_hit_rate"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sessions": 0}, "sessions must be at least 1, not 0"),
        ({"sessions_per_s": 0.0}, "sessions_per_s must be above 0, not 0.0"),
        ({"seed": -1}, "seed must be 0 or more, not -1"),
        ({"spread": -0.5}, "spread must be 0 or more, not -0.5"),
        ({"answer_s_per_token": -1.0}, "answer_s_per_token must be 0 or more"),
        ({"arrivals": "recorded"}, "arrivals must be one of open_loop, closed_loop"),
        ({"max_prompt_tokens": 100}, "max_prompt_tokens must be at least 10002 with system prompts of 5000 tokens"),
        ({"mix": {}}, "mix must have a kind of session with a positive weight"),
        ({"mix": {"chat": kind(weight=0)}}, "mix must have a kind of session with a positive weight"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Synthetic(**settings)


def test_a_kind_has_at_least_one_of_everything_and_nothing_negative():
    for name in ("systems", "turns", "system_tokens", "message_tokens", "answer_tokens"):
        with pytest.raises(ValueError, match=f"mix.chat.{name} must be (at least 1|from 1 to 1000000), not 0"):
            Synthetic(mix={"chat": kind(**{name: 0})})
    for name in ("weight", "document_tokens", "pause_s"):
        with pytest.raises(ValueError, match=f"mix.chat.{name} must be 0 or more, not -1"):
            Synthetic(mix={"chat": kind(**{name: -1})})


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_an_answer_is_where_the_next_turn_goes_on(page_tokens):
    requests = Synthetic(sessions=25, max_prompt_tokens=20_000).load(page_tokens).requests
    follow_ups = 0
    for request in requests:
        whole = pages_of(request.runs) + pages_of(request.output_runs)
        assert len(whole) == (request.prompt_tokens + request.output_tokens - 1) // page_tokens
        for other in requests:
            if other.session == request.session and other.turn == request.turn + 1 and other.kind != "document":
                follow_ups += 1
                shared = min(len(whole), other.prompt_pages)
                assert pages_of(other.runs)[:shared] == whole[:shared]
    assert follow_ups > 10


def test_system_prompts_are_drawn_as_numpy_draws_by_probabilities():
    """With three, 6/11, 3/11 and 2/11 of the sessions have each."""
    assert shares_up_to(3).tolist() == pytest.approx([6 / 11, 9 / 11, 1])
    for count in (1, 2, 20, 1000):
        shares, drawn, asked = 1 / np.arange(1, count + 1), np.random.default_rng(count), np.random.default_rng(count)
        expected = [asked.choice(count, p=shares / shares.sum()) for _ in range(200)]
        assert [shares_up_to(count).searchsorted(drawn.random(), side="right") for _ in range(200)] == expected
