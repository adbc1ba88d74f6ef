"""Requests for several answers to one prompt. See small.py for the round numbers."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.core.request import Request
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome
from kvsim.errors import TraceError, UsageError
from kvsim.plans.build import build_run
from kvsim.run import play
from kvsim.trace.base import Trace
from kvsim.trace.mooncake import Mooncake
from tests.engine.configurations import configured
from tests.engine.small import Ask, SmallEngine, ask, check_idle, hits, make_requests, seconds, small_engine
from tests.replaying.test_replay_is_simulation import EVICTIONS, check, policy
from tests.workloads import conversations, pages_of

A, B = "abcd", "efgh"


def sampled(requests: list[Request], samples: dict[int, int]) -> list[Request]:
    for number, count in samples.items():
        requests[number].samples = count
    return requests


def serve(engine: SmallEngine, *asks: Ask, samples: dict[int, int]) -> Outcome:
    outcome = engine.run(sampled(make_requests(asks), samples))
    check_idle(engine)
    assert not engine.frontend._samples_left
    return outcome


def replayed(requests: list[Request], *overrides: str) -> Outcome:
    return play.replay(build_run(configured(overrides), command="replay", overrides=overrides), requests)


# --- simulations ---


def test_the_other_samples_begin_when_the_prompt_is_computed_and_compute_its_last_token_only() -> None:
    """17 s for the prompt; 3 s for a step of one decode token and two last tokens; then 9 steps of 3 tokens and one of 2."""
    outcome = serve(small_engine(gpu=20), ask(A, output=11), samples={0: 3})
    assert outcome.ttft_s[0] == seconds(17)
    assert outcome.e2e_s[0] == seconds(17 + 3 + 9 * 3 + 2)
    assert outcome.tpot_s[0] == seconds((9 * 3 + 2) / 10)
    assert hits(outcome, 0) == (0, 0, 0)


def test_they_share_the_full_pages_of_the_prompt() -> None:
    """28 tokens take 7 pages, of which three samples share 4."""
    outcome = serve(small_engine(gpu=20), ask(A, output=11), samples={0: 3})
    assert outcome.tiers["gpu"].peak_pages == 4 + 3 * 3
    assert outcome.tiers["gpu"].inserted_pages == 4


def test_a_request_ends_when_all_of_its_samples_have() -> None:
    """Only one runs at a time: 17 + 10, then 1 + 10. The follower waits for both."""
    engine = small_engine(gpu=20, max_running_requests=1)
    outcome = serve(engine, ask(A, output=11), ask(B, 1000, after=0), samples={0: 2})
    assert outcome.e2e_s[0] == seconds(17 + 10 + 1 + 10)
    assert outcome.arrival_s[1] == outcome.e2e_s[0]


def test_a_request_whose_samples_do_not_fit_together_is_rejected() -> None:
    for gpu, status in ((13, FINISHED), (12, REJECTED)):
        outcome = serve(small_engine(gpu=gpu), ask(A, output=11), ask(B, 100), samples={0: 3})
        assert outcome.status.tolist() == [status, FINISHED]
        again = replayed(
            sampled(make_requests([ask(A, output=11), ask(B, 100)]), {0: 3}), "page_tokens=4", f"tiers.gpu.capacity={gpu}pages"
        )
        assert again.status.tolist() == [status, FINISHED]


def test_a_sample_of_pairs_of_tokens_computes_the_last_pair_again() -> None:
    """17 tokens are 16 pairs, in four pages: the second sample needs a fifth while it computes the last pair, for its token."""
    request = replace(make_requests([ask("abcd")])[0], samples=2, bigram=True)
    assert (request.prompt_tokens, request.prompt_pages) == (17, 4)
    assert request.pages_with_all(4, 4) == 5
    assert replace(request, bigram=False).pages_with_all(4, 4) == 4


@pytest.mark.parametrize("bigram", [False, True])
def test_a_sample_computes_an_image_again_in_which_its_hit_would_end(bigram: bool) -> None:
    """14 tokens have three full pages, in which an image of 13 tokens has not ended: no hit is left to the second sample."""
    request = replace(make_requests([ask("abcd")])[0], prompt_tokens=14, runs=((0, 3),), prompt_pages=3, bigram=bigram)
    request = replace(request, samples=2, images=((0, 13),), output_tokens=1)
    assert request.pages_with_all(3, 4) == 3 + 3
    assert replace(request, images=((0, 12),)).pages_with_all(3, 4) == 3
    for gpu, status in ((6, FINISHED), (5, REJECTED)):
        settings = "page_tokens=4", f"tiers.gpu.capacity={gpu}pages", "replay.hold_output=false"
        assert replayed([request], *settings).status.tolist() == [status]


def test_samples_count_as_one_use_of_the_prompt() -> None:
    engine = small_engine(gpu=30)
    serve(engine, ask(A, output=5), ask(A, 100, output=5), samples={0: 4, 1: 3})
    assert [node.hits for node in engine.cache.tree.root.descendants()] == [2]


def test_output_tokens_of_all_samples_count_for_the_throughput() -> None:
    requests = sampled(make_requests([ask(A, output=11)]), {0: 3})
    overrides = ("page_tokens=4", "tiers.gpu.capacity=100pages")
    result = kvsim.simulate(Trace(name="x", requests=requests, page_tokens=4, block_tokens=None), *overrides[1:])
    rates = result.record["throughput"]
    assert rates["output_tokens_per_s"] == pytest.approx(33 * rates["requests_per_s"])


# --- replays ---


def slow_replay(requests: list[Request], capacity: int, page_tokens: int) -> list[int]:
    """Hit pages of an LRU tier, page by page, where each request ends before the next begins; -1 for one that is rejected."""
    used: dict[int, tuple[int, int]] = {}
    found: list[int] = []
    for now, request in enumerate(requests):
        pages = pages_of(request.runs)
        shared = len(pages)
        has_last_token = shared * page_tokens >= request.prompt_tokens
        in_all = shared + request.samples * (-(-(request.prompt_tokens + request.output_tokens) // page_tokens) - shared)
        if in_all + (request.samples > 1 and has_last_token) > capacity:
            found.append(-1)
            continue
        usable = pages[: (request.prompt_tokens - 1) // page_tokens]
        found.append(next((at for at, page in enumerate(usable) if page not in used), len(usable)))
        held = -(-(request.prompt_tokens + max(request.output_tokens, 1) - 1) // page_tokens) - shared
        again = has_last_token and bool(request.samples > 1 or used.keys() >= set(pages))
        keep = set(pages)
        peak = shared + max(request.samples * held, again)
        for page in sorted(used, key=lambda page: (used[page][0], -used[page][1])):
            if len(used.keys() - keep) + peak <= capacity:
                break
            if page not in keep:
                del used[page]
        used.update({page: (now, depth) for depth, page in enumerate(pages)})
    return found


@pytest.mark.parametrize("seed", range(9))
def test_a_replay_hits_what_a_slow_model_hits(seed: int) -> None:
    rng = Random(seed)
    requests = sampled(
        conversations(seed, requests=60), {number: rng.choice([1, 1, 2, 3, 5]) for number in range(60 * (seed > 2))}
    )
    capacity = rng.choice([30, 45, 70])
    outcome = replayed(requests, f"tiers.gpu.capacity={capacity}pages")
    rows = np.where(outcome.status == REJECTED, -1, outcome.hit_pages[:, 0]).tolist()
    assert rows == slow_replay(requests, capacity, 16)
    assert outcome.tiers["gpu"].peak_pages <= capacity


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_replay_hits_what_a_simulation_hits_whose_requests_do_not_overlap(eviction: str) -> None:
    if eviction == "random":
        pytest.skip("the two draw in different orders while samples decode at the same time")
    rng = Random(eviction)
    requests = sampled(conversations(), {number: rng.choice([1, 2, 3]) for number in range(40)})
    outcome = check(eviction, requests, "tiers.gpu.capacity=60pages", eviction=policy("eviction", eviction))
    assert outcome.hit_pages.sum() > 0


def test_those_in_flight_finish_for_room_between_two_samples() -> None:
    """The first holds 5 pages of 10. Of the second, one sample fits beside it; for the other the first one ends."""
    requests = sampled(make_requests([ask(A, output=0), ask(B, output=0), ask(A, output=0)]), {1: 2})
    outcome = replayed(requests, "page_tokens=4", "tiers.gpu.capacity=10pages", "replay.in_flight=9")
    assert outcome.status.tolist() == [FINISHED] * 3
    assert outcome.tiers["gpu"].peak_pages == 10
    assert outcome.hit_pages[2].tolist() == [4, 0, 0]


def test_a_request_that_persistent_prompts_leave_no_room_gives_back_what_it_has() -> None:
    requests = sampled(make_requests([ask(A, output=0), ask(B, output=0), ask("uv", output=0)]), {1: 3})
    requests[0].persistent = True
    outcome = replayed(requests, "page_tokens=4", "tiers.gpu.capacity=9pages", "replay.in_flight=9")
    assert outcome.status.tolist() == [FINISHED, REJECTED, FINISHED]


@pytest.mark.parametrize("hold_output", ["true", "false"])
def test_bounds_leave_out_a_request_whose_samples_lack_room_to_compute_the_last_token_again(hold_output: str) -> None:
    """The prompt fills 4 pages of 4; a second sample needs a fifth."""
    requests = sampled(make_requests([ask(A, tokens=0, output=0), ask(A, tokens=0, output=0)]), {1: 2})
    for eviction in ("lru", "belady"):
        settings = ("page_tokens=4", "tiers.gpu.capacity=4pages", f"eviction={eviction}", f"replay.hold_output={hold_output}")
        assert replayed(requests, *settings).status.tolist() == [FINISHED, REJECTED]


# --- answers ---


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_every_sample_may_have_an_answer_of_its_own_that_is_cached(tmp_path: Path, command: str) -> None:
    lines = [
        {"token_ids": [1, 2, 3], "output_length": 3, "n": 2, "output_token_ids": [[4, 5, 6], [7, 8, 9]], "timestamp": 0},
        {"token_ids": [1, 2, 3, 4, 5, 6, 20], "output_length": 1, "output_token_ids": [1], "timestamp": 100_000},
        {"token_ids": [1, 2, 3, 7, 8, 9, 20], "output_length": 1, "output_token_ids": [1], "timestamp": 200_000},
    ]
    trace = kvsim.load_trace("tokens", path=write(tmp_path / "trace.jsonl", lines), page_tokens=1)
    result = getattr(kvsim, command)(trace, "tiers.gpu.capacity=40pages", "rules.cache_output=true")
    assert result.hit_pages[:, 0].tolist() == [0, 5, 5]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"n": 0}, "n must be from 1 to 16384, not 0"),
        ({"n": -2}, "n must be from 1 to 16384, not -2"),
        ({"n": 1.5}, "n must be a whole number from 1 to 16384, not 1.5"),
        ({"n": "2"}, 'n must be a whole number from 1 to 16384, not "2"'),
        ({"n": float("nan")}, "not JSON: JSON is malformed: invalid character (byte 50)"),
        ({"n": 2, "output_token_ids": [1, 2]}, "output_token_ids must be a list of lists of non-negative integers"),
        ({"n": 2, "output_token_ids": [[1, 2], [1, -2]]}, "output_token_ids must be a list of lists of non-negative integers"),
        ({"n": 2, "output_token_ids": [[1, 2]]}, "output_token_ids has 1 answers, but n is 2"),
        ({"n": 2, "output_token_ids": [[1, 2], [1]]}, "output_token_ids has 1 tokens, but output_length is 2"),
        ({"output_token_ids": [[1, 2]]}, "output_token_ids must be a list of non-negative integers"),
    ],
)
def test_a_bad_field_names_its_line(tmp_path: Path, line: dict[str, Any], problem: str) -> None:
    good = {"token_ids": [1, 2, 3], "output_length": 2}
    path = write(tmp_path / "trace.jsonl", [good, good | line])
    with pytest.raises(TraceError) as error:
        kvsim.load_trace("tokens", path=path, page_tokens=1)
    assert str(error.value).startswith(f"{path}:2: {problem}")


def test_block_hashes_have_samples_too_but_no_unique_answers_for_them(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [{"timestamp": 0, "input_length": 512, "output_length": 9, "hash_ids": [1], "n": 3}])
    assert [request.samples for request in Mooncake(path=path).load(512).requests] == [3]
    assert Mooncake(path=path, answers="inferred").load(512).requests[0].output_runs == ()
    with pytest.raises(TraceError, match=r":1: n is 3, but answers=unique knows one answer to each prompt: set answers=none"):
        Mooncake(path=path, answers="unique").load(512)


# --- what has no samples ---


def test_bounds_hold_for_samples_unless_several_answers_are_cached() -> None:
    requests = sampled(conversations(), dict.fromkeys(range(40), 2))
    trace = Trace(name="x", requests=requests, page_tokens=16, block_tokens=None)
    bound = kvsim.replay(trace, "eviction=belady", "tiers.gpu.capacity=60pages")
    lru = kvsim.replay(trace, "tiers.gpu.capacity=60pages")
    assert bound.record["rejected"] == lru.record["rejected"] and bound.hit_rate >= lru.hit_rate > 0
    requests[0] = replace(requests[0], sample_output_runs=((),))
    with pytest.raises(UsageError, match="Belady is not an exact bound where several answers to a prompt are cached: set rules"):
        kvsim.replay(trace, "eviction=belady", "rules.cache_output=true", "tiers.gpu.capacity=60pages")
    assert kvsim.replay(trace, "rules.cache_output=true", "tiers.gpu.capacity=60pages").record.get("bounds") in (None, {})
