"""FastDeploy's prefix cache: its replay rules one by one, then random and real traces; and its other behaviour on the core, with
the choices of ``preset=fastdeploy``."""

from pathlib import Path
from typing import Any

import hydra
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Event

from kvsim.core.cache import CLAIMED, Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.transfer import Transfer
from kvsim.core.tree import INCOMING, LEAVING, READY
from kvsim.engine.outcome import FINISHED, REJECTED
from kvsim.engine.prefetching import Prefetching
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.replaying.replay import Replay
from kvsim.replaying.server import CacheServer
from kvsim.replaying.settings import ReplaySettings
from kvsim.run.play import check_answers, replay
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.page_hasher import PageHasher
from tests.core.small import make_tiers, small_cache
from tests.engine.small import ask, check_idle, eager, hits, seconds, small_engine
from tests.engine.small import make_requests as engine_requests
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_swaps import SlowSwaps
from tests.engines.small_swaps import Small, make_cache, play
from tests.workloads import EXAMPLES, as_records, branching_requests, conversations, make_requests, random_requests

PAGE = 4


def keys(tokens: list[int], **extra: Any) -> list[int]:
    return PageHasher(PAGE).keys(tokens, **extra)


def preset(*overrides: str, command: str = "replay") -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        return build_run(hydra.compose("config", overrides=["preset=fastdeploy", *overrides]), command=command)


def test_page_keys_are_chained() -> None:
    page, other = [1, 2, 3, 4], [5, 6, 7, 8]
    assert keys(page + page)[0] == keys(page + other)[0] == keys(page)[0]
    assert keys(page + page)[1] != keys(page)[0]
    assert keys(page + page)[1] != keys(other + page)[1]


def test_multimodal_hashes_join_the_key_of_every_page_that_their_span_touches() -> None:
    tokens = [0] * 16
    plain, image = keys(tokens), keys(tokens, spans=[(6, 10, "image")])
    assert image[0] == plain[0]
    assert all(one != other for one, other in zip(image[1:], plain[1:], strict=True))
    # In the second page the same tokens stand for the same image, in the third one for another.
    halves = [keys(tokens, spans=[(6, 8, "image"), (8, 10, second)]) for second in ("image", "other")]
    assert halves[0][:2] == halves[1][:2] and halves[0][2] != halves[1][2]


def test_a_page_is_on_the_device_or_on_the_host_or_swapping_either_way() -> None:
    cache = small_cache(gpu=2, cpu=4, placement=Exclusive)
    cache.use("ab")
    node = cache.node("ab")
    assert node.state == [READY, 0]
    lease = cache.look("xy")
    assert cache.admit(lease, 2, 100.0)
    assert node.state == [LEAVING, INCOMING]
    cache.move(lease.waits)
    assert node.state == [0, READY]
    cache.release(lease)
    lease = cache.admitted("ab")
    (swap,) = cache.load(lease, 200.0).transfers
    assert node.state == [INCOMING, READY]
    cache.move([swap])
    assert node.state == [READY, 0]


def test_a_node_matched_while_it_is_swapped_out_is_used_from_the_gpu_again_and_its_host_slots_are_given_back() -> None:
    cache = small_cache(gpu=4, cpu=4, placement=Exclusive)
    cache.use("abcd")
    lease = cache.look("xy")
    assert cache.admit(lease, 2, 100.0)
    (swap,) = lease.waits
    assert cache.begin(swap, 101.0).can_run and cache.carried(swap) == "cd"
    cache.release(lease)
    again = cache.admitted("abcd")
    assert (again.gpu_pages, again.lower_pages) == (4, 0) and cache.counts.revived_pages == 2
    assert cache.tiers[1].pool.free == 2  # the copy goes on
    cache.finish(swap, 102.0)
    assert cache.tiers[1].pool.free == 4 and (cache.on("gpu"), cache.on("cpu")) == ("abcd", "")
    cache.release(again)
    cache.check()


def test_swaps_to_the_gpu_finish_before_the_request_runs() -> None:
    assert preset(command="simulate").engine.overlap == "none"
    engine = small_engine(gpu=5, cpu=20, placement=Exclusive, overlap="none")
    outcome = engine.serve(ask("abcd"), ask("efgh", 100), ask("abcd", 200))
    assert hits(outcome, 2) == (0, 4, 0)
    assert outcome.ttft_s[2] == seconds(4 + 4 + 1)  # e to h are written out, a to d are read, one token is computed


def test_the_least_recently_used_leaves_without_users_leave() -> None:
    cache = small_cache(gpu=6, cpu=12, placement=Exclusive)
    cache.use("ab")
    cache.use("cd")
    running = cache.run("ab")
    cache.use("efgh")
    assert (cache.on("gpu"), cache.on("cpu")) == ("abefgh", "cd")
    assert cache.fails("pqrst")
    cache.release(running)


@pytest.mark.parametrize("kind", ["replayed", "simulated"])
def test_persistent_nodes_never_leave(kind: str) -> None:
    words = ["ab", "cdef", "ghij", "abx", "klmno"]
    if kind == "simulated":
        engine = small_engine(gpu=7, cpu=20, placement=Exclusive)
        requests = engine_requests([ask(word, 100.0 * at) for at, word in enumerate(words)])
        requests[0].persistent = True
        outcome = engine.run(requests)
        engine.cache.check()
        on_gpu = [node for node in engine.cache.tree.root.descendants() if node.state[0] and node.depth == 0]
        # Five pages and a partial one fit beside the two of the first prompt only if these left.
        assert outcome.status.tolist() == [FINISHED] * 4 + [REJECTED]
        engine.cache.reset()
        check_idle(engine)
    else:
        requests = make_requests(words)
        requests[0].persistent = True
        tiers, edges = make_tiers([6, 20], [LRU(), LRU()], [Exclusive()], slots=True, page_tokens=1)
        cache = Cache(tiers, edges, Rules(recompute_last_token=False), 1)
        outcome = Replay(CacheServer(cache, Prefetching(cache, NoPrefetch(), Offer)), ReplaySettings()).run(requests)
        cache.check()
        on_gpu = [node for node in cache.tree.root.descendants() if node.state[0] and node.depth == 0]
        assert outcome.status.tolist() == [FINISHED] * 4 + [REJECTED]
        cache.reset()
        cache.check()
        assert cache.gpu.pool.free == 6
    assert outcome.hit_pages[3].tolist() == [2, 0, 0]
    assert any(node.pages >= 2 and node.runs[0][0] == 0 for node in on_gpu)


def test_finished_requests_may_cache_their_output_pages() -> None:
    cache = small_cache(gpu=8, cpu=8, placement=WriteThrough)
    cache.core.rules = Rules(recompute_last_token=False, cache_output=True)
    follow_up = cache.request("abcde")
    first = cache.request("ab", output_tokens=3)
    first.output_runs = tuple((start, 1) for (start, _) in [(follow_up.runs[0][0] + 2, 1), (follow_up.runs[0][0] + 3, 1)])
    lease = cache.match(first)
    assert cache.admit(lease, 5, 1.0) and cache.claim(lease, 1.0) == CLAIMED
    cache.move(cache.insert(lease, 2.0))
    assert cache.on("gpu") == "ab"
    cache.move(cache.finish_request(lease))
    cache.check()
    # The last token of the answer has no KV; the others are offered to the tiers below like anything that was used.
    assert (cache.on("gpu"), cache.on("cpu"), cache.gpu.pool.free) == ("abcd", "abcd", 4)
    assert cache.use("abcde") == (4, 0, 0)


def test_the_preset_caches_answers_if_the_trace_knows_them() -> None:
    built = preset("rules.cache_output=true", "trace.limit=300", "tiers.gpu.capacity=40GiB", command="simulate")
    requests = built.trace.load(built.page_tokens).requests
    check_answers(built, requests)
    requests[7].output_runs = None
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


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_cached_answers_leak_nothing_in_simulated_time(tiers: int) -> None:
    source = preset("trace.limit=150", "page_tokens=16").trace
    requests = source.load(16).requests
    hit = {}
    for cache_output in (False, True):
        sizes = dict(zip(("gpu", "cpu", "disk"), (6_000, 8_000, 20_000)[:tiers], strict=False))
        engine = small_engine(
            **sizes, page_tokens=16, placement=WriteBack, hardware={"flops_per_s": 1e20}, cache_output=cache_output
        )
        for request in requests[::20]:
            request.persistent = cache_output
        outcome = engine.run(requests)
        engine.cache.check()
        assert not engine.cache.leases and not engine.cache.in_flight
        hit[cache_output] = int(outcome.hit_pages.sum())
    assert hit[True] > hit[False]


def test_a_storage_look_up_takes_gpu_pages_for_the_whole_prompt_first_and_gives_back_those_that_storage_did_not_have() -> None:
    cache = small_cache(gpu=8, cpu=8, disk=20, placement=WriteThrough)
    cache.use("abcd")
    cache.use("pqrstuvw")
    lease = cache.look("abcdef")
    assert lease.disk_pages == 4
    assert cache.admit(lease, 6, 100.0, 4)
    assert cache.gpu.pool.count(lease.slots) == 6  # all six pages are taken before anything is read
    fetch, load = cache.load(lease, 101.0).transfers
    assert cache.begin(fetch, 102.0).can_run
    cache.abort(fetch, 3, 103.0)
    cache.move([load])
    # The fourth page did not come: its room is the request's again, which computes into it.
    assert load.arrived_pages == 3
    cache.move(cache.insert(lease, 104.0))
    cache.release(lease)
    cache.check()
    assert set("abcdef") <= set(cache.on("gpu"))


class TwoRanks(SimulatedSubstrate):
    """Each page lies on two ranks, and storage has lost the second rank's part of the last page that it is asked for."""

    def copy(self, transfer: Transfer) -> Event:
        arrived = super().copy(transfer)
        if transfer.name != "disk-cpu":
            return arrived
        answers = self.env.event()
        arrived.callbacks.append(lambda event: answers.succeed([event.value, event.value - 1]))
        return answers


def test_with_several_ranks_the_shortest_answer_counts() -> None:
    engine = small_engine(gpu=5, cpu=4, disk=40, prefetch=eager(stop="wait_complete"), overlap="none", make_substrate=TwoRanks)
    outcome = engine.serve(ask("abcd"), ask("efgh", 100), ask("abcd", 200))
    assert hits(outcome, 2) == (0, 0, 3)
    assert outcome.ttft_s[2] == seconds(8 + 3 + 4 + 1)
    assert outcome.prefetch["fetched_pages"] == 3


def test_prefill_and_decode_instances_compute_the_same_keys() -> None:
    prompt, spans = list(range(1, 15)), [(3, 6, "image")]
    prefill = PageHasher(PAGE).keys(prompt, spans=spans, lora="adapter", tenant=7)
    decode = PageHasher(PAGE).keys([*prompt, 99, 98], spans=spans, lora="adapter", tenant=7)
    assert prefill == decode[: len(prompt) // PAGE]


@pytest.mark.parametrize("ending", ["drained", "dropped"])
@pytest.mark.parametrize("direction", ["out", "in"])
def test_reset_on_weight_updates_drains_the_swaps_or_drops_them(ending: str, direction: str) -> None:
    cache = small_cache(gpu=4, cpu=8, placement=Exclusive)
    cache.use("abcd")
    if direction == "out":
        lease = cache.look("wxyz")
        assert cache.admit(lease, 4, 100.0)
        (swap,) = lease.waits
    else:
        cache.use("wxyz")
        lease = cache.admitted("abcd")
        (swap,) = cache.load(lease, 100.0).transfers
    assert cache.begin(swap, 101.0).can_run
    cache.reset()
    cache.check()
    if ending == "drained":
        cache.finish(swap, 102.0)
    else:
        cache.abort(swap, 1, 102.0)
    cache.release(lease)
    cache.check()
    assert cache.look("abcd").path == [] and not cache.residency.doomed and not cache.in_flight
    assert (cache.gpu.pool.free, cache.tiers[1].pool.free) == (4, 8)


# --- a replay: the engine's own rules ------------------------------------------------------------------------------------


def test_as_many_pages_leave_as_are_missing_however_many_slots_are_free() -> None:
    cache = Small(8)
    cache.use("abcdef", "wxyz")
    assert cache.on(0) == "abwxyz"
    assert cache.cache.gpu.pool.free == 2


def test_with_cpu_memory_room_for_the_whole_prompt_is_made_before_the_look_up() -> None:
    cache = Small(6, 6)
    cache.use("abcd")
    assert cache.use("abcdef") == (0, 4)
    assert cache.where == ("abcdef", "")


def test_without_cpu_memory_room_is_made_after_the_look_up() -> None:
    cache = Small(6)
    cache.use("abcd")
    assert cache.use("abcdef") == (4, 0)


@pytest.mark.parametrize(("tail", "hits"), [(0, (2, 0)), (1, (0, 3))])
def test_the_partial_page_needs_a_slot_too(tail: int, hits: tuple[int, int]) -> None:
    cache = Small(6, 6, page_tokens=4)
    cache.use("abc")
    assert cache.use("abc", tail=tail) == hits


def test_if_cpu_memory_is_short_it_deletes_as_many_pages_as_the_gpu_was_asked_for() -> None:
    cache = Small(4, 5)
    cache.use("ab", "cd", "wx", "yz")
    assert cache.where == ("wxyz", "abcd")
    cache.use("pqr")
    assert cache.where == ("ypqr", "cwxz")


def test_pages_that_arrive_are_not_among_those_deleted() -> None:
    cache = Small(4, 5)
    cache.use("ab", "cdef")
    assert cache.where == ("cdef", "ab")
    cache.use("wxyz")
    assert cache.where == ("wxyz", "cdef")


def test_the_pages_of_an_answer_are_taken_one_by_one() -> None:
    cache = Small(4, 4)
    cache.use("ab", "cd", "wx", "yz")
    # x makes room for the prompt, z and y for the second and third page of the answer.
    cache.use("w", output=3)
    assert cache.where == ("w", "cxyz")


def test_pages_that_make_room_for_an_answer_push_out_those_before_them() -> None:
    cache = Small(6, 2)
    cache.use("ab", "cd")
    cache.use("x", output=5)
    assert cache.where == ("x", "cd")


def test_an_answer_takes_free_slots_first() -> None:
    cache = Small(6)
    cache.use("abc")
    cache.use("x", output=3)
    assert cache.on(0) == "abx"


@pytest.mark.parametrize(("recompute", "hits"), [(True, (3, 0)), (False, (4, 0))])
def test_a_whole_prompt_found_is_used_whole_and_its_last_page_is_computed_in_place(
    recompute: bool, hits: tuple[int, int]
) -> None:
    cache = Small(4, recompute_last_token=recompute)
    cache.use("abcd")
    assert cache.use("abcd") == hits
    assert cache.on(0) == "abcd"


def test_of_a_whole_prompt_found_a_page_from_cpu_memory_does_not_count_if_there_is_one() -> None:
    cache = Small(8, 8)
    cache.use("abcd", "wxyz")
    cache.start("abc")
    assert cache.where == ("abcwxyz", "d")
    assert cache.start("abcd").hits == (3, 0, 0)
    assert cache.where == ("abcd", "wxyz")


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


def test_with_cpu_memory_an_attempt_without_room_looks_nothing_up() -> None:
    cache = Small(12, 12)
    cache.use("a", "b")
    cache.start("cdefgh")
    assert cache.attempt(cache.request("auvwxyz")) is None
    assert cache.where == ("cdefgh", "ab")


def test_a_request_without_room_for_its_answer_keeps_its_prompt_and_goes_on() -> None:
    cache = Small(6)
    running = cache.start("abc")
    request = cache.request("d", output=3)
    assert cache.attempt(request) is None
    assert cache.cache.gpu.pool.free == 0
    cache.finish(running)
    assert cache.attempt(request) is not None
    assert cache.on(0) == "abd"


def test_no_request_finishes_for_one_that_never_fits() -> None:
    requests = make_requests(["pq", "ab", "12345678", "cdef", "abx"])
    # ab is still running when cdef needs room, so only pq leaves.
    assert play(make_cache(7), requests, in_flight=2) == [(0, 0), (0, 0), (-1, 0), (0, 0), (2, 0)]


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


@pytest.mark.parametrize("setting", ["tiers.disk.capacity=1TiB", "rules.cache_output=true", "placement=write_back"])
def test_a_simulation_uses_kvsims_own_rules_with_the_same_settings(setting: str) -> None:
    plan = preset(setting, "rules.recompute_last_token=false", command="simulate")
    assert plan.rules == Rules(recompute_last_token=False, cache_output=setting.startswith("rules"))


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
    requests = chats[page_tokens][:600]
    mine = play(make_cache(gpu, cpu, page_tokens=page_tokens), requests, in_flight=in_flight)
    assert mine == list(SlowSwaps(gpu, cpu, page_tokens=page_tokens).play(requests, in_flight=in_flight))
    assert sum(hits for hits, _ in mine) > 300


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
