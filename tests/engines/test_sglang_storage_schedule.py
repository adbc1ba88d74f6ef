"""``rules=sglang`` in a simulation with storage: reads for requests that wait, and writes behind host memory, in time."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.cluster.cluster import Failure
from kvsim.core.request import Request
from kvsim.core.serving import RulesError
from kvsim.engines.sglang import queue, schedule, storage_lines
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.trace.mooncake import Mooncake
from tests.engine.small import FOREVER, HARDWARE, PAGE_BYTES
from tests.engines.slow_stored import SlowStored
from tests.engines.small import replayed
from tests.engines.small_hosted import INSTANT, OFTEN, Hosted, alone, first_tokens, words
from tests.engines.small_unified import PLACEMENTS, make_unified
from tests.workloads import EXAMPLES, Words, random_requests

TRACE = Path(__file__).parents[2] / ".." / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
IS_COMPILED = not schedule.__file__.endswith(".py")
NEEDS_SOURCES = pytest.mark.skipif(IS_COMPILED, reason="what is compiled cannot be replaced")


def ahead(stop: str = "wait_complete", *, base_s: float = 1.0, min_tokens: int = 1, fraction: float = 0.5) -> AdaptivePrefetch:
    return AdaptivePrefetch(stop=stop, base_s=base_s, min_tokens=min_tokens, in_flight_fraction=fraction, load_min_tokens=0)


# --- hits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("counts", ["stored", "unmatched"])
@pytest.mark.parametrize(("gpu", "cpu", "disk"), [(600, 600, 100_000), (1000, 1500, 6000), (400, 800, 2500)])
def test_one_request_at_a_time_hits_what_a_replay_hits(gpu: int, cpu: int, disk: int, counts: str, loop: str) -> None:
    trace = Mooncake(path=str(TRACE), limit=800).load(512).requests
    trace = [request for request in trace if request.prompt_tokens < 100_000]
    played = [replace(request, output_tokens=512, index=at) for at, request in enumerate(trace)]
    replay = make_unified(gpu, cpu, page_tokens=512, cache_output=False, storage=disk, prefetch_counts=counts)
    hosted = Hosted(
        gpu,
        cpu,
        disk=disk,
        page_tokens=512,
        hardware=INSTANT,
        chunk=512 * 512,
        loop=loop,
        prefetch=ahead(),
        prefetch_counts=counts,
    )
    outcome = hosted.run(alone([replace(request, output_tokens=1) for request in trace]))
    rows = [tuple(row) for row in outcome.hit_pages.tolist()]
    assert rows == replayed(replay, played)
    assert sum(row[2] for row in rows) == {100_000: 1750, 6000: 1955, 2500: 433}[disk]


# --- times, by hand: ``abc`` is computed until 13, on the host at 16 and in storage at 22 ------------------------------------

LATER = 3 * OFTEN
GONE = ((0, "abc"), (OFTEN, "uvw"), (2 * OFTEN, "xyz"))
"""After these, on a GPU and a host of six pages, storage alone has ``abc``, only the host has ``uvw``, and both have ``xyz``."""


def storing(prefetch: AdaptivePrefetch, *, gpu: int = 6, cpu: int = 6, disk: int = 20, **rules: Any) -> Hosted:
    return Hosted(gpu, cpu, disk=disk, prefetch=prefetch, **rules)


def test_what_the_host_has_is_written_to_storage() -> None:
    hosted = storing(ahead(), gpu=10, cpu=20)
    first_tokens(hosted, words((0, "abc"), (OFTEN, "abcde"), (2 * OFTEN, "z"), (LATER, "y")))
    assert [copy for copy in hosted.log.copies if "disk" in copy[0]] == [
        ("cpu-disk", 3, 16, 22),
        ("cpu-disk", 2, OFTEN + 11, OFTEN + 15),
        ("cpu-disk", 1, 2 * OFTEN + 6, 2 * OFTEN + 8),
    ]


def test_what_storage_has_is_not_written_again() -> None:
    """``abc`` has left GPU and host, is computed again, and copied to the host again."""
    hosted = storing(ahead("best_effort"))
    first_tokens(hosted, words(*GONE, (LATER, "abc"), (2 * LATER, "q"), (3 * LATER, "r")))
    assert ("gpu-cpu", 3, LATER + 13, LATER + 16) in hosted.log.copies
    assert [copy[2] for copy in hosted.log.copies if copy[0] == "cpu-disk"] == [16, OFTEN + 16, 2 * OFTEN + 16, 2 * LATER + 6]


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("stop", ["wait_complete", "timeout"])
def test_a_request_waits_for_a_read_that_ends_in_time(stop: str, loop: str) -> None:
    """Three pages are read in 6 s and loaded in 3 s; the last of four layers is then computed in a quarter of a second."""
    hosted = storing(ahead(stop, base_s=6), loop=loop)
    outcome = hosted.run(words(*GONE, (LATER, "abc")))
    assert outcome.ttft_s[3] == pytest.approx(6 + 3.25)
    assert outcome.columns["read_s"][3].tolist() == [0, 6]
    assert ("disk-cpu", 3, LATER, LATER + 6) in hosted.log.copies
    counts = hosted.prefetching.counts
    assert (counts.fetched_pages, counts.used_pages, counts.wasted_pages) == (3, 3, 0)


def test_a_read_that_is_late_is_given_up_at_the_deadline() -> None:
    """After 5 s and 0.25 s for each 1,024 of 12 tokens, no whole batch has arrived. The batch under way still lands."""
    hosted = storing(ahead("timeout", base_s=5))
    waited_s = 5 + 0.25 * 12 / 1024
    assert first_tokens(hosted, words(*GONE, (LATER, "abc")))[3] == round(LATER + waited_s + 13, 6)
    assert ("disk-cpu", 3, LATER, LATER + 6) in hosted.log.copies
    counts = hosted.prefetching.counts
    assert (counts.fetched_pages, counts.used_pages, counts.wasted_pages) == (3, 0, 3)


@NEEDS_SOURCES
def test_whole_batches_that_have_arrived_by_the_deadline_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of a page: they land on the GPU in 2 s, and one page and a token are computed behind them."""
    monkeypatch.setattr(storage_lines, "BATCH_PAGES", 1)
    hosted = storing(ahead("timeout", base_s=5))
    waited_s = 5 + 0.25 * 12 / 1024
    outcome = hosted.run(words(*GONE, (LATER, "abc")))
    assert outcome.hit_pages[3].tolist() == [0, 0, 2]
    assert outcome.ttft_s[3] == pytest.approx(waited_s + 0.5 + 5)
    assert [copy[1:] for copy in hosted.log.copies if copy[0] == "disk-cpu"] == [
        (1, LATER + at, LATER + at + 2) for at in (0, 2, 4)
    ]


def test_the_deadline_counts_from_the_first_turn() -> None:
    """``ef`` is computed until 10. Only then is storage asked, and the read of 6 s begins."""
    for base_s, expected_s in ((6.0, 10 + 6 + 3.25), (5.0, 10 + 5 + 0.25 * 12 / 1024 + 13)):
        hosted = storing(ahead("timeout", base_s=base_s))
        found = first_tokens(hosted, words(*GONE, (LATER, "ef"), (LATER + 1, "abc")))
        assert found[3:] == [LATER + 9, pytest.approx(LATER + expected_s - 1)]


def test_without_waiting_a_request_takes_what_has_arrived_at_its_turn() -> None:
    """Its turn comes when the chunks of the prompt before it are computed, at 9; the read begins in the second of three passes.

    The host has room for two of its three pages; a page and a token are computed in two chunks.
    """
    fast = {**HARDWARE, "disk_read_bytes_per_s": FOREVER}
    hosted = storing(ahead("best_effort"), chunk=4, hardware=fast)
    found = first_tokens(hosted, words(*GONE, (LATER, "ef"), (LATER + 0.5, "abc")))
    assert found[3:] == [LATER + 9, LATER + 9 + 0.5 + 5]
    hosted = storing(ahead("best_effort"))
    assert first_tokens(hosted, words(*GONE, (LATER, "abc")))[3] == LATER + 13, "its turn comes before the answer of storage"


def test_others_pass_a_request_that_waits() -> None:
    """``e`` is computed until 5 although ``abc`` is first in the queue, which is read until 6."""
    hosted = storing(ahead(), gpu=10, cpu=10)
    gone = ((0, "abc"), (OFTEN, "tuvw"), (1.5 * OFTEN, "qrs"), (2 * OFTEN, "mnop"))
    found = first_tokens(hosted, words(*gone, (LATER, "abc"), (LATER, "e")))
    assert found[4:] == [LATER + 6 + 3.25, LATER + 5]


def test_a_read_is_cut_short_to_the_room_of_the_host() -> None:
    """Three of four pages fit beside ``xyz``, which the GPU has too. They land in 3 s; a page and a token are computed behind."""
    hosted = storing(ahead(), gpu=7)
    found = first_tokens(hosted, words((0, "abcd"), *GONE[1:], (LATER, "abcd")))
    assert found[3] == LATER + 6 + 0.75 + 5
    assert hosted.prefetching.counts.refused_by_memory_pages == 1


def test_a_read_that_does_not_fit_is_left_out() -> None:
    """The host has three pages, which the GPU has too."""
    hosted = storing(ahead(), cpu=3)
    assert first_tokens(hosted, words((0, "abc"), (OFTEN, "uvw"), (LATER, "abc")))[2] == LATER + 13
    assert hosted.prefetching.counts.refused_by_memory_pages == 3


@pytest.mark.parametrize(("fraction", "refused"), [(0.5, 3), (0.6, 0)])
def test_the_rate_limit_counts_what_is_asked_for(fraction: float, refused: int) -> None:
    """Three pages are in flight for ``abc``, of six of the host: ``uvw`` is left out, or finds that only the host has it."""
    hosted = storing(ahead(fraction=fraction))
    gone = ((0, "abc"), (500, "def"), *GONE[1:])
    first_tokens(hosted, words(*gone, (LATER, "abc"), (LATER, "def")))
    assert hosted.prefetching.counts.refused_by_rate_limit_pages == refused


def test_a_write_keeps_its_pages_on_the_host() -> None:
    """While ``abc`` is written, it cannot make room for ``uvw``."""
    for bytes_per_s, lacking in ((PAGE_BYTES / 2, 0), (PAGE_BYTES / OFTEN, 3)):
        hosted = storing(ahead(), cpu=3, hardware={**HARDWARE, "disk_write_bytes_per_s": bytes_per_s})
        first_tokens(hosted, words((0, "abc"), (OFTEN, "uvw")))
        assert hosted.cache.residency.counts.no_room_pages == lacking


def test_storage_drops_what_was_used_least_recently() -> None:
    """It has six pages: ``abc``, read again, stays, ``uvw`` goes when ``xyz`` comes."""
    words_and_times = (*GONE[:2], (1500, "lmn"), (2 * OFTEN, "abc"), (2500, "xyz"), (LATER, "pqr"), (4 * OFTEN, "uvw"))
    for disk, used in ((20, 6), (9, 3)):
        hosted = storing(ahead(), disk=disk)
        outcome = hosted.run(words(*words_and_times))
        assert outcome.hit_pages[:, 2].sum() == used


@pytest.mark.parametrize(("counts", "hits"), [("stored", [0, 3, 0]), ("unmatched", [0, 0, 3])])
def test_counting_unmatched_pages_makes_more_room(counts: str, hits: list[int]) -> None:
    """Storage has one page of the four of ``aklm``: the host gives up ``bcd`` for it, or ``bcd`` and ``efg`` for all four."""
    twice = [(at * 500, word) for at, word in enumerate(["a", "a", "bcd", "bcd", "efg", "efg", "hij", "hij"])]
    hosted = storing(ahead(), gpu=7, cpu=9, write="write_through_selective", prefetch_counts=counts)
    outcome = hosted.run(words(*twice, (5 * OFTEN, "aklm"), (6 * OFTEN, "efg")))
    assert outcome.hit_pages[-2:].tolist() == [[0, 0, 1], hits]


def test_storage_is_asked_again_after_eight_passes() -> None:
    """While ``d`` decodes alone, a pass a second. Its answer is complete at 24.

    At 6, ``abc`` is asked for, and ``ef`` is over the rate limit; the read of ``abc`` begins at 7. At 14, eight passes later, it
    has ended, and ``ef`` is asked for.
    """
    hosted = storing(ahead(fraction=0.2), gpu=12, cpu=15, most_running=1)
    gone = ((0, "abc"), (500, "ef"), (OFTEN, "uvwxyz"), (2 * OFTEN, "ghijklmno"))
    requests = words(*gone, (LATER, "d"), (LATER + 5.5, "abc"), (LATER + 5.5, "ef"))
    requests[4].output_tokens = 20
    outcome = hosted.run(requests)
    assert outcome.hit_pages[5:].tolist() == [[0, 0, 3], [0, 0, 2]]
    assert outcome.ttft_s[5:].round(6).tolist() == [24 - 5.5 + 3.25, 24 - 5.5 + 3.25 + 2.25]
    reads = [copy for copy in hosted.log.copies if copy[0] == "disk-cpu"]
    assert reads == [("disk-cpu", 3, LATER + 7, LATER + 13), ("disk-cpu", 2, LATER + 15, LATER + 19)]


def test_a_reset_empties_storage_and_a_failure_does_not() -> None:
    for failures, reset_at_s, hits in (
        ((), None, [0, 0, 3]),
        ((), 2500.0, [0, 0, 0]),
        ([Failure(engine=0, at_s=2500.0, back_after_s=1.0)], None, [0, 0, 3]),
    ):
        hosted = storing(ahead(), reset_at_s=reset_at_s)
        outcome = hosted.run(words(*GONE, (LATER, "abc")), failures=failures)
        assert outcome.hit_pages[3].tolist() == hits


@pytest.mark.parametrize("at_s", [0.5, 4.5, 6.5, 8.0])
def test_an_engine_that_fails_begins_anew(at_s: float) -> None:
    """While ``abc`` is read, up to 6, or loaded. It is read again when the engine is back and the read under way has ended."""
    outcome = storing(ahead()).run(
        words(*GONE, (LATER, "abc")), failures=[Failure(engine=0, at_s=LATER + at_s, back_after_s=0.1)]
    )
    assert outcome.hit_pages[3].tolist() == [0, 0, 3]
    assert outcome.ttft_s[3] == pytest.approx(max(6, at_s + 0.1) + 6 + 3.25)


# --- any workload --------------------------------------------------------------------------------------------------------


class Drawn:
    """Requests, sizes and rates drawn from a seed, such that hardly two things happen at the same time."""

    def __init__(self, seed: int, write: str) -> None:
        draw = Random(seed)
        self.batch, self.write = draw.choice([1, 2, 3, 128]), write
        self.gpu, self.cpu, self.disk = draw.choice([16, 20, 30]), draw.choice([8, 12, 20, 40]), draw.choice([40, 100, 300])
        self.host_s, self.read_s = draw.choice([0.0713, 0.3137, 1.0173]), draw.choice([0.01371, 0.5317, 2.0371, 5.137])
        self.write_s = draw.choice([0.0931, 1.0311]) * self.read_s
        self.stop, self.base_s = draw.choice(["best_effort", "wait_complete", "timeout"]), draw.choice([0.217, 1.313, 5.719])
        self.min_tokens, self.fraction, self.is_unmatched = (
            draw.choice([1, 4, 8, 12]),
            draw.choice([0.1, 0.5]),
            draw.random() < 0.4,
        )
        self.requests = self._alike(draw) if draw.random() < 0.5 else random_requests(seed, requests=50)
        gap_s, at_s = draw.choice([0.5, 3, 12, 40]), 0.0
        for index, request in enumerate(self.requests):
            at_s += draw.expovariate(1 / gap_s)
            request.index, request.arrival_s, request.output_tokens, request.output_runs = index, at_s, 1, None
            request.prompt_tokens = request.prompt_pages * 4 + 1

    @staticmethod
    def _alike(draw: Random) -> list[Request]:
        """Prompts of a few families, each of which comes back often."""
        ids = Words()
        known = [first + "".join(draw.choice("ab") for _ in range(draw.randint(2, 9))) for first in "cdefghijk"]
        made = [draw.choice(known)[: draw.randint(3, 12)] for _ in range(50)]
        return [ids.request(word + draw.choice(["", "", "x", "yz"]), page_tokens=4) for word in made]

    def hosted(self) -> Hosted:
        host = PAGE_BYTES / self.host_s
        rates = {
            "host_to_device_bytes_per_s": host, "device_to_host_bytes_per_s": host, "both_directions_bytes_per_s": 2 * host,
            "disk_read_bytes_per_s": PAGE_BYTES / self.read_s, "disk_write_bytes_per_s": PAGE_BYTES / self.write_s,
        }  # fmt: skip
        policy = ahead(self.stop, base_s=self.base_s, min_tokens=self.min_tokens, fraction=self.fraction)
        counts = "unmatched" if self.is_unmatched else "stored"
        return Hosted(
            self.gpu, self.cpu, disk=self.disk, write=self.write, hardware={**HARDWARE, **rates}, prefetch=policy,
            prefetch_counts=counts,
        )  # fmt: skip

    def slow(self) -> SlowStored:
        return SlowStored(
            self.gpu, self.cpu, self.disk, write=self.write, batch=self.batch, stop=self.stop, base_s=self.base_s,
            min_tokens=self.min_tokens, fraction=self.fraction, unmatched=self.is_unmatched, host_s=self.host_s,
            read_s=self.read_s, write_s=self.write_s, layers=4,
        )  # fmt: skip


def is_as_in_the_slow_model(drawn: Drawn) -> None:
    """Without the look-ups of the whole queue, whose number depends on how often an idle engine looks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage_lines, "BATCH_PAGES", drawn.batch)
        patched.setattr(queue, "REFRESH_ROUNDS", 10**9)
        try:
            expected = drawn.slow().play(drawn.requests)
        except OverflowError:
            with pytest.raises(RulesError, match="cannot leave the GPU"):
                drawn.hosted().run(drawn.requests)
            return
        outcome = drawn.hosted().run(drawn.requests)
    assert [tuple(row) for row in outcome.hit_pages.tolist()] == [one.hits for one in expected]
    assert (outcome.arrival_s + outcome.ttft_s).tolist() == pytest.approx([one.token_s for one in expected], abs=1e-5)


@NEEDS_SOURCES
@pytest.mark.parametrize("write", PLACEMENTS)
@pytest.mark.parametrize("seed", range(2 * EXAMPLES))
def test_hits_and_times_are_those_of_the_slow_model(seed: int, write: str) -> None:
    is_as_in_the_slow_model(Drawn(seed, write))


@NEEDS_SOURCES
@settings(max_examples=4 * EXAMPLES)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.text("xy", max_size=7), st.integers(0, 400)), min_size=2, max_size=25),
    st.integers(0, 10**6),
    st.sampled_from(sorted(PLACEMENTS)),
)
def test_any_requests_hit_and_take_what_the_slow_model_says(asked: list[tuple[str, str, int]], seed: int, write: str) -> None:
    """Prompts of a first page and up to seven more, tenths of a second apart and a little more."""
    drawn, ids, at_s = Drawn(seed, write), Words(), 0.0
    drawn.requests = []
    for index, (first, more, tenths) in enumerate(asked):
        at_s += 0.1 * tenths + 0.00137
        word = first + more
        drawn.requests.append(ids.request(word, page_tokens=4, tail=1, output=1, index=index, arrival_s=at_s))
    is_as_in_the_slow_model(drawn)


@NEEDS_SOURCES
@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("write", PLACEMENTS)
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_counts_stay_right_while_storage_is_busy(seed: int, write: str, loop: str) -> None:
    """With answers, chunks and retractions; the cache is reset once."""
    draw, drawn = Random(seed), Drawn(seed, write)
    for request in drawn.requests:
        request.output_tokens = draw.randrange(1, 12)
        request.output_runs = ((10**6 * (1 + request.index), draw.randrange(1, 4)),)
    rules: dict[str, Any] = {"mixed_chunk": draw.random() < 0.3, "schedule_conservativeness": draw.choice([1.0, 0.1])}
    hosted = Hosted(
        drawn.gpu + 8, drawn.cpu, disk=drawn.disk, write=write, loop=loop, chunk=draw.choice([8, 32, 8192]),
        cache_output=draw.random() < 0.5, prefetch=ahead(drawn.stop, base_s=drawn.base_s),
        reset_at_s=drawn.requests[40].arrival_s, prefetch_counts="unmatched" if drawn.is_unmatched else "stored", **rules,
    )  # fmt: skip
    hosted.check_in_each_pass()
    try:
        outcome = hosted.run(drawn.requests)
    except RulesError:
        assert write == "write_back"
        return
    assert (outcome.status == 0).sum() > 40
    counts = hosted.prefetching.counts
    assert counts.fetched_pages == counts.used_pages + counts.wasted_pages
    assert counts.used_pages == outcome.hit_pages[:, 2].sum() or outcome.retractions
