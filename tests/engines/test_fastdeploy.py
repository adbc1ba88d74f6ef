"""FastDeploy's prefix cache: its replay rules one by one, then random and real traces; and its other behaviour on the core, with
the choices of ``preset=fastdeploy``."""

from math import nan
from pathlib import Path

import hydra
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.core.request import Request, Reset
from kvsim.core.rules import Rules
from kvsim.engines.fastdeploy.rules import FastDeployRules
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.run.play import check_answers, replay, with_known_answers
from kvsim.trace.mooncake import Mooncake
from tests.engine.small import ask, hits, seconds, small_engine
from tests.engine.test_images import draw_images
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_swaps import SlowSwaps
from tests.engines.small_swaps import Small, make_cache, play
from tests.workloads import EXAMPLES, as_records, branching_requests, conversations, make_requests, random_requests

PAGE = 4


def preset(*overrides: str, command: str = "replay") -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        return build_run(hydra.compose("config", overrides=["preset=fastdeploy", *overrides]), command=command)


def test_swaps_to_the_gpu_finish_before_the_request_runs() -> None:
    assert preset(command="simulate").engine.overlap == "none"
    engine = small_engine(gpu=5, cpu=20, placement=Exclusive, overlap="none")
    outcome = engine.serve(ask("abcd"), ask("efgh", 100), ask("abcd", 200))
    assert hits(outcome, 2) == (0, 4, 0)
    assert outcome.ttft_s[2] == seconds(4 + 4 + 1)  # e to h are written out, a to d are read, one token is computed


def test_the_preset_caches_answers_if_the_trace_knows_them() -> None:
    built = preset("trace.limit=300", "tiers.gpu.capacity=40GiB", command="simulate")
    requests = built.trace.load(built.page_tokens).requests
    assert with_known_answers(built, requests).rules.cache_output is True
    built = built.with_answers(True)
    check_answers(built, requests)
    requests[7].output_runs = None
    assert with_known_answers(preset(), requests).rules.cache_output is False
    with pytest.raises(UsageError, match=r"rules.cache_output: the trace does not contain output tokens"):
        check_answers(built, requests)


def test_rules_of_another_engine_do_not_know_persistent_prompts() -> None:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        built = build_run(hydra.compose("config", overrides=["rules=sglang"]), command="replay")
    requests = make_requests(["ab"])
    check_answers(built, requests)
    requests[0].persistent = True
    with pytest.raises(UsageError, match="rules: the trace has persistent prompts"):
        check_answers(built, requests)


# --- a replay: the engine's own rules ------------------------------------------------------------------------------------


def test_as_many_pages_leave_as_are_missing_however_many_slots_are_free() -> None:
    cache = Small(8)
    cache.use("abcdef", "wxyz")
    assert cache.on(0) == "abwxyz"
    assert cache.swaps.gpu.pool.free == 2


def test_with_cpu_memory_room_for_the_whole_prompt_is_made_before_the_look_up() -> None:
    cache = Small(6, 6)
    cache.use("abcd")
    assert cache.use("abcdef") == (0, 4)
    assert cache.where == ("abcdef", "")


def test_without_cpu_memory_room_is_made_after_the_look_up() -> None:
    cache = Small(6)
    cache.use("abcd")
    assert cache.use("abcdef") == (4, 0)


def test_if_cpu_memory_is_short_it_deletes_as_many_pages_as_the_gpu_was_asked_for() -> None:
    cache = Small(4, 5)
    cache.use("ab", "cd", "wx", "yz")
    assert cache.where == ("wxyz", "abcd")
    cache.use("pqr")
    assert cache.where == ("ypqr", "cwxz")


@pytest.mark.parametrize(("recompute", "hits"), [(True, (3, 0)), (False, (4, 0))])
def test_a_whole_prompt_found_is_used_whole_and_its_last_page_is_computed_in_place(
    recompute: bool, hits: tuple[int, int]
) -> None:
    cache = Small(4, recompute_last_token=recompute)
    cache.use("abcd")
    assert cache.use("abcd") == hits
    assert cache.on(0) == "abcd"


def test_a_look_up_counts_as_use_and_the_end_of_a_request_does_not() -> None:
    cache = Small(6)
    first = cache.start("ab")
    cache.use("cd")
    cache.finish(first)
    cache.use("xyz")
    assert cache.on(0) == "cxyz"
    cache.use("c")
    cache.use("pqr")
    assert cache.on(0) == "cpqr"


def test_an_attempt_without_room_keeps_what_it_has_evicted_and_used() -> None:
    cache = Small(12)
    cache.use("a", "b")
    running = cache.start("cdefgh")
    assert cache.attempt(cache.request("auvwxyz")) is None
    assert cache.on(0) == "acdefgh"
    cache.finish(running)
    cache.use("pqrstk")
    assert cache.on(0) == "apqrstk"


def test_a_request_without_room_for_its_answer_keeps_its_prompt_and_goes_on() -> None:
    cache = Small(6)
    running = cache.start("abc")
    request = cache.request("d", output=3)
    assert cache.attempt(request) is None
    assert cache.swaps.gpu.pool.free == 0
    cache.finish(running)
    assert cache.attempt(request) is not None
    assert cache.on(0) == "abd"


def test_pages_in_an_image_that_goes_on_behind_the_hit_are_computed_again_in_place() -> None:
    for image, pages in (((6, 13), 4), ((6, 18), 1), ((17, 18), 4), ((12, 40), 3)):
        for cpu in (0, 30):
            cache = Small(9, cpu, page_tokens=4)
            cache.use("abcd", tail=1)
            cache.use("pqrstuvwx"[: 9 if cpu else 1])
            request = cache.request("abcdx", tail=1)
            request.images = (image,)
            lease = cache.attempt(request)
            assert lease is not None and lease.hits == ((0, pages, 0) if cpu else (pages, 0, 0))


def cut_back(request: Request, row: tuple[int, ...], page_tokens: int) -> tuple[int, ...]:
    """Take pages out of a hit, deepest tier first, until it does not end inside an image."""
    left = list(row)
    while any(begin < sum(left) * page_tokens < end for begin, end in request.images):
        left[max(at for at, pages in enumerate(left) if pages)] -= 1
    return tuple(left)


@pytest.mark.parametrize(("gpu", "cpu", "storage"), [(90, 0, 0), (60, 30, 0), (60, 30, 200)])
def test_images_change_nothing_but_the_hits_that_end_inside_one(gpu: int, cpu: int, storage: int) -> None:
    rows = play(make_cache(gpu, cpu, storage, page_tokens=16), conversations(2, requests=100), in_flight=2)
    requests = draw_images(conversations(2, requests=100), 1)
    with_images = play(make_cache(gpu, cpu, storage, page_tokens=16), requests, in_flight=2)
    assert with_images == [cut_back(request, row, 16) for request, row in zip(requests, rows, strict=True)]
    assert with_images != rows


@pytest.mark.parametrize("mode", ["drain", "now"])
@pytest.mark.parametrize(("gpu", "cpu", "storage"), [(90, 0, 0), (60, 30, 0), (60, 30, 200)])
def test_after_a_reset_nothing_is_found(gpu: int, cpu: int, storage: int, mode: str) -> None:
    """After a reset at once, requests that run have their slots until they finish."""
    requests, sizes = conversations(2, requests=100), {"page_tokens": 16, "cache_output": True}
    requests[50].resets = (Reset(mode, nan),)
    rows = play(make_cache(gpu, cpu, storage, **sizes), requests, in_flight=3)
    before, after = (play(make_cache(gpu, cpu, storage, **sizes), some, in_flight=3) for some in (requests[:50], requests[50:]))
    assert rows[:50] == before
    if mode == "drain":
        assert rows[50:] == after
    assert sum(rows[50]) == 0 < sum(map(sum, rows[51:]))


def conversation_plan(*overrides: str) -> tuple[Plan, list[Request]]:
    return preset("page_tokens=16", *overrides), conversations(2, requests=50, page_tokens=16)


def test_cpu_memory_smaller_than_a_prompt_is_refused() -> None:
    plan, requests = conversation_plan("tiers.gpu.capacity=60pages", "tiers.cpu.capacity=19pages")
    with pytest.raises(UsageError, match=r"rules: FastDeploy loses .* has 20, and tiers.cpu.capacity is 19;"):
        replay(plan, requests)


@pytest.mark.parametrize(
    ("gpu", "cpu"), [("60pages", "20pages"), ("60pages", "0"), ("unlimited", "unlimited"), ("8pages", "8pages")]
)
def test_cpu_memory_needs_room_for_prompts_that_fit_the_gpu(gpu: str, cpu: str) -> None:
    outcome = replay(*conversation_plan(f"tiers.gpu.capacity={gpu}", f"tiers.cpu.capacity={cpu}"))
    assert outcome.hit_pages.sum() > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eviction=lfu", "rules: FastDeploy evicts what was used least recently, not by LFU: set eviction=lru"),
        ("placement=write_back", "rules: FastDeploy swaps pages, which WriteBack does not: set placement=exclusive"),
        ("placement=write_through", "rules: FastDeploy swaps pages, which WriteThrough does not: set placement=exclusive"),
    ],
)
def test_policies_that_fastdeploy_does_not_have_are_refused(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replay(*conversation_plan(override))


@pytest.mark.parametrize("tiers", [("gpu",), ("gpu", "cpu"), ("gpu", "cpu", "disk")])
def test_a_simulation_uses_these_rules_and_a_validation_kvsims_own_with_the_same_settings(tiers: tuple[str, ...]) -> None:
    rules = FastDeployRules(recompute_last_token=False, cache_output=True)
    assert rules.for_command("simulate", tiers) is rules
    assert rules.for_command("validate", tiers) == Rules(recompute_last_token=False, cache_output=True)
    assert rules.for_command("simulate", [*tiers, "remote"]) == Rules(recompute_last_token=False, cache_output=True)


def longest_prompt(requests: list[Request], gpu: int, *, page_tokens: int, holds_output: bool = True) -> int:
    """Pages of the longest prompt that fits the GPU with what it holds of its answer, 1 if none does; CPU memory must not be
    smaller."""
    sizes = [(request.prompt_tokens, request.prompt_tokens + request.output_tokens * holds_output) for request in requests]
    return max([-(-prompt // page_tokens) for prompt, total in sizes if total <= gpu * page_tokens], default=1)


# --- slower models, real traces, recorded hits ---------------------------------------------------------------------------


@pytest.mark.parametrize("hold_output", [True, False])
@pytest.mark.parametrize("tiers", [1, 2])
def test_random_traces_hit_as_in_the_slow_model(tiers: int, hold_output: bool) -> None:
    for seed in range(EXAMPLES // 2):
        requests = random_requests(seed)
        gpu, in_flight = 5 + seed % 19, 1 + seed % 4
        cpu = longest_prompt(requests, gpu, page_tokens=4, holds_output=hold_output) + seed % 7 * 3 if tiers == 2 else 0
        mine = play(make_cache(gpu, cpu, page_tokens=4), requests, in_flight=in_flight, hold_output=hold_output)
        slow = SlowSwaps(gpu, cpu, page_tokens=4)
        assert mine == list(slow.play(requests, in_flight=in_flight, hold_output=hold_output)), seed


@settings(max_examples=EXAMPLES)
@given(branching_requests(), st.integers(1, 16), st.integers(0, 12), st.booleans(), st.integers(1, 4))
def test_branching_prompts_hit_as_in_the_slow_model(
    requests: list[Request], gpu: int, spare: int, has_cpu: bool, in_flight: int
) -> None:
    cpu = longest_prompt(requests, gpu, page_tokens=4) + spare if has_cpu else 0
    mine = play(make_cache(gpu, cpu, page_tokens=4), requests, in_flight=in_flight)
    assert mine == list(SlowSwaps(gpu, cpu, page_tokens=4).play(requests, in_flight=in_flight))


@pytest.mark.parametrize(
    ("page_tokens", "gpu", "cpu", "in_flight"),
    [(16, 24, 90, 1), (16, 60, 30, 3), (512, 40, 60, 2), (512, 60, 0, 2), (16, 90, 0, 4)],
)
def test_conversations_hit_as_in_the_slow_model(
    chats: dict[int, list[Request]], page_tokens: int, gpu: int, cpu: int, in_flight: int
) -> None:
    requests = chats[page_tokens][:300]
    mine = play(make_cache(gpu, cpu, page_tokens=page_tokens), requests, in_flight=in_flight)
    assert mine == list(SlowSwaps(gpu, cpu, page_tokens=page_tokens).play(requests, in_flight=in_flight))
    assert sum(hits for hits, _ in mine) > 150


@pytest.mark.long
def test_random_traces_hit_as_in_the_model_beside_the_repository(shared: Path) -> None:
    model = reference(shared, "fastdeploy_model")
    model.PAGE = 4
    for seed in range(100, 300):
        requests = random_requests(seed, requests=100)
        gpu, in_flight = 5 + seed % 21, 1 + seed % 4
        cpu = longest_prompt(requests, gpu, page_tokens=4) + seed % 11 if seed % 3 else 0
        rows = model.play(as_records(requests), gpu, cpu, in_flight)
        mine = play(make_cache(gpu, cpu, page_tokens=4), requests, in_flight=in_flight)
        assert mine == [(row[1], max(0, row[2])) for row in rows], seed


@pytest.mark.parametrize("requests", [2_000, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize(("gpu", "cpu", "in_flight"), [(6_000, 0, 1), (6_000, 12_000, 1), (3_000, 3_000, 4)])
def test_conversation_hits_what_the_engine_hit(shared: Path, requests: int | None, gpu: int, cpu: int, in_flight: int) -> None:
    name = f"conv.fastdeploy_{gpu}_{cpu}" + (f"_inflight{in_flight}" if in_flight > 1 else "")
    trace = Mooncake(path=str(shared / "traces" / "mooncake_conversation_trace.jsonl.gz"), limit=requests).load(512)
    mine = play(make_cache(gpu, cpu, page_tokens=512), trace.requests, in_flight=in_flight)
    assert mine == golden_rows(shared, name, requests or len(mine))
