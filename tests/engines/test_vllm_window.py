"""vLLM's pool for models with sliding windows: a test for each rule, then random and real traces against a slow model.

Pages have four tokens and windows eight, so that two pages have to be there before a place where a prompt begins again. A prompt
is a word, a page for each letter, and one token more unless said otherwise.
"""

from random import Random

import pytest

from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.engines.vllm.window_groups import WindowGroups, group_sizes
from tests.engines.slow_window_blocks import SlowWindowBlocks, play_slowly
from tests.engines.small_window_blocks import Small, make_cache, play
from tests.workloads import EXAMPLES, make_request, random_requests


@pytest.mark.parametrize(
    ("full", "local", "groups"),
    [
        (10, 52, (10, 1, 6)),  # Gemma 3 27B
        (8, 40, (8, 1, 5)),  # Gemma 3 12B
        (12, 12, (12, 1, 1)),  # gpt-oss-20b
        (13, 12, (13, 1, 1)),  # with a draft model's layer
        (10, 14, (14, 1, 1)),
        (10, 15, (10, 1, 2)),
        (20, 10, (10, 2, 1)),
    ],
)
def test_groups_have_equally_many_layers(full: int, local: int, groups: tuple[int, int, int]) -> None:
    assert group_sizes(full, local) == groups


def test_a_window_includes_the_token_itself() -> None:
    windows = WindowGroups(1, 8, 4)
    assert windows.run_pages == 2
    assert [windows.pages_behind(tokens) for tokens in (7, 10, 11, 14, 15)] == [0, 0, 1, 1, 2]
    assert WindowGroups(1, 9, 4).run_pages == 2
    assert WindowGroups(1, 10, 4).run_pages == 3
    assert WindowGroups(1, 8, 4, in_flight_tokens=16).most_pages == 6 + 1


def test_names_are_given_to_the_pages_before_places_where_a_prompt_can_begin() -> None:
    windows = WindowGroups(1, 8, 4)
    assert windows.named(0, 20, (10, 4)) == [(2, 4), (8, 10)]
    assert windows.named(3, 20, (10, 9)) == [(7, 10)], "one range, since they meet"
    assert windows.named(3, 9, (10, 0, 1)) == [(8, 9)]
    assert WindowGroups(1, 8, 4, retention_tokens=16).named(3, 15, (6,)) == [(3, 8), (10, 12), (14, 15)]
    assert WindowGroups(1, 8, 4, retention_tokens=None).named(3, 15, (6,)) == [(3, 15)]
    assert WindowGroups(1, 1, 4).named(0, 20, (10,)) == [], "the token itself needs no page before it"


def test_a_prompt_begins_again_where_it_ended() -> None:
    cache = Small(40)
    assert cache.serve("abcde", "abcde") == 5
    assert cache.windows("abcde") == [4, 5]
    aligned = Small(40)
    assert aligned.serve("abcde", "abcde", tokens=0) == 4
    assert aligned.windows("abcde") == [3, 4], "the page with the last token is always computed"


def test_prompts_that_part_begin_where_they_parted_the_third_time() -> None:
    cache = Small(60)
    cache.serve("abcdef")
    assert (cache.known("abcxyz"), cache.serve("abcxyz")) == (3, 0), "full attention knows abc, the windows do not"
    assert cache.windows("abcxyz") == [2, 3, 5, 6]
    assert cache.serve("abcuv") == 3


def test_fewer_pages_than_a_window_are_enough_from_the_beginning() -> None:
    cache = Small(40)
    assert cache.serve("a", "ab") == 1
    assert cache.windows("ab") == [1, 2]


def test_a_page_takes_a_block_of_each_group_and_leaves_those_behind_the_window() -> None:
    cache = Small(60, groups=3, chunk=8)
    lease = cache.start("abcdef")  # 7 pages of full attention; pages behind the 16 tokens before the last chunk: c, d, ... g
    assert lease is not None and lease.behind == (24 - 7) // 4 == 4
    assert cache.free == 60 - 7 - 3 * 3
    cache.finish(lease)
    assert cache.free == 60 - 6 - 3 * 2, "named are the pages of full attention, e and f of the others"


def test_a_prompt_in_one_chunk_takes_blocks_for_all_its_pages_at_once() -> None:
    assert Small(14).start("abcdef") is not None
    assert Small(13).start("abcdef") is None
    assert Small(11, chunk=4).start("abcdef") is not None


def test_an_answer_leaves_pages_behind_that_then_can_be_evicted_first() -> None:
    cache = Small(40)
    lease = cache.start("abcde", output=20)  # computed are 21 + 19 tokens; the window begins after 32 of them
    assert lease is not None and lease.held_pages == 10 and lease.behind == (39 - 7) // 4 == 8
    assert cache.windows("abcde") == [4, 5]
    assert cache.cache.tiers[0].evictable_pages == 2, "those of d and e that the window has left"


def test_blocks_of_windows_are_given_back_group_by_group_before_those_of_full_attention() -> None:
    def left(**about: bool) -> tuple[int, list[int]]:
        cache = Small(11, groups=2, chunk=4, **about)
        cache.serve("abc", tokens=0)  # 3 of full attention, 2 times a and b
        cache.serve("", tokens=3, output=6)  # 8 tokens take 3 times 2 blocks, of which 4 are free
        return cache.known("abc"), cache.windows("abc")

    assert left() == (3, [])
    assert left(full_first=True) == (1, [1, 2])


def test_pages_that_an_answer_leaves_behind_leave_page_by_page_and_those_of_a_prompt_group_by_group() -> None:
    def left(evicted: int) -> list[int]:
        """Pages of both groups once so many blocks have left: a to c are behind when the answer begins; then d, then e."""
        cache = Small(60, groups=2, retention=None)
        assert cache.start("abcde", output=20) is not None
        cache.cache.pool.make_room(cache.free + evicted)
        cache.cache.pool.check(cache.running)
        return cache.windows("abcde")

    assert left(0) == [1, 2, 3, 4, 5]
    assert left(1) == [1, 2, 4, 5], "the first group's block of c"
    assert left(6) == [4, 5]
    assert left(7) == left(8) == [5], "d before e"


def test_a_request_keeps_some_blocks_of_what_was_given_back_together() -> None:
    cache = Small(60, groups=2, retention=None)
    cache.serve("abcdef")
    lease = cache.start("abcd")
    assert lease is not None and [(run.segment.depth, run.segment.pages) for run in lease.windows.runs] == [(2, 2)]
    cache.cache.pool.make_room(cache.free + 2 * 4 + 2)
    cache.cache.pool.check(cache.running)
    assert cache.windows("abcdef") == [3, 4], "a, b, e and f have left"
    assert cache.known("abcdef") == 4


def test_runs_that_were_cut_and_are_held_alike_again_are_one() -> None:
    cache = Small(80, groups=2)
    cache.serve("abcd")
    for tokens in (1, 2):
        lease = cache.start("abcd", tokens=tokens, output=6)
        assert lease is not None and [run.segment.pages for run in lease.windows.runs if run.segment.depth < 4] == [1], "c left"
        cache.finish(lease)
    lease = cache.start("abcd")
    assert lease is not None and [(run.segment.depth, run.segment.pages) for run in lease.windows.runs] == [(2, 2)]


def test_every_page_is_a_place_to_begin_without_retention() -> None:
    dense = Small(60, retention=None)
    assert dense.serve("abcdef", "abcx") == 3
    assert dense.windows("abcdef") == [1, 2, 3, 4, 5, 6]
    some = Small(60, retention=12)
    assert some.serve("abcdefgh", "abcx") == 3
    assert some.windows("abcdefgh") == [2, 3, 5, 6, 7, 8]
    short = Small(60, retention=8)
    short.serve("abcdefgh")
    assert short.windows("abcdefgh") == [1, 2, 3, 4, 5, 6, 7, 8], "an interval no longer than the window"


def test_with_answers_the_next_turn_begins_after_the_prompt_and_then_after_the_answer() -> None:
    words = Small(80).words
    answered = words.answered(tuple("abcd"), index=0, page_tokens=4, tail=1, output=8, answer=lambda count: list("xy")[:count])
    assert answered.output_runs == ((4, 2),)
    turns = [words.pages(tuple(word)) for word in ("abcdxyz", "abcdxyw")]
    following = [make_request(pages, prompt_tokens=29, index=at) for at, pages in enumerate(turns, 1)]
    assert play(make_cache(80, cache_output=True), [answered, *following]) == [0, 4, 6]
    assert play(make_cache(80), [answered, *following]) == [0, 4, 4]
    assert play(make_cache(80, cache_output=True, retention=None), [answered, *following]) == [0, 6, 6]


def test_a_request_without_room_changes_nothing_and_waits() -> None:
    cache = Small(16)
    first = cache.start("abcdef")
    assert cache.start("uvwxyz") is None
    cache.finish(first)
    assert cache.start("uvwxyz") is not None


def with_answers(requests: list[Request], seed: int) -> list[Request]:
    """The same with pages of answers that no other prompt has, and longer ones."""
    random, made, following = Random(seed), list[Request](), 10_000
    for request in requests:
        output = request.output_tokens + random.choice((0, 0, 5, 30))
        count = (request.prompt_tokens + output - 1) // 4 - request.prompt_pages
        runs = ((following, count),) if count > 0 else ()
        following += 100
        made.append(
            Request(
                index=request.index, arrival_s=request.arrival_s, prompt_tokens=request.prompt_tokens, output_tokens=output,
                runs=request.runs, prompt_pages=request.prompt_pages, output_runs=runs,
            )
        )  # fmt: skip
    return made


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_random_traces_hit_what_the_slow_model_hits(seed: int) -> None:
    random = Random(seed)
    requests = with_answers(random_requests(seed), seed)
    for _ in range(4):
        about = {
            "groups": random.choice((1, 1, 2, 3)),
            "window": random.choice((1, 2, 5, 7, 8, 9, 12, 16, 30)),
            "chunk": random.choice((0, 3, 4, 8, 10, 16)),
            "retention": random.choice((None, 0, 0, 8, 12, 16, 24)),
            "full_first": random.choice((False, True)),
            "cache_output": random.choice((False, True)),
        }
        in_flight, capacity = random.choice((1, 1, 2, 4)), random.randint(8, 40) * (1 + int(about["groups"]))
        cache = make_cache(capacity, pool=SlotPool, **about)
        assert play(cache, requests, in_flight) == play_slowly(SlowWindowBlocks(capacity, **about), requests, in_flight), (
            capacity, in_flight, about
        )  # fmt: skip


def test_counts_hold_while_requests_run() -> None:
    for seed in range(10):
        cache, requests = make_cache(60, groups=1 + seed % 2, chunk=8, pool=SlotPool), random_requests(seed)
        running = []
        for request in requests:
            while (lease := cache.serve(request, -(-(request.prompt_tokens + request.output_tokens) // 4), 0.0)) is None:
                if not running:
                    break
                cache.finish_request(running.pop(0))
                cache.pool.check(running)
            running += [lease] if lease else []
            cache.pool.check(running)
        assert running


@pytest.mark.parametrize(("capacity", "in_flight", "groups", "window"), [(100, 1, 1, 64), (300, 3, 2, 200), (500, 2, 4, 256)])
def test_conversations_hit_what_the_slow_model_hits(
    chats: dict[int, list[Request]], capacity: int, in_flight: int, groups: int, window: int
) -> None:
    about = {"groups": groups, "window": window, "chunk": 256, "page_tokens": 16}
    rows = play(make_cache(capacity, **about), chats[16][:150], in_flight)
    assert rows == play_slowly(SlowWindowBlocks(capacity, **about), chats[16][:150], in_flight)
    assert sum(rows) > 100
