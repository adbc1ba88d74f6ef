"""Requests made from what an engine stores, step by step, in streams small enough to check by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kv_events.messages import Event
from kvsim.shadow.engine import LiveEngine
from kvsim.shadow.from_events import LEAST_CHUNK_TOKENS
from kvsim.shadow.live import LiveRequest, problem_of
from tests.shadow.live import KEYS, keys_of
from tests.shadow.test_mirror import EVENTS
from tests.shadow.written import CLEARED, PAGE_TOKENS, batch, removed, stored
from tests.workloads import EXAMPLES

LATER_S = 10.0
"""Long enough for all requests before it to have ended."""


class Live:
    """An engine and the requests that it was seen to have, as words: prompt, answer, and hit blocks."""

    def __init__(self) -> None:
        self.given: list[LiveRequest] = []
        self.engine = LiveEngine("e", None, PAGE_TOKENS, KEYS, self.given.append)
        self.words: dict[tuple[bytes, ...], str] = {(): ""}

    def take(self, at_s: float, *events: Event) -> None:
        self.engine.take(batch(at_s, *events))
        self.engine.tree.check()

    def seen(self, *words: str) -> list[tuple[str, str, int | None]]:
        """The requests so far; ``words`` are what prompts and answers together may be."""
        for word in words:
            for end in range(1, len(word) + 1):
                tokens = [ord(letter) for letter in word[:end] for _ in range(PAGE_TOKENS)]
                self.words[keys_of(tokens, PAGE_TOKENS)] = word[:end]
        found = []
        for request in self.given:
            assert not problem_of(request, PAGE_TOKENS)
            prompt, whole = self.words[request.keys], self.words[request.keys + request.output_keys]
            cached = request.cached_tokens
            found.append((prompt, whole[len(prompt) :], None if cached is None else cached // PAGE_TOKENS))
        return found

    def end(self) -> None:
        self.engine.requests.end_all()


@pytest.fixture
def live() -> Live:
    return Live()


def test_a_prompt_in_chunks_and_the_pages_of_its_answer_are_one_request(live: Live) -> None:
    live.take(0.0, stored("abc"))
    live.take(0.1, stored("abcde", 3))
    live.take(0.5, stored("abcdef", 5))
    live.take(0.9, stored("abcdefg", 6))
    assert live.given == [], "more may follow"
    live.take(LATER_S)
    assert live.seen("abcdefg") == [("abcde", "fg", 0)]
    (request,) = live.given
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == (0.0, 5 * PAGE_TOKENS + 1, 2 * PAGE_TOKENS)


def test_the_path_before_new_blocks_is_what_a_request_has_hit(live: Live) -> None:
    live.take(0.0, stored("abcd"))
    live.take(1.0, stored("abxy", 2))
    live.end()
    assert live.seen("abcd", "abxy") == [("abcd", "", 0), ("abxy", "", 2)]


def test_the_next_turn_of_a_conversation_is_a_request_of_its_own(live: Live) -> None:
    """It follows the answer's last page, but with several blocks at once."""
    live.take(0.0, stored("ab"))
    live.take(0.3, stored("abc", 2))
    live.take(1.0, stored("abcde", 3))
    live.end()
    assert live.seen("abcde") == [("ab", "c", 0), ("abcde", "", 3)]


def test_the_next_turn_comes_later_or_in_another_session(live: Live) -> None:
    live.take(0.0, stored("ab"), stored("x", session_id="one"))
    live.take(6.0, stored("abc", 2))
    live.take(6.5, stored("xy", 1, session_id="two"))
    live.end()
    assert live.seen("abc", "xy") == [("ab", "", 0), ("x", "", 0), ("abc", "", 2), ("xy", "", 1)]
    assert [request.session for request in live.given] == [None, "one", None, "two"]


def test_two_requests_in_one_step_are_two(live: Live) -> None:
    """vLLM lets a request find what another computes in the same step."""
    live.take(0.0, stored("ab"), stored("abcd", 2))
    live.end()
    assert live.seen("abcd") == [("ab", "", 0), ("abcd", "", 2)]


def test_pages_told_one_by_one_in_one_step_are_one_request(live: Live) -> None:
    """As SGLang has told them."""
    live.take(0.0, stored("a"), stored("ab", 1), stored("abc", 2), stored("x"))
    live.end()
    assert live.seen("abc", "x") == [("abc", "", 0), ("x", "", 0)]


def test_a_report_tells_of_a_request_that_hits_everything(live: Live) -> None:
    live.take(0.0, stored("abc"))
    live.take(1.0, stored("abc"))
    live.end()
    assert live.seen("abc") == [("abc", "", 0), ("abc", "", 3)]


def test_a_report_and_what_follows_it_are_one_request(live: Live) -> None:
    live.take(0.0, stored("abc"))
    live.take(1.0, stored("ab"), stored("abxy", 2))
    live.take(1.3, stored("abxyz", 4))
    live.end()
    assert live.seen("abc", "abxyz") == [("abc", "", 0), ("abxy", "z", 2)]


def test_a_report_again_and_again_is_a_request_that_waits(live: Live) -> None:
    live.take(0.0, stored("ab"))
    for step in range(5):
        live.take(1.0 + 0.2 * step, stored("ab"))
    live.take(3.0, stored("ab"))
    live.end()
    assert live.seen("ab") == [("ab", "", 0), ("ab", "", 2), ("ab", "", 2)]


def test_a_last_block_computed_again_ends_a_prompt(live: Live) -> None:
    """A prompt of whole blocks, all of which the engine has: it has no token after them."""
    live.take(0.0, stored("ab"))
    live.take(1.0, stored("ab", 1))
    live.take(1.2, stored("abc", 2))
    live.end()
    assert live.seen("abc") == [("ab", "", 0), ("ab", "c", 1)]
    assert (live.given[1].prompt_tokens, live.given[1].output_tokens) == (2 * PAGE_TOKENS, PAGE_TOKENS + 1)


def test_a_preempted_request_that_computes_again_what_it_had_is_no_new_one(live: Live) -> None:
    live.take(0.0, stored("abc"))
    live.take(0.2, stored("abcd", 3))
    live.take(0.3, removed("abcd", "abc"), stored("xy"))
    live.take(0.9, stored("abc", 2))
    live.take(1.0, stored("abcd", 3))
    live.take(1.3, stored("abcde", 4))
    live.end()
    assert live.seen("abcde", "xy") == [("abc", "de", 0), ("xy", "", 0)]


def test_a_preempted_request_may_come_back_with_the_block_that_it_has_just_filled(live: Live) -> None:
    live.take(0.0, stored("abc"))
    live.take(0.2, stored("abcd", 3))
    live.take(0.3, removed("abcd", "abc"))
    live.take(0.9, stored("abcde", 2))
    live.take(1.2, stored("abcdef", 5))
    live.end()
    assert live.seen("abcdef") == [("abc", "def", 0)]


def test_what_goes_on_further_than_a_preempted_request_could_is_a_new_one(live: Live) -> None:
    """The next turn of its conversation, or another one's request that begins in the same way."""
    live.take(0.0, stored("abc"))
    live.take(0.2, removed("abc"))
    live.take(0.9, stored("abcde", 2))
    live.take(1.0, removed("abcde", "abcd"), stored("abcxyz", 3))
    live.end()
    assert live.seen("abcde", "abcxyz") == [("abc", "", 0), ("abcde", "", 2), ("abcxyz", "", 3)]


def test_what_has_ended_is_not_preempted(live: Live) -> None:
    live.take(0.0, stored("abc"))
    live.take(1.0, removed("abc"))
    live.take(LATER_S, stored("abc", 2))
    live.end()
    assert live.seen("abc") == [("abc", "", 0), ("abc", "", 2)]


WHOLE = ("abcd", "efgh", "ijkl")
"""Prompts of two blocks with answers of two, each of which is told when it ends."""


def whole_answers(live: Live) -> None:
    """Let an engine be seen to tell answers as a whole."""
    for number, word in enumerate(WHOLE):
        live.take(number, stored(word[:2]))
        live.take(number + 0.5, stored(word, 2))
    live.take(70.0)
    assert len(live.given) == len(WHOLE)
    live.given.clear()


def test_where_answers_are_told_as_a_whole_they_are_waited_for_and_end_their_requests(live: Live) -> None:
    whole_answers(live)
    live.take(120.0, stored("mn"))
    live.take(130.0)
    assert live.given == []
    live.take(150.0, stored("mnopq", 2))
    live.take(150.1, stored("mnopqrs", 5))
    live.take(150.7, stored("mnopqrst", 7))
    live.take(151.0)
    assert live.seen("mnopqrst") == [("mn", "opq", 0), ("mnopqrs", "t", 5)]


def test_an_answer_that_does_not_come_is_not_waited_for_without_end(live: Live) -> None:
    whole_answers(live)
    live.take(120.0, stored("mn"))
    live.take(185.0, stored("mnop", 2))
    live.end()
    assert live.seen("mnop") == [("mn", "", 0), ("mnop", "", 2)]


def test_where_answers_are_told_as_a_whole_a_chunk_is_known_by_the_full_step_before_it(live: Live) -> None:
    whole_answers(live)
    long = "x" * (LEAST_CHUNK_TOKENS // PAGE_TOKENS)
    live.take(120.0, stored(long))
    live.take(120.5, stored(long + "yz", len(long)))
    live.take(130.0, stored(long + "yzopq", len(long) + 2))
    live.take(131.0)
    assert live.seen(long + "yzopq") == [(long + "yz", "opq", 0)]


def test_blocks_loaded_from_another_medium_are_hits(live: Live) -> None:
    live.take(0.0, stored("abcd"), stored("abcd", medium="CPU"))
    live.take(0.1, removed("abcd", "abc", "ab"))
    live.take(LATER_S, stored("abcx", 1))
    live.end()
    assert live.seen("abcd", "abcx") == [("abcd", "", 0), ("abcx", "", 1 + 2)]


def test_a_request_ends_though_another_goes_on(live: Live) -> None:
    live.take(0.0, stored("ab"), stored("xy"))
    for second in range(1, 12):
        live.take(float(second), stored("ab" + "c" * second, 1 + second))
    assert live.engine.requests._by_tail.keys() == {live.engine.requests._open[0].tail}


def test_requests_are_handed_on_in_the_order_of_their_beginning(live: Live) -> None:
    """Also if one ends much later; after two minutes, what it answers is cut."""
    live.take(0.0, stored("ab"))
    live.take(1.0, stored("xy"))
    word = "ab"
    for second in range(2, 130, 4):
        live.take(float(second), stored(word + "c", len(word)))
        word += "c"
    live.end()
    prompts = [(prompt, cached) for prompt, _, cached in live.seen(word, "xy")]
    assert prompts == [("ab", 0), ("xy", 0)]
    assert len(live.given[0].output_keys) + live.engine.requests.cut == len(word) - 2
    assert live.engine.requests.cut > 0


def test_nothing_is_made_of_blocks_whose_beginning_is_unknown(live: Live) -> None:
    live.take(0.0, stored("abcd", 2))
    live.take(1.0, stored("abcdef", 4))
    live.end()
    assert (live.given, live.engine.requests.rootless) == ([], 2)


def test_what_is_hit_is_not_certain_after_a_gap_at_the_beginning_of_a_prompt(live: Live) -> None:
    live.take(0.0, stored("ab"))
    live.engine.lose(1)
    live.take(1.0, stored("xy"), stored("abc", 2))
    live.end()
    assert live.seen("abc", "xy") == [("ab", "", 0), ("xy", "", None), ("abc", "", 2)]


@pytest.mark.parametrize("restarts", [False, True])
def test_after_a_reset_requests_begin_anew(live: Live, restarts: bool) -> None:
    live.take(0.0, stored("ab"))
    if restarts:
        live.engine.restart()
    else:
        live.take(0.1, CLEARED)
    live.take(0.2, stored("abc"))
    live.end()
    assert live.seen("abc") == [("ab", "", 0), ("abc", "", 0)]
    assert [request.after_reset for request in live.given] == [False, True]


def test_only_whole_paths_of_the_source_s_page_size_make_requests(live: Live) -> None:
    live.take(0.0, stored("ab", kv_cache_spec_kind="mamba", group_idx=1), stored("ab", group_idx=2), stored("xy"))
    live.take(0.1, type(stored("z"))((9,), None, (1,) * 8, 8, group_idx=2))
    live.end()
    assert live.seen("ab") == [("ab", "", 0)]
    assert live.engine.other_sizes == 1


def test_a_clock_that_is_set_back_does_not_stop_requests(live: Live) -> None:
    live.take(1e9, stored("ab"))
    live.take(5.0, stored("xy"))
    live.take(5.0 + LATER_S)
    assert live.seen("ab", "xy") == [("ab", "", 0), ("xy", "", 0)]


@given(st.lists(st.tuples(st.floats(-10, 300), st.lists(EVENTS, max_size=6)), max_size=20))
@settings(max_examples=3 * EXAMPLES)
def test_no_stream_breaks_it_and_no_request_is_impossible(batches: list) -> None:
    live = Live()
    for at_s, events in batches:
        if "gap" in events:
            live.engine.lose(1)
        live.take(at_s, *[event for event in events if event != "gap"])
    live.end()
    assert not live.engine.requests._open and not live.engine.requests._by_tail and not live.engine.requests.open_blocks
    before: dict[bytes, bytes] = {}
    for request in live.given:
        path = (b"", *request.keys, *request.output_keys)
        assert all(before.setdefault(key, last) == last for last, key in pairwise(path)), "keys are not chained"
        assert not problem_of(request, PAGE_TOKENS)
        assert request.cached_tokens is None or request.cached_tokens <= request.prompt_tokens
