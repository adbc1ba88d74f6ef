"""Images that no hit ends inside. See small.py for the round numbers: a page has 4 tokens."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvsim
from kvsim.core.request import Request
from kvsim.engine.outcome import Outcome
from kvsim.errors import TraceError, UsageError
from kvsim.plans.build import build_run
from kvsim.run import play
from kvsim.trace.base import Trace
from tests.engine.configurations import configured
from tests.engine.small import ask, check_idle, eager, hits, make_requests, small_engine
from tests.replaying.test_replay_is_simulation import HYBRID, STATE_TIERS, check, policy, tiers_of
from tests.workloads import conversations, make_request, pages_of

A = "abcd"


def with_images(requests: list[Request], images: dict[int, tuple[tuple[int, int], ...]]) -> list[Request]:
    for number, stretches in images.items():
        requests[number].images = stretches
    return requests


def draw_images(requests: list[Request], seed: int) -> list[Request]:
    """Give most requests up to three images of up to five pages, equal where prompts are likely to be."""
    for request in requests:
        rng = Random(f"{seed} {request.runs[0] if request.runs else 0}")
        at, images = 0, list[tuple[int, int]]()
        for _ in range(rng.randrange(4)):
            begin = at + rng.randrange(60)
            at = begin + rng.randrange(1, 80)
            if at > request.prompt_tokens:
                break
            images.append((begin, at))
        request.images = tuple(images)
    return requests


def replayed(requests: list[Request], *overrides: str) -> Outcome:
    return play.replay(build_run(configured(overrides), command="replay", overrides=overrides), requests)


@pytest.mark.parametrize(
    ("images", "pages", "left"),
    [
        ((), 5, 5),
        (((8, 12),), 5, 5),
        (((8, 20),), 5, 5),  # wholly cached: it ends where the hit does
        (((8, 21),), 5, 2),  # its last token is not cached
        (((9, 21),), 5, 2),  # cut back to a page boundary
        (((20, 30),), 5, 5),  # it begins where the hit ends
        (((0, 100),), 5, 0),
        (((0, 6), (10, 14), (17, 30)), 5, 4),
        (((0, 10), (11, 14), (14, 30)), 5, 0),  # every page that holds the end of one holds the begin of the next
    ],
)
def test_a_hit_ends_at_a_page_boundary_outside_every_image(images: tuple[tuple[int, int], ...], pages: int, left: int) -> None:
    request = make_request(range(10), prompt_tokens=40, images=images)
    assert request.pages_outside_images(pages, 4) == left


def test_a_match_is_cut_back_before_an_image_of_which_a_part_is_cached() -> None:
    """The second prompt has the first two pages in common with the first one, and an image of tokens 6 to 14."""
    requests = with_images(make_requests([ask(A), ask("abxy", 100), ask("abxy", 200)]), {1: ((6, 14),), 2: ((6, 14),)})
    engine = small_engine(gpu=20)
    outcome = engine.run(requests)
    assert [hits(outcome, index)[0] for index in range(3)] == [0, 1, 4]
    check_idle(engine)
    assert replayed(requests, "page_tokens=4", "tiers.gpu.capacity=20pages").hit_pages[:, 0].tolist() == [0, 1, 4]


def test_pages_below_the_gpu_are_loaded_only_up_to_an_image() -> None:
    """All 4 pages are in the CPU tier. With an image of tokens 9 to 17, the prompt's last one included, two are loaded."""
    requests = with_images(make_requests([ask(A), ask("efgh", 100), ask(A, 200)]), {2: ((9, 17),)})
    engine = small_engine(gpu=5, cpu=20)
    outcome = engine.run(requests)
    assert hits(outcome, 2) == (0, 2, 0)
    assert engine.cache.counts.loaded_pages == 2
    check_idle(engine)


def test_what_a_prefetch_policy_leaves_below_may_end_inside_an_image() -> None:
    """The GPU has the first page; the policy loads no fewer than 100 tokens, so the hit would end inside the image."""
    requests = with_images(make_requests([ask("abcd"), ask("axyz", 100), ask("a", 200), ask("abcd", 300)]), {3: ((2, 16),)})
    plain = small_engine(gpu=5, cpu=20, disk=20, prefetch=eager(load_min_tokens=100))
    assert hits(plain.run(make_requests([ask("abcd"), ask("axyz", 100), ask("a", 200), ask("abcd", 300)])), 3) == (1, 0, 0)
    engine = small_engine(gpu=5, cpu=20, disk=20, prefetch=eager(load_min_tokens=100))
    assert hits(engine.run(requests), 3) == (0, 0, 0)
    check_idle(engine)


def slow_replay(requests: list[Request], capacity: int, page_tokens: int) -> list[int]:
    """Hit pages of an LRU tier, page by page, where each request ends before the next begins and answers take no room.

    Pages after the hit are computed in new slots, even those that are cached, which may make room for them.
    """
    used: dict[int, tuple[int, int]] = {}
    found: list[int] = []
    for now, request in enumerate(requests):
        pages = pages_of(request.runs)
        usable = pages[: (request.prompt_tokens - 1) // page_tokens]
        hit = next((at for at, page in enumerate(usable) if page not in used), len(usable))
        while any(begin < hit * page_tokens < end for begin, end in request.images):
            hit -= 1
        found.append(hit)
        missing = len(used) + len(pages) - hit - capacity
        victims = sorted(used.keys() - set(pages[:hit]), key=lambda page: (used[page][0], -used[page][1]))
        for page in victims[: max(0, missing)]:
            del used[page]
        used.update({page: (now, depth) for depth, page in enumerate(pages)})
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_hits_what_a_slow_model_hits(seed: int) -> None:
    requests = draw_images(conversations(2 * seed, requests=60), seed)
    capacity = max([request.prompt_pages for request in requests]) + 12
    outcome = replayed(requests, "replay.hold_output=false", f"tiers.gpu.capacity={capacity}pages")
    plain = replayed(conversations(2 * seed, requests=60), "replay.hold_output=false", f"tiers.gpu.capacity={capacity}pages")
    expected = slow_replay(requests, capacity, 16)
    assert outcome.hit_pages[:, 0].tolist() == expected
    assert plain.hit_pages.sum() >= sum(expected)


@pytest.mark.parametrize("shape", ["two", "three", "disk below gpu", "both below gpu"])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "arc", "s3_fifo"])
def test_a_replay_hits_what_a_simulation_hits_whose_requests_do_not_overlap(shape: str, eviction: str) -> None:
    requests = draw_images(conversations(4, requests=40), 7)
    outcome = check(shape, requests, *tiers_of(shape), "placement=write_back", eviction=policy("eviction", eviction))
    if shape == "two":  # elsewhere, too little room on the way from disk may shorten a load that has begun
        for request, pages in zip(requests, outcome.hit_pages.sum(axis=1).tolist(), strict=True):
            assert not any(begin < pages * 16 < end for begin, end in request.images)


@pytest.mark.parametrize("checkpoint", ["every_page", "last", "interval"])
def test_recurrent_states_inside_an_image_are_not_begun_from(checkpoint: str) -> None:
    requests = conversations(page_tokens=256, requests=30)
    for request in draw_images(requests, 3):
        request.images = tuple((16 * begin, min(16 * end, request.prompt_tokens)) for begin, end in request.images)
        request.images = tuple(image for image in request.images if image[0] < image[1])
    for own_room in ((), ("tiers.gpu.states=4states", "tiers.cpu.states=3states")):
        overrides = [*tiers_of("two", **STATE_TIERS), *HYBRID, "checkpoint=last", "placement=write_back", *own_room]
        outcome = check(f"{own_room}", requests, *overrides, checkpoint=policy("checkpoint", checkpoint))
        for request, pages in zip(requests, outcome.hit_pages.sum(axis=1).tolist(), strict=True):
            assert not any(begin < pages * 256 < end for begin, end in request.images)


# --- traces ---


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("name", ["tokens", "mooncake"])
def test_traces_have_images(tmp_path: Path, name: str) -> None:
    prompt = {
        "tokens": {"token_ids": list(range(8)), "output_length": 1},
        "mooncake": {"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2], "output_length": 1},
    }[name]
    path = write(tmp_path / "trace.jsonl", [prompt | {"images": [[5, 7], [0, 5]]}, prompt])
    first, second = kvsim.load_trace(name, path=path, page_tokens=1 if name == "tokens" else 512).requests
    assert first.images == ((0, 5), (5, 7)) and second.images == ()


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ("x", 'images must be a list, not "x"'),
        ([1], "images must be a list of [begin, end] within the prompt of 8 tokens, not 1"),
        ([[1, 2, 3]], "images must be a list of [begin, end] within the prompt of 8 tokens, not [1, 2, 3]"),
        ([[-1, 2]], "images must be a list of [begin, end] within the prompt of 8 tokens, not [-1, 2]"),
        ([[3, 3]], "images must be a list of [begin, end] within the prompt of 8 tokens, not [3, 3]"),
        ([[3, 9]], "images must be a list of [begin, end] within the prompt of 8 tokens, not [3, 9]"),
        ([[3, 4.5]], "images must be a list of [begin, end] within the prompt of 8 tokens, not [3, 4.5]"),
        ([[3, float("nan")]], "not JSON: JSON is malformed: invalid character (byte 75)"),
        ([[4, 8], [1, 5]], "images must not overlap: one begins at token 4, inside [1, 5]"),
    ],
)
def test_bad_images_name_their_line(tmp_path: Path, images: object, problem: str) -> None:
    good = {"token_ids": list(range(8)), "output_length": 1}
    path = write(tmp_path / "trace.jsonl", [good, good | {"images": images}])
    with pytest.raises(TraceError) as error:
        kvsim.load_trace("tokens", path=path)
    assert str(error.value) == f"{path}:2: {problem}"


# --- what has no images ---


def trace_with_images() -> Trace:
    return Trace(name="x", requests=draw_images(conversations(), 0), page_tokens=16, block_tokens=None)


def test_rules_of_an_engine_refuse_images() -> None:
    with pytest.raises(UsageError, match="rules: the trace has images that no hit may end inside, which an engine's own rules"):
        kvsim.replay(trace_with_images(), "rules=vllm")


def test_bounds_refuse_images() -> None:
    with pytest.raises(UsageError, match="Belady is not an exact bound for a trace that has images that no hit may end inside"):
        kvsim.replay(trace_with_images(), "eviction=belady", "tiers.gpu.capacity=40pages")
    with pytest.raises(UsageError, match="kvsim curve: the trace has images that no hit may end inside, which no curve"):
        kvsim.curve(trace_with_images())
    assert not kvsim.replay(trace_with_images()).record.get("bounds")
