"""FastDeploy's prefix cache, behaviour by behaviour, on the core with the choices of ``preset=fastdeploy``."""

from typing import Any

import hydra
import pytest
from simpy import Event

from kvsim.build import build_run
from kvsim.core.cache import CLAIMED, Cache
from kvsim.core.request import Request
from kvsim.core.rules import Rules
from kvsim.core.transfer import Transfer
from kvsim.core.tree import INCOMING, LEAVING, READY
from kvsim.engine.outcome import FINISHED, REJECTED
from kvsim.engine.prefetching import Prefetching
from kvsim.engine.replay import Replay, ReplaySettings
from kvsim.errors import UsageError
from kvsim.plan import Plan
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.run import check_answers
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from kvsim.trace.page_hasher import PageHasher
from tests.core import page_rules
from tests.core.small import make_tiers, small_cache
from tests.engine.small import ask, check_idle, eager, hits, seconds, small_engine
from tests.engine.small import make_requests as engine_requests
from tests.engines.slow_pages import play, play_slowly
from tests.workloads import make_requests

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
        outcome = Replay(cache, Prefetching(cache, NoPrefetch(), Offer), ReplaySettings()).run(requests)
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
    built = preset("rules.cache_output=true", "trace.limit=300", "tiers.gpu.capacity=40GiB")
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


@pytest.mark.parametrize(("page_tokens", "gpu", "cpu", "in_flight"), [(16, 24, 90, 1), (16, 60, 30, 3), (512, 40, 60, 2)])
def test_conversations_hit_what_the_slow_model_hits(
    chats: dict[int, list[Request]], page_tokens: int, gpu: int, cpu: int, in_flight: int
) -> None:
    sizes = (f"tiers.gpu.capacity={gpu}pages", f"tiers.cpu.capacity={cpu}pages")
    plan = preset(f"page_tokens={page_tokens}", *sizes, f"replay.in_flight={in_flight}")
    rows = play(plan, chats[page_tokens])
    assert rows == play_slowly(plan, chats[page_tokens], [page_rules.exclusive()])
    assert sum(row[1] for row in rows if row) > 300
