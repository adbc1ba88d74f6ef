"""SGLang's unified cache: one test for each of its rules, then random traces and what the engine hit."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvsim
from kvsim.core.request import Request, RetentionRange
from kvsim.core.serving import RulesError
from kvsim.engine.outcome import REJECTED
from kvsim.hardware.spec import HardwareSpec
from kvsim.trace.base import Trace
from tests.engine.small import HARDWARE, MODEL
from tests.engines.recorded import golden_rows_of, reference
from tests.engines.slow_unified import SlowUnified, play_slowly
from tests.engines.small import empty_cache
from tests.engines.small_unified import PLACEMENTS, STORED, Small, make_unified, play, recount
from tests.policies.small import POLICIES, policy_of
from tests.workloads import EXAMPLES, extents_of, pages_of, random_requests

SEED_WITHOUT_ROOM = 0
"""Draws requests for which a small host has no room."""

# --- answers and chunks --------------------------------------------------------------------------------------------------


def test_an_answer_is_a_node_of_its_own_without_its_last_token() -> None:
    cache = Small(20)
    cache.use("abc", answer="xyz")
    assert cache.gpu == ["abc", "xyz"]
    assert cache.use("abcxyzq") == (6, 0, 0)


def test_an_answer_that_others_have_computed_meanwhile_is_given_back() -> None:
    cache = Small(20)
    first, second = cache.start("abc", "xy"), cache.start("abc", "xy")
    cache.finish(first)
    cache.finish(second)
    assert (cache.gpu, cache.cache.gpu.pool.free) == (["ab", "c", "xy"], 15)


def test_without_answers_they_only_take_room() -> None:
    cache = Small(20, 5, cache_output=False)
    lease = cache.start("abc", "xyz")
    assert cache.cache.gpu.pool.free == 20 - 3 - 4
    cache.finish(lease)
    assert (cache.gpu, cache.cache.gpu.pool.free) == (["abc"], 17)


def test_an_answer_is_looked_up_only_as_far_as_it_is_part_of_a_prompt() -> None:
    cache = Small(20)
    cache.use("abc", answer="xyz")
    lease = cache.start("abc", "xyz")
    assert lease is not None and lease.hits == (2, 0, 0)


def test_pages_of_answers_without_an_id_take_room_until_they_leave() -> None:
    cache = Small(20)
    request = replace(cache.words.request("abc", output=5), output_runs=())
    lease = cache.cache.serve(request, 8, 0.0)
    assert lease is not None
    cache.cache.finish_request(lease)
    assert cache.cache.gpu.pool.free == 20 - 3 - 4


def test_each_chunk_of_a_prompt_is_a_node() -> None:
    cache = Small(20, chunk=2)
    cache.use("abcde")
    assert cache.gpu == ["ab", "cd", "e"]
    cache.use("abcdxyz")
    assert cache.gpu == ["ab", "cd", "e", "xy", "z"]


def test_chunks_count_one_hit_together() -> None:
    cache = Small(20, 20, chunk=2, write="write_through_selective")
    cache.use("abcd")
    assert cache.host == []
    cache.use("abcdef")
    assert cache.host == ["ab", "cd"]


# --- copies ----------------------------------------------------------------------------------------------------------------


def test_a_copy_takes_along_what_the_host_lacks_above_it_topmost_first() -> None:
    cache = Small(20, 6)
    cache.use("abcdefg")
    assert (cache.gpu, cache.host) == (["abcdefg"], [])
    cache.use("abc", tail=1)
    assert (cache.gpu, cache.host) == (["abc", "defg"], ["abc"])


def test_copies_of_a_chain_stop_at_the_first_without_room() -> None:
    cache = Small(30, 5, write="write_through_selective")
    cache.use("abc", "abcdefg")
    assert cache.host == ["abc"]
    cache.use("abcdefg")
    assert cache.host == ["abc"]
    cache.step()
    assert cache.cache.counts.no_room_pages == 4


def test_the_host_evicts_only_what_is_lacking_and_that_stays_gone() -> None:
    cache = Small(4, 5)
    cache.use("a", "b", "c", "d", tail=0)
    cache.use("pqr", tail=0)
    assert (cache.gpu, cache.host) == (["d", "pqr"], ["c", "d", "pqr"])
    cache.use("wxyz", tail=0)
    assert (cache.gpu, cache.host) == (["wxyz"], ["wxyz"])
    cache = Small(6, 5)
    cache.use("ab", "c", tail=0)
    cache.use("uvwxyz", tail=0)
    assert (cache.gpu, cache.host) == (["uvwxyz"], [])


def test_the_gpu_keeps_what_is_being_copied_until_the_acknowledgement() -> None:
    cache = Small(6, 20, copy_steps=2)
    cache.use("abcd", tail=0)
    assert cache.cache.gpu.evictable_pages == 0
    cache.step()
    assert cache.cache.gpu.evictable_pages == 0
    cache.step()
    assert cache.cache.gpu.evictable_pages == 4


def test_a_request_without_room_waits_for_copies_before_it_is_rejected() -> None:
    cache = Small(6, 20, copy_steps=3)
    cache.use("abcd", tail=0)
    assert cache.use("uvwxyz", tail=0) == (0, 0, 0)
    assert (cache.gpu, cache.host) == (["uvwxyz"], ["abcd", "uvwxyz"])
    assert cache.use("1234567", tail=0) is None


def test_a_node_that_is_cut_while_it_is_copied_is_acknowledged_in_both_parts() -> None:
    cache = Small(20, 20, copy_steps=3, storage=STORED)
    cache.use("abcd")
    cache.use("abxy")
    cache.step(6)
    assert (cache.host, cache.stored("abcd"), cache.stored("abxy")) == (["ab", "cd", "xy"], 4, 4)


# --- write-back ------------------------------------------------------------------------------------------------------------


def test_write_back_drops_doubles_before_it_evicts_the_host() -> None:
    cache = Small(4, 7, write="write_back")
    cache.use("ab", "c", "wxyz", tail=0)
    held = cache.start("ab")
    cache.step()
    assert (cache.gpu, cache.host) == (["ab"], ["ab", "c", "wxyz"])
    cache.use("q", "r", tail=0)
    assert (cache.gpu, cache.host) == (["ab", "r"], ["c", "wxyz", "q"])
    cache.finish(held)


def test_write_back_drops_doubles_last_that_could_leave_the_gpu_now() -> None:
    cache = Small(6, 10, write="write_back")
    cache.use("ab", "cd", "123456", tail=0)
    cache.use("ab")
    cache.step()
    held = cache.start("cd")
    cache.step()
    assert (cache.gpu, cache.host) == (["ab", "cd"], ["ab", "cd", "123456"])
    cache.cache.make_host_room(1, cache.cache.residency.now)
    assert cache.host == ["ab", "123456"]
    cache.finish(held)


def test_what_is_being_loaded_keeps_its_host_copy() -> None:
    cache = Small(9, 5, write="write_back", copy_steps=1)
    cache.use("ab", tail=0)
    cache.use("123456789", tail=0)
    held = cache.start("ab")
    cache.cache.make_host_room(1, 0.0)
    assert cache.host == ["ab"]
    cache.step(2)
    cache.cache.make_host_room(1, cache.cache.residency.now)
    assert cache.host == []
    cache.finish(held)


# --- loads and inserts -------------------------------------------------------------------------------------------------------


def test_a_load_evicts_only_what_is_lacking() -> None:
    cache = Small(6, 20)
    cache.use("abc", "d", "e", "f", "g", tail=0)
    cache.step()
    assert (cache.gpu, cache.cache.gpu.pool.free) == (["d", "e", "f", "g"], 2)
    cache.use("abc", tail=1)
    assert cache.gpu == ["abc", "f", "g"]


@pytest.mark.parametrize(("load_min_tokens", "hits"), [(3, (0, 3, 0)), (4, (0, 0, 0))])
def test_short_hits_on_the_host_are_computed(load_min_tokens: int, hits: tuple[int, ...]) -> None:
    cache = Small(4, 9, load_min_tokens=load_min_tokens)
    cache.use("abc", "wxyz", tail=0)
    assert cache.use("abc") == hits
    assert (cache.gpu, cache.host) == (["abc"], ["abc", "wxyz"])


def test_computed_pages_take_a_node_of_the_host_to_the_gpu_with_a_hit() -> None:
    cache = Small(4, 9)
    cache.use("ab", "wxyz", tail=0)
    assert cache.use("ab", tail=0) == (0, 1, 0)
    assert (cache.gpu, cache.host) == (["a", "b"], ["a", "b", "wxyz"])
    assert {node.hits for node in cache.cache.tree.root.descendants() if node.state[0]} == {2}


def test_the_lower_part_of_a_look_up_s_cut_is_older_than_the_path() -> None:
    cache = Small(10, cache_output=True)
    cache.use("abcd", "ab")
    lower, upper = (max(node.last_used for node in cache.cache.tree.root.descendants() if node.depth == at) for at in (2, 0))
    assert lower < upper


# --- storage -----------------------------------------------------------------------------------------------------------------


def test_storage_has_what_the_host_has_once_the_copy_is_acknowledged() -> None:
    cache = Small(20, 20, storage=STORED)
    cache.use("abc")
    assert cache.stored("abc") == 0
    cache.step()
    assert cache.stored("abc") == 3


def test_what_storage_has_becomes_one_node_on_the_host_and_is_loaded_as_a_hit_of_its_own() -> None:
    cache = Small(6, 8, storage=STORED)
    cache.use("abcd", "uvwxyz", "1234", tail=0)
    cache.step()
    assert cache.host == ["1234"]
    assert cache.use("abcde", tail=0) == (0, 0, 4)
    assert cache.gpu == ["abcd", "e"]
    assert cache.cache.prefetched()["used_pages"] == cache.cache.prefetched()["fetched_pages"] == 4


def test_hits_of_host_and_storage_are_told_apart() -> None:
    cache = Small(7, 12, storage=STORED)
    cache.use("abcd", "abcdef", "1234", "xy", "pq", tail=0)
    cache.step()
    assert cache.host == ["abcd", "1234", "xy", "pq"]
    assert cache.use("abcdefg", tail=0) == (0, 4, 2)


@pytest.mark.parametrize(("host_pages", "brought"), [(9, 2), (1, 0)])
def test_storage_is_read_only_below_a_node_that_the_host_has(host_pages: int, brought: int) -> None:
    cache = Small(9, host_pages, storage=STORED)
    cache.use("ab")
    assert cache.host == ["ab"] * (brought > 0)
    assert cache.cache.storage is not None
    cache.cache.storage.store(extents_of(cache.words.pages("abcd")))
    lease = cache.cache._new_lease(cache.words.request("abcd", tail=1))
    cache.cache._read_ahead(lease)
    assert lease.brought_pages == brought


def test_the_host_evicts_as_many_pages_as_storage_has_not_what_is_lacking() -> None:
    """The host has one free page and needs three. It evicts "5", "6" and "7", not only "5" and "6"."""
    cache = Small(4, 8, storage=STORED)
    cache.use("abc", "1234", "5", "6", "7", "8", "PQR", tail=0)
    cache.step()
    assert (cache.stored("abc"), cache.gpu, cache.host) == (3, ["8", "PQR"], ["5", "6", "7", "8", "PQR"])
    lease = cache.cache._new_lease(cache.words.request("abc", tail=1))
    cache.cache._read_ahead(lease)
    assert (lease.brought_pages, cache.host) == (3, ["abc", "8", "PQR"])


def test_fewer_pages_are_read_if_the_host_is_short_of_room() -> None:
    cache = Small(8, 8, storage=STORED)
    cache.use("abcdefgh", "uvw", tail=0)
    cache.step()
    held = cache.start("uvw")
    assert cache.host == ["uvw"]
    assert cache.start("abcdefgh", tail=0) is None
    assert cache.host == ["abcde", "uvw"]
    assert cache.cache.prefetched()["fetched_pages"] == 5
    assert cache.cache.prefetched()["refused_by_memory_pages"] == 2
    cache.finish(held)


def test_short_continuations_are_not_read() -> None:
    cache = Small(6, 6, storage=STORED, min_tokens=5)
    cache.use("abcd", "uvwxyz", tail=0)
    assert cache.use("abcde", tail=0) == (0, 0, 0)
    assert cache.cache.prefetched()["refused_by_threshold_pages"] == 4


@pytest.mark.parametrize(("counts", "stays"), [("stored", True), ("unmatched", False)])
def test_room_is_made_for_what_storage_has_or_for_all_that_is_not_found(counts: str, stays: bool) -> None:
    """Nothing of a new prompt is stored. The host makes room for all of it only if unmatched pages are counted."""
    cache = Small(4, 6, storage=STORED, prefetch_counts=counts)
    cache.use("ab", "1234", tail=0)
    cache.step()
    assert (cache.gpu, cache.host) == (["1234"], ["ab", "1234"])
    lease = cache.cache._new_lease(cache.words.request("XYZ", tail=1))
    cache.cache._read_ahead(lease)
    assert (lease.brought_pages, "ab" in cache.host) == (0, stays)


def test_a_storage_with_a_capacity_keeps_what_was_used_last() -> None:
    cache = Small(20, 20, storage=5)
    cache.use("abc", "xy", "pq")
    cache.step()
    assert (cache.stored("abc"), cache.stored("xy"), cache.stored("pq")) == (1, 2, 2)


def test_a_host_that_cannot_keep_what_is_being_stored_ends_the_run_with_one_line() -> None:
    requests = answered(random_requests(SEED_WITHOUT_ROOM, max_pages=9), SEED_WITHOUT_ROOM)
    cache = make_unified(10, 3, write="write_back", storage=STORED, page_tokens=4)
    with pytest.raises(RulesError, match=r"tiers\.cpu\.capacity: .* pages cannot leave the GPU"):
        play(cache, requests, in_flight=2)


# --- slower models, any policies ---------------------------------------------------------------------------------------------


def answered(requests: list[Request], seed: int) -> list[Request]:
    """The same requests, with answers; some later prompts begin with a prompt and its answer."""
    random, known, made = Random(seed), dict[tuple[int, ...], list[int]](), list[Request]()
    fresh = 10_000
    for request in requests:
        pages = pages_of(request.runs)
        for end in range(len(pages), 0, -1):
            if tuple(pages[:end]) in known and random.random() < 0.5:
                answer = known[tuple(pages[:end])]
                pages = pages[:end] + answer
                break
        tail = request.prompt_tokens % 4
        tokens = len(pages) * 4 + tail if pages else request.prompt_tokens
        count = max(0, (tokens + request.output_tokens - 1) // 4 - len(pages)) if request.output_tokens else 0
        answer = list(range(fresh, fresh + count))
        fresh += count
        known[tuple(pages)] = answer
        made.append(
            replace(
                request, runs=extents_of(pages), prompt_pages=len(pages), prompt_tokens=tokens, output_runs=extents_of(answer)
            )
        )
    return made


def settings_from(seed: int) -> dict[str, Any]:
    random = Random(seed)
    cpu = random.choice([0, 0, 3, 8, 15, 40])
    return {
        "gpu": random.choice([12, 16, 24, 40]),
        "cpu": cpu,
        "write": random.choice(list(PLACEMENTS)),
        "storage": STORED * (cpu > 0 and random.random() < 0.6),
        "chunk": random.choice([0, 0, 1, 2, 4]),
        "copy_steps": random.choice([0, 0, 1, 3]) if cpu else 0,
        "cache_output": True if not cpu else random.random() < 0.6,
    }


def test_random_traces_hit_as_in_the_slow_model() -> None:
    for seed in range(4 * EXAMPLES):
        requests, settings, in_flight = answered(random_requests(seed), seed), settings_from(seed), 1 + seed % 4
        slow = SlowUnified(page_tokens=4, **settings)
        try:
            expected = play_slowly(slow, requests, in_flight=in_flight)
        except OverflowError:
            with pytest.raises(RulesError):
                play(make_unified(page_tokens=4, **settings), requests, in_flight=in_flight)
            continue
        assert play(make_unified(page_tokens=4, **settings), requests, in_flight=in_flight) == expected, (seed, settings)


@pytest.mark.parametrize("name", POLICIES)
def test_any_policy_is_asked_by_the_contract_alone(name: str) -> None:
    requests = answered(random_requests(1, requests=200), 1)
    for request in requests:
        request.turn, request.session = divmod(request.index, 7)
        request.priority, request.kind = request.index % 3, "chat"
        request.retention = (RetentionRange(0, request.prompt_tokens, 30 + 10 * request.priority, 5.0),)
    for write in PLACEMENTS:
        known = {"requests": requests, "model": MODEL, "hardware": HardwareSpec(**HARDWARE), "empty_cache": empty_cache}
        cache = make_unified(14, 40, write=write, storage=60, page_tokens=4, eviction=partial(policy_of, name), context=known)
        rows = play(cache, requests, in_flight=2)
        assert cache.gpu.evicted_pages > 100
        assert sum(map(sum, rows)) > 100


def test_the_books_are_right_after_every_request() -> None:
    for seed in range(20):
        settings = settings_from(seed) | {"cpu": 6 + seed}
        cache, running = make_unified(page_tokens=4, **settings), []
        for request in answered(random_requests(seed), seed):
            pages = request.pages_for(request.prompt_tokens + request.output_tokens, 4)
            while (lease := cache.serve(request, pages, 0.0)) is None and running:
                cache.finish_request(running.pop(0))
            running += [lease] if lease else []
            recount(cache, running)


# --- what the engine hit -----------------------------------------------------------------------------------------------------


def test_random_traces_hit_as_in_the_model_beside_the_repository(shared: Path) -> None:
    model = reference(shared, "hicache_unified_model")
    for seed in range(1_000, 1_000 + 2 * EXAMPLES):
        requests, settings, in_flight = answered(random_requests(seed), seed), settings_from(seed), 1 + seed % 4
        lines = [
            {
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": pages_of(request.runs),
                "output_hash_ids": pages_of(request.output_runs or ()),
            }
            for request in requests
        ]
        answers, delay = ("unique" if settings["cache_output"] else "room"), settings["copy_steps"]
        gpu, cpu, write, chunk = (settings[name] for name in ("gpu", "cpu", "write", "chunk"))
        try:
            rows = model.play(lines, gpu, cpu, write, answers, chunk, in_flight, settings["storage"] > 0, delay, 4)
        except RuntimeError:
            continue
        mine = play(make_unified(page_tokens=4, **settings), requests, in_flight=in_flight)
        assert mine == [tuple(row[2:]) for row in rows], (seed, settings)


RECORDED = re.compile(
    r"(?P<kind>hicache_unified|sglang_unified|sglang_lru)_(?P<gpu>\d+)(?:_(?P<cpu>\d+))?(?:_(?P<write>write_(?:through_selective|"
    r"through|back)))?(?P<answers>_answers)?(?:_chunk(?P<chunk>\d+))?(?P<storage>_storage)?(?:_inflight(?P<in_flight>\d+))?"
    r"(?:_delay(?P<delay>\d+))?"
)
CONVERSATION = [
    "hicache_unified_3000_3000_write_through_inflight4_delay3",
    "hicache_unified_6000_12000_write_back",
    "hicache_unified_6000_12000_write_back_answers_chunk16_storage_inflight4",
    "hicache_unified_6000_12000_write_through",
    "hicache_unified_6000_12000_write_through_answers_chunk16",
    "hicache_unified_6000_12000_write_through_selective_inflight4",
    "hicache_unified_6000_12000_write_through_storage",
    "sglang_lru_6000",
    "sglang_lru_6000_answers",
    "sglang_unified_6000",
    "sglang_unified_6000_answers",
]
MULTITURN = [
    "hicache_unified_300_500_write_back_answers_chunk4_storage_inflight4",
    "hicache_unified_300_500_write_through_answers",
    "sglang_lru_500",
    "sglang_lru_500_answers",
    "sglang_unified_500",
    "sglang_unified_500_answers",
    "sglang_unified_500_answers_inflight4",
]


def settings_of(name: str) -> list[str]:
    """The settings that replay a recorded sequence, by its name."""
    found = RECORDED.fullmatch(name)
    assert found is not None
    part = found.groupdict()
    settings = [f"preset={'sglang_hicache' if part['cpu'] else 'sglang'}", f"tiers.gpu.capacity={part['gpu']}pages"]
    settings += [f"tiers.cpu.capacity={part['cpu']}pages", f"placement={part['write']}"] if part["cpu"] else []
    settings += ["tiers.disk.capacity=unlimited"] if part["storage"] else []
    settings += [f"rules.cache_output={'true' if part['answers'] else 'false'}"]
    settings += [f"replay.prefill_chunk_tokens={512 * int(part['chunk'])}"] if part["chunk"] else []
    settings += [f"replay.copy_steps={part['delay']}"] if part["delay"] else []
    return [*settings, f"replay.in_flight={part['in_flight'] or 1}"]


def replayed(trace: Trace, name: str) -> list[tuple[int, ...]]:
    outcome = kvsim.replay(trace, *settings_of(name)).outcome
    rows = zip(outcome.status.tolist(), outcome.hit_pages.tolist(), strict=True)
    return [(-1, 0, 0) if status == REJECTED else tuple(hits) for status, hits in rows]


@pytest.mark.parametrize("name", CONVERSATION)
def test_conversation_hits_what_the_engine_hit(shared: Path, name: str) -> None:
    expected = golden_rows_of(shared, f"conv.{name}", 2_000)
    path, answers = shared / "traces" / "mooncake_conversation_trace.jsonl.gz", "unique" if "_answers" in name else "none"
    trace = kvsim.load_trace("mooncake", path=path, page_tokens=512, answers=answers, limit=2_000)
    assert replayed(trace, name) == expected


@pytest.mark.parametrize("name", MULTITURN)
def test_turns_that_contain_answers_hit_what_the_engine_hit(shared: Path, name: str) -> None:
    expected = golden_rows_of(shared, f"answers/multiturn.{name}", 600)
    trace = kvsim.load_trace("mooncake", path=shared / "golden" / "answers" / "multiturn.jsonl", page_tokens=512)
    assert replayed(trace, name) == expected
