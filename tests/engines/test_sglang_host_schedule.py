"""``rules=sglang`` in a simulation with host memory: copies take the time of the links, and hits are those of a replay."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvsim.engines.sglang import schedule
from kvsim.trace.mooncake import Mooncake
from tests.engine.small import FOREVER, HARDWARE
from tests.engines.slow_unified import SlowUnified, play_alone
from tests.engines.small import replayed
from tests.engines.small_hosted import INSTANT, OFTEN, Hosted, alone, first_tokens, words
from tests.engines.small_unified import PLACEMENTS, make_unified
from tests.workloads import EXAMPLES, Words, random_requests

TRACE = Path(__file__).parents[2] / ".." / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"

# --- hits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("write", PLACEMENTS)
def test_with_instant_links_one_request_at_a_time_hits_what_a_replay_hits(write: str, loop: str) -> None:
    """A prompt needs one page more than it has: the replay gives it to the answer, the engine's pass makes room for it."""
    trace = Mooncake(path=str(TRACE), limit=800).load(512).requests
    trace = [request for request in trace if request.prompt_tokens < 100_000]
    played = [replace(request, output_tokens=512, index=at) for at, request in enumerate(trace)]
    expected = replayed(make_unified(1000, 3000, write=write, page_tokens=512, cache_output=False), played)
    hosted = Hosted(1000, 3000, write=write, page_tokens=512, hardware=INSTANT, chunk=512 * 512, loop=loop)
    outcome = hosted.run(alone([replace(request, output_tokens=1) for request in trace]))
    rows = [tuple(row) for row in outcome.hit_pages[:, :2].tolist()]
    assert rows == [row[:2] for row in expected]
    assert sum(row[1] for row in rows) > 30


@pytest.mark.parametrize("write", PLACEMENTS)
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_with_instant_links_hits_are_those_of_the_slow_model(seed: int, write: str) -> None:
    """With chunks and answers, one request at a time."""
    random = Random(seed)
    requests = random_requests(seed, requests=80)
    for request in requests:
        request.output_tokens = max(1, request.output_tokens)
        request.output_runs = ((10**6 * (1 + request.index), 4),)
    gpu, cpu, chunk = random.choice([20, 24, 40]), random.choice([6, 20, 60, 200]), random.choice([4, 12, 16, 8192])
    cache_output = random.random() < 0.7
    slow = SlowUnified(gpu, cpu, write=write, page_tokens=4, cache_output=cache_output)
    hosted = Hosted(gpu, cpu, write=write, hardware=INSTANT, chunk=chunk, cache_output=cache_output)
    outcome = hosted.run(alone(requests))
    assert [tuple(row[:2]) for row in outcome.hit_pages.tolist()] == play_alone(slow, requests, chunk)


# --- times, by hand: prompts are words of pages and one token more ---------------------------------------------------------


def test_a_copy_follows_the_results_of_its_step() -> None:
    hosted = Hosted(20, 20)
    assert first_tokens(hosted, words((0, "abc"), (20, "x"), (OFTEN, "y"))) == [13, 25, OFTEN + 5]
    assert hosted.log.copies[:2] == [("gpu-cpu", 3, 13, 16), ("gpu-cpu", 1, 25, 26)]


def test_with_the_overlap_loop_a_copy_follows_the_step_that_is_under_way_by_then() -> None:
    """The prompt is computed until 13, and the step of its second token, which is formed by then, until 14."""
    hosted = Hosted(20, 20, loop="overlap")
    assert first_tokens(hosted, words((0, "abc"), (OFTEN, "z"), output=2)) == [13, OFTEN + 5]
    assert hosted.log.copies[0] == ("gpu-cpu", 3, 14, 17)


def test_chunks_that_enter_in_a_pass_are_copied_after_its_step() -> None:
    """Chunks end at 8, 16 and 17. Each enters in the next pass or, the last one, with its results."""
    hosted = Hosted(20, 20, chunk=8)
    assert first_tokens(hosted, words((0, "abcd"), (OFTEN, "z"))) == [17, OFTEN + 5]
    assert hosted.log.copies[:2] == [("gpu-cpu", 2, 16, 18), ("gpu-cpu", 2, 17, 20)]


def test_what_is_being_copied_stays_on_the_gpu() -> None:
    """The second prompt fits when the copy of the first has ended, at 16."""
    assert first_tokens(Hosted(6, 20), words((0, "abc"), (14, "uvw"))) == [13, 16 + 13]
    fast = {**HARDWARE, "device_to_host_bytes_per_s": FOREVER, "both_directions_bytes_per_s": FOREVER}
    assert first_tokens(Hosted(6, 20, hardware=fast), words((0, "abc"), (14, "uvw"))) == [13, 14 + 13]


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_step_follows_its_load_layer_by_layer(loop: str) -> None:
    """Three pages land after 3 s; the last of four layers is then computed in a quarter of the second that one token takes."""
    hosted = Hosted(6, 20, loop=loop)
    assert first_tokens(hosted, words((0, "abc"), (OFTEN, "uvw"), (2 * OFTEN, "abc")))[2] == 2 * OFTEN + 3.25
    assert ("cpu-gpu", 3, 2 * OFTEN, 2 * OFTEN + 3) in hosted.log.copies


def test_the_loads_of_a_pass_are_one_copy() -> None:
    """Five pages land after 5 s; the second of two tokens is computed with the first."""
    hosted = Hosted(12, 20)
    found = words((0, "abc"), (OFTEN, "de"), (2 * OFTEN, "uvwxyz123"), (3 * OFTEN, "abc"), (3 * OFTEN, "de"))
    assert first_tokens(hosted, found)[3:] == [3 * OFTEN + 5.5] * 2
    assert ("cpu-gpu", 5, 3 * OFTEN, 3 * OFTEN + 5) in hosted.log.copies


def test_a_load_that_follows_a_step_begins_when_that_has_ended() -> None:
    """``q`` is computed until 1005, and its second token until 1006. A pass that begins with the latter admits ``abc``."""
    hosted = Hosted(10, 20, loop="overlap")
    requests = words((0, "abc"), (100, "uvwxyz"), (OFTEN, "q"), (OFTEN + 0.5, "abc"))
    requests[2].output_tokens = 2
    assert first_tokens(hosted, requests)[2:] == [OFTEN + 5, OFTEN + 9.25]
    assert ("cpu-gpu", 3, OFTEN + 6, OFTEN + 9) in hosted.log.copies


def test_a_short_hit_in_the_host_is_computed_again() -> None:
    hosted = Hosted(6, 20, load_min_tokens=13)
    assert first_tokens(hosted, words((0, "abc"), (OFTEN, "uvw"), (2 * OFTEN, "abc")))[2] == 2 * OFTEN + 13


def test_selective_writes_leave_out_what_was_used_once() -> None:
    """``abc`` is gone when ``uvw`` has taken its place; used twice, it is loaded again."""
    once = words((0, "abc"), (OFTEN, "uvw"), (2 * OFTEN, "abc"))
    assert first_tokens(Hosted(6, 20, write="write_through_selective"), once)[2] == 2 * OFTEN + 13
    twice = words((0, "abc"), (OFTEN, "abc"), (2 * OFTEN, "uvw"), (3 * OFTEN, "abc"))
    assert first_tokens(Hosted(6, 20, write="write_through_selective"), twice)[3] == 3 * OFTEN + 3.25


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_pass_waits_for_what_it_writes_back(loop: str) -> None:
    """The second prompt needs the pages of the first one, which are copied in 3 s."""
    hosted = Hosted(6, 20, write="write_back", loop=loop)
    assert first_tokens(hosted, words((0, "abc"), (OFTEN, "uvw")))[1] == OFTEN + 3 + 13
    assert hosted.log.copies == [("gpu-cpu", 3, OFTEN, OFTEN + 3)]


def test_a_load_waits_for_what_makes_room_for_it() -> None:
    """Three pages are written back, three are loaded after that, and one token is computed."""
    hosted = Hosted(6, 20, write="write_back")
    found = words((0, "abc"), (OFTEN, "uvw"), (2 * OFTEN, "z"), (3 * OFTEN, "abc"))
    assert first_tokens(hosted, found)[3] == 3 * OFTEN + 3 + 3.25
    assert ("cpu-gpu", 3, 3 * OFTEN + 3, 3 * OFTEN + 6) in hosted.log.copies


def test_answers_are_copied_and_loaded() -> None:
    ids = Words()
    asked = ids.request("ab", page_tokens=4, output=9, index=0)
    asked.output_runs = ((2, 2),)
    assert ids.pages("abcd") == [0, 1, 2, 3]
    again = ids.request("abcd", page_tokens=4, tail=1, output=1, index=2, arrival_s=2 * OFTEN)
    other = ids.request("uvwxy", page_tokens=4, tail=1, output=1, index=1, arrival_s=OFTEN)
    hosted = Hosted(8, 20, cache_output=True)
    outcome = hosted.run([asked, other, again])
    assert outcome.hit_pages[2].tolist()[:2] == [0, 4]


def test_a_reset_gives_back_all_of_host_memory() -> None:
    """The counts are checked at the end: ``abc``, which GPU and host had, has left both."""
    hosted = Hosted(20, 20, reset_at_s=500.0)
    assert hosted.run(words((0, "abc"), (OFTEN, "abcd"))).hit_pages[1].tolist() == [0, 0, 0]
    assert hosted.cache.tiers[1].pool.free == 20 - 4


def test_the_copy_after_a_prompt_follows_the_first_step_of_a_leap() -> None:
    """The prompt is computed until 13, and its answer in steps of a second, all alike: the copy begins at 14, as step by step."""
    hosted = Hosted(20, 20, loop="overlap")
    hosted.run(words((0, "abc"), (OFTEN, "z"), output=6))
    assert hosted.log.copies[0] == ("gpu-cpu", 3, 14, 17)


# --- any workload --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not schedule.__file__.endswith(".py"), reason="a method of a compiled class cannot be replaced")
@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("write", PLACEMENTS)
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_counts_stay_right_while_copies_are_under_way(seed: int, write: str, loop: str) -> None:
    random = Random(seed)
    requests = random_requests(seed, requests=60)
    for request in requests:
        request.output_tokens = max(1, request.output_tokens)
        request.output_runs = ((10**6 * (1 + request.index), random.randrange(1, 4)),)
        request.arrival_s *= random.choice([1, 10, 30])
    rules: dict[str, Any] = {"mixed_chunk": random.random() < 0.3, "schedule_conservativeness": random.choice([1.0, 0.1])}
    hosted = Hosted(
        random.choice([24, 30, 60]), random.choice([10, 40, 200]), write=write, loop=loop, chunk=random.choice([8, 32, 8192]),
        cache_output=random.random() < 0.5, **rules,
    )  # fmt: skip
    hosted.check_in_each_pass()
    outcome = hosted.run(requests)
    assert (outcome.status == 0).sum() > 50
    assert hosted.log.copies or write != "write_through"
