"""``rules=lightllm`` in a simulation: examples whose times are reckoned by hand, and runs that must hit what a replay hits.

On the machine of ``tests/engine/small.py``, a token takes 1 s, a page 4 s, and 1 s on the host link. A step waits for its loads.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvsim.api import load_trace, replay, simulate
from kvsim.cluster.cluster import Cluster, Failure
from kvsim.core.pool import SlotPool
from kvsim.core.request import Request
from kvsim.core.rules import CacheSetup
from kvsim.core.tier import Tier, chain
from kvsim.core.transfer import Transfer
from kvsim.engine.engine import Engine, EngineSettings
from kvsim.engine.outcome import Outcome
from kvsim.engine.prefetching import Prefetching
from kvsim.engines.lightllm.rules import LightLLMRules
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.pages.extents import Extent
from kvsim.plans.build import build_run
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.prefetch.base import Offer
from kvsim.policies.prefetch.none import NoPrefetch
from kvsim.policies.scheduling.fcfs import FCFS
from kvsim.settings.configuration import compose
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import FOREVER, HARDWARE, MODEL, PAGE_BYTES, PAGE_TOKENS, ask, make_requests, seconds
from tests.workloads import EXAMPLES, Words, extents_of, pages_of, random_requests, random_word

Row = tuple[int, int]


class Checked(Engine):
    """An engine that checks its cache after the end of every transfer."""

    def ended(self, transfer: Transfer) -> None:
        super().ended(transfer)
        self.cache.check()


class Small:
    """One engine with LightLLM's caches; sizes are in pages of the GPU, ``unit`` of which make one of the CPU."""

    def __init__(
        self, gpu: int, cpu: int = 0, *, unit: int = 1, hardware: dict[str, Any] | None = None, failures: Sequence[Failure] = (),
        cache_output: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        tiers = []
        for index, pages in enumerate([gpu, cpu] if cpu else [gpu]):
            policy = LRU()
            policy.bind(PolicyContext(tier=index, capacity_pages=pages, page_tokens=PAGE_TOKENS))
            tiers.append(Tier(("gpu", "cpu")[index], index, SlotPool(pages), policy))
        tiers[-1].unit_pages = unit
        placement = ByLength(min_tokens=1)
        placement.bind(PolicyContext(tier=1, capacity_pages=cpu, page_tokens=PAGE_TOKENS))
        edges = chain(tiers, [placement] if cpu else [])
        rules = LightLLMRules(cache_output=cache_output)
        self.setup = CacheSetup(tiers=tiers, edges=edges, page_tokens=PAGE_TOKENS)
        self.cache = rules.cache(self.setup)
        machine = HardwareSpec(**(HARDWARE | (hardware or {})))
        substrate = SimulatedSubstrate(MODEL, machine, PAGE_TOKENS, links="fifo")
        engine = EngineSettings(overlap="none", **settings)
        prefetching = Prefetching(self.cache, NoPrefetch(), Offer)
        self.cluster = Cluster([Checked(substrate, self.cache, prefetching, engine, FCFS())], failures=failures)

    def run(self, requests: list[Request]) -> Outcome:
        """Serve the requests; afterwards, only what is cached is left of them."""
        cache = self.cache
        outcome = self.cluster.run(requests, lambda _: cache.check())
        cache.check()
        assert not (cache.leases or cache.copies or cache.in_flight or cache.nodes.waiting or cache.nodes.running_pages)
        assert cache.gpu.pool.free + cache.gpu.evictable_pages == cache.gpu.pool.capacity
        return outcome

    def serve(self, *asks: Any) -> Outcome:
        return self.run(make_requests(asks))


def rows(outcome: Outcome) -> list[Row]:
    return [(gpu, cpu) for gpu, cpu, _ in outcome.hit_pages.tolist()]


def copies(outcome: Outcome, link: str) -> list[list[float]]:
    """Start, end and pages of each copy."""
    return [[start, end, size / PAGE_BYTES] for start, end, size, _ in outcome.links[link].intervals.tolist()]


# --- the GPU ---------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_found_from_the_end_of_its_request_on() -> None:
    """The first computes 13 tokens, then decodes to 22 s or, with the second's prompt in a step of 14 s, beyond it."""
    outcome = Small(20).serve(ask("abc", 0, output=10), ask("abc", 1), ask("abc", 100))
    assert rows(outcome) == [(0, 0), (0, 0), (3, 0)]
    assert outcome.ttft_s.tolist() == seconds([13, 13 + 14 - 1, 1])


def test_a_request_whose_turn_comes_after_that_end_finds_it_too() -> None:
    outcome = Small(20).serve(ask("abc", 0), ask("abc", 1))
    assert rows(outcome) == [(0, 0), (3, 0)]
    assert outcome.ttft_s.tolist() == seconds([13, 13 + 1 - 1])


def test_requests_run_beside_each_other_only_if_both_fit_with_their_answers() -> None:
    """They take 3 pages each, prompt and answer, and running requests must take fewer than there are."""
    for pages, waits_s in ((6, 9), (7, 0)):
        outcome = Small(pages).serve(ask("ab", 0), ask("xy", 0))
        assert outcome.columns["queue_s"].tolist() == seconds([0, waits_s])
        assert outcome.retractions == 0


def test_a_request_that_does_not_need_less_than_the_gpu_has_is_rejected() -> None:
    outcome = Small(5, 20).serve(ask("abcd", 0), ask("abc", 0), ask("abcde", 0))
    assert outcome.status.tolist() == [1, 0, 1]


# --- the CPU ---------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_copied_to_the_cpu_when_its_answer_is_complete() -> None:
    outcome = Small(20, 20).serve(ask("ab", 0, output=3))
    assert outcome.e2e_s.tolist() == seconds([9 + 2])
    assert copies(outcome, "gpu-cpu") == [seconds([11, 13, 2])]


def test_neither_gpu_nor_cpu_have_a_prompt_before_it_has_been_copied() -> None:
    """The first ends at 9 s, and its copy at 11 s."""
    assert rows(Small(20, 20).serve(ask("ab", 0), ask("ab", 10))) == [(0, 0), (0, 0)]
    assert rows(Small(20, 20).serve(ask("ab", 0), ask("ab", 11.5))) == [(0, 0), (2, 0)]


def test_a_request_counts_as_running_until_its_prompt_has_been_copied() -> None:
    """3 and 5 pages do not fit beside each other; the second begins at 11 s and computes 17 tokens."""
    outcome = Small(6, 20).serve(ask("ab", 0), ask("pqrs", 9.5))
    assert outcome.ttft_s.tolist() == seconds([9, 11 + 17 - 9.5])


def test_a_hit_on_the_cpu_waits_for_its_load() -> None:
    """ "xyz" pushes "abc" from the GPU."""
    outcome = Small(5, 20).serve(ask("abc", 0), ask("xyz", 20), ask("abc", 40))
    assert rows(outcome) == [(0, 0), (0, 0), (0, 3)]
    assert copies(outcome, "gpu-cpu") == [seconds([13, 16, 3]), seconds([33, 36, 3])]
    assert copies(outcome, "cpu-gpu") == [seconds([40, 43, 3])]
    assert outcome.ttft_s.tolist() == seconds([13, 13, 3 + 1])
    assert outcome.columns["load_s"].tolist() == seconds([0, 0, 3])


def test_pages_found_on_the_cpu_are_held_from_the_arrival_to_the_end_of_the_load() -> None:
    """ "abcd" finds "ab" at 21 s and waits until "uvwxy" has ended at 41 s, and its copy at 43 s: "w" finds no room."""
    small = Small(7, 4)
    outcome = small.serve(ask("ab", 0), ask("uvwxy", 20), ask("abcd", 21))
    assert rows(outcome) == [(0, 0), (0, 0), (0, 2)]
    assert copies(outcome, "gpu-cpu") == [seconds([9, 11, 2]), seconds([41, 43, 2]), seconds([54, 56, 2])]
    assert copies(outcome, "cpu-gpu") == [seconds([43, 45, 2])]
    assert outcome.ttft_s.tolist() == seconds([9, 21, 45 + 9 - 21])
    assert small.cache.counts.no_room_pages == 3


def test_what_a_request_that_waits_has_not_found_at_its_arrival_it_does_not_load() -> None:
    """ "abz" arrives before "abc" is on the CPU; when its turn comes, "pqr" has pushed that from the GPU."""
    outcome = Small(5, 20).serve(ask("abc", 0), ask("pqr", 1), ask("abz", 2), ask("abc", 100))
    assert rows(outcome) == [(0, 0), (0, 0), (0, 0), (2, 1)]


def test_two_requests_that_end_together_both_copy_their_prompt_into_the_same_pages() -> None:
    small = Small(20, 20)
    outcome = small.serve(ask("ab", 0), ask("ab", 0))
    assert copies(outcome, "gpu-cpu") == [seconds([18, 20, 2]), seconds([20, 22, 2])]
    assert (outcome.tiers["cpu"].inserted_pages, outcome.tiers["gpu"].inserted_pages) == (2, 2)


def test_a_large_page_of_the_cpu_is_stored_and_loaded_whole_and_a_load_may_begin_inside() -> None:
    """The CPU has "ab|cd". At 80 s the GPU has "abc" of "abcx", and the page "cd" is loaded for the sake of "d"."""
    small = Small(6, 12, unit=2)
    outcome = small.serve(ask("abcd", 0), ask("pqrs", 30), ask("abcx", 60), ask("abcd", 80))
    assert rows(outcome) == [(0, 0), (0, 0), (0, 2), (3, 1)]
    assert copies(outcome, "gpu-cpu") == [seconds([17, 21, 4]), seconds([47, 51, 4]), seconds([71, 73, 2])]
    assert copies(outcome, "cpu-gpu") == [seconds([60, 62, 2]), seconds([80, 82, 2])]
    assert outcome.ttft_s.tolist() == seconds([17, 17, 2 + 9, 2 + 1])
    assert small.cache.counts.loaded_pages == 3


def test_answers_enter_the_tree_with_their_prompts_and_only_prompts_are_copied() -> None:
    """ "ab" has 8 tokens and its answer 5, the fifth of which has no KV; "b" has the prompt's last token, which has no key."""
    first, second = make_requests([ask("ab", 0, tokens=0, output=5), ask("abc", 100)])
    outcome = Small(20, 20, cache_output=True).run([replace(first, output_runs=((2, 1),)), replace(second, output_runs=())])
    assert rows(outcome) == [(0, 0), (3, 0)]
    assert copies(outcome, "gpu-cpu") == [seconds([12, 13, 1]), seconds([101, 103, 2])]


# --- the CPU pages, page by page ---------------------------------------------------------------------------------------------


class SlowStore:
    """Pages that are idle, in the order in which they leave, or held: by how many, and whether they are ready."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.idle: list[int] = []
        self.held: dict[int, list[int]] = {}

    def is_ready(self, page: int) -> bool:
        return page in self.idle or bool(self.held.get(page, [0, 0])[1])

    def hold(self, page: int) -> None:
        if page in self.idle:
            self.idle.remove(page)
            self.held[page] = [0, 1]
        self.held.setdefault(page, [0, 0])[0] += 1

    def find(self, pages: list[int]) -> list[int]:
        found = list(takewhile(self.is_ready, pages))
        for page in found:
            self.hold(page)
        return found

    def store(self, pages: list[int]) -> tuple[list[int], list[int]]:
        stored, copied = list[int](), list[int]()
        for page in pages:
            is_there = page in self.idle or page in self.held
            if not is_there and len(self.idle) + len(self.held) == self.room:
                if not self.idle:
                    break
                self.idle.pop(0)
            copied += [] if self.is_ready(page) else [page]
            self.hold(page)
            stored.append(page)
        return stored, copied

    def give_back(self, pages: list[int], *, are_ready: bool) -> None:
        for page in pages:
            holding = self.held[page]
            holding[0] -= 1
            holding[1] |= are_ready
            if not holding[0]:
                del self.held[page]
                self.idle += [page] * holding[1]


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_pages_of_the_cpu_are_held_found_and_lost_as_in_a_slow_model(seed: int) -> None:
    random, unit, room = Random(seed), 1 + seed % 3, 2 + seed % 9
    store, slow, words = Small(9, room * unit, unit=unit).cache.nodes.store, SlowStore(room), Words()
    assert store is not None
    looked_up, stored = list[tuple[Extent, ...]](), list[tuple[Extent, ...]]()
    for _ in range(60):
        path = store.named(extents_of(words.pages(random_word(random, longest=8 * unit))), 8 * unit)
        action = random.choice(["find", "store", "store", "load", "copied", "copied", "fail"])
        if action == "find":
            looked_up.append(store.find(path))
            assert pages_of(looked_up[-1]) == slow.find(pages_of(path))
        elif action == "store":
            stored.append((made := store.store(path)).held)
            assert (pages_of(made.held), pages_of(made.copied)) == slow.store(pages_of(path))
        elif held := looked_up if action == "load" else stored:
            given = held.pop(random.randrange(len(held)))
            store.give_back(given, are_ready=action == "copied")
            slow.give_back(pages_of(given), are_ready=action == "copied")
        store.check([*looked_up, *stored])
        assert pages_of(store.idle()) == slow.idle


# --- failures and resets -----------------------------------------------------------------------------------------------------


def test_a_reset_empties_both_caches() -> None:
    """It is due at 30 s, and comes when nothing runs."""
    outcome = Small(20, 20, reset_at_s=[30.0]).serve(ask("ab", 0), ask("ab", 20), ask("ab", 40))
    assert rows(outcome) == [(0, 0), (2, 0), (0, 0)]


def test_an_engine_that_fails_loses_its_cpu_memory_too() -> None:
    """It fails during the load of the third request, which computes its prompt from 45 s on."""
    failures = [Failure(engine=0, at_s=41, back_after_s=4)]
    outcome = Small(5, 20, failures=failures).serve(ask("abc", 0), ask("xyz", 20), ask("abc", 40))
    assert outcome.ttft_s.tolist() == seconds([13, 13, 5 + 13])


@pytest.mark.parametrize("seed", range(EXAMPLES // 4))
def test_every_page_is_accounted_for_whatever_fails(seed: int) -> None:
    random = Random(seed)
    requests = [replace(one, arrival_s=one.arrival_s * random.choice([3, 12])) for one in random_requests(seed)]
    last_s = max(request.arrival_s for request in requests)
    failures = [Failure(engine=0, at_s=random.uniform(0, last_s), back_after_s=random.uniform(1, 9)) for _ in range(seed % 2)]
    small = Small(
        10 + seed % 13, 4 + seed % 21, unit=1 + seed % 3, failures=failures,
        max_batch_tokens=8 + seed % 17, reset_at_s=[last_s / 2] if seed % 5 == 0 else [],
    )  # fmt: skip
    outcome = small.run(requests)
    assert outcome.retractions == 0


# --- as a replay -----------------------------------------------------------------------------------------------------------


def one_by_one(requests: list[Request]) -> list[Request]:
    """The requests, each after the end of the one before."""
    return [replace(request, arrival_s=1e5 * at) for at, request in enumerate(requests)]


FAST = [f"hardware.{way}_bytes_per_s=1e24" for way in ("host_to_device", "device_to_host", "both_directions")]


@pytest.mark.parametrize(
    ("page_tokens", "settings"),
    [
        (512, ["tiers.gpu.capacity=200pages", "tiers.cpu.capacity=0"]),
        (512, ["tiers.gpu.capacity=200pages", "tiers.cpu.capacity=3000pages"]),
        (16, ["tiers.gpu.capacity=100000tokens", "tiers.cpu.capacity=1600000tokens", "tiers.cpu.page_tokens=256"]),
    ],
)
@pytest.mark.parametrize("answers", ["none", "unique"])
def test_requests_one_by_one_over_fast_links_hit_what_a_replay_hits(
    shared: Path, page_tokens: int, settings: list[str], answers: str
) -> None:
    path = shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
    trace = load_trace("mooncake", path=path, limit=500, answers=answers, page_tokens=page_tokens)
    trace.requests[:] = one_by_one(trace.requests)
    common = ["preset=lightllm", "tiers.disk.capacity=0", f"rules.cache_output={answers == 'unique'}", *settings]
    has_cpu = "tiers.cpu.capacity=0" not in settings
    replayed = replay(trace, *common).outcome
    simulated = simulate(trace, *common, *(FAST if has_cpu else [])).outcome
    assert simulated.hit_pages.tolist() == replayed.hit_pages.tolist()
    assert simulated.status.tolist() == replayed.status.tolist()
    assert replayed.placement.items() <= simulated.placement.items()
    assert not has_cpu or replayed.hit_pages[:, 1].sum() > 300


@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_random_requests_one_by_one_hit_what_a_replay_hits(seed: int) -> None:
    requests = one_by_one(random_requests(seed))
    sizes, unit = (6 + seed % 15, 3 + seed % 23), 1 + seed % 3
    rates = ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "both_directions_bytes_per_s")
    small = Small(*sizes, unit=unit, hardware=dict.fromkeys(rates, FOREVER))
    simulated = small.run(requests)
    server = LightLLMRules().server(Small(*sizes, unit=unit).setup)
    served = []
    for request in requests:
        lease: Any = server.serve(request, request.pages_in_all(PAGE_TOKENS), request.arrival_s)
        served.append(lease.hits[:2] if hasattr(lease, "hits") else (0, 0))
        if hasattr(lease, "hits"):
            server.finish_request(lease)
    assert rows(simulated) == served


# --- settings ----------------------------------------------------------------------------------------------------------------


def test_engines_have_cpu_memory_of_their_own() -> None:
    trace = load_trace("synthetic", sessions=3)
    common = ["preset=lightllm", "tiers.disk.capacity=0", "tiers.cpu.capacity=1GiB", "cluster.engines=2"]
    with pytest.raises(UsageError, match="has its own CPU memory"):
        simulate(trace, *common, "tiers.cpu.scope=host")
    outcome = simulate(trace, *common, "tiers.cpu.scope=engine").outcome
    assert sorted(set(outcome.engine.tolist())) == [0, 1]


def test_a_validation_has_the_same_rules_on_both_sides_but_with_a_disk() -> None:
    overrides = ["preset=lightllm", "tiers.disk.capacity=0", "tiers.cpu.capacity=64MiB", "hardware=h100"]
    built = build_run(compose(overrides), command="validate", overrides=overrides)
    assert isinstance(built.rules, LightLLMRules) and not built.rules_note
    overrides[1] = "tiers.disk.capacity=64MiB"
    built = build_run(compose(overrides), command="validate", overrides=overrides)
    assert built.rules_note.startswith("kvsim's own: those of LightLLM do not cover kvsim validate with tiers gpu, cpu, disk")
