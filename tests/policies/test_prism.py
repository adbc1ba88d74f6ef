"""PRISM's order and eviction. Prompts are words: a page of 16 tokens a letter in queues, of 4 tokens and 4 s on engines."""

import asyncio
from collections import Counter
from random import Random

import pytest

from kvsim.cluster.cluster import Failure
from kvsim.core.request import Reset
from kvsim.emulation.emulator import Emulator
from kvsim.policies.eviction.prism import Prism as PrismEviction
from kvsim.policies.scheduling.prism import Prism
from tests.cluster.small_cluster import small_cluster
from tests.core.small import small_cache
from tests.engine.small import ask, hits, make_requests, seconds, small_engine
from tests.policies.small_queue import small_queue
from tests.servers.emulated import plan_of
from tests.workloads import EXAMPLES, random_word


def test_what_several_wait_for_is_shared_out() -> None:
    """abcx, abcy and abcz have 16 tokens each, and a third of 48; of two equals, the first; q has 32 and de 16 + 16."""
    small = small_queue(Prism())
    small.wait("de", "abcx", "q", "abcy", "abcz", "qr")
    assert small.order() == "q qr de abcx abcy abcz", "q: 8 tokens; qr: 8 + 16; de, abcx and its like: 32"


def test_what_is_cached_costs_nothing() -> None:
    small = small_queue(Prism(), "abc", cpu=0)
    small.wait("q", "abcd", "abx", "abcd")
    assert small.order() == "abcd abcd q abx", "8, 8, 16 and 16 tokens"


def test_the_answer_before_a_retraction_counts_whole() -> None:
    small = small_queue(Prism())
    first, second = small.wait("ab", "cd")
    first.generated = 1
    small.queue.remove(first)
    small.queue.push(first)
    assert [small.words[job.place] for job in small.take(2)] == ["cd", "ab"]
    assert second.place[1:] == (1, 0)


def test_a_queue_of_more_than_the_limit_stays_as_it_is() -> None:
    small = small_queue(Prism(fcfs_above=2))
    small.wait("abc", "cd", "b")
    assert [small.words[job.place] for job in small.take(1)] == ["abc"]
    assert small.order() == "b cd", "with two left, they are put in order"


def test_a_limit_is_a_number_of_requests() -> None:
    with pytest.raises(ValueError, match="fcfs_above must be 0 or more, not -1; null sets no limit"):
        Prism(fcfs_above=-1)


def test_pages_that_are_waited_for_stay() -> None:
    """abcd is used, then wxyz. A request for abq has arrived: of abcd, what it does not ask for leaves first, d before c."""
    policy = PrismEviction()
    cache = small_cache(gpu=20, eviction=[lambda: policy])
    cache.use("abcd", index=0)
    cache.use("wxyz", index=1)
    request = cache.request("abq", index=2)
    policy.on_arrival(request, 9.0)
    assert cache.leaving_order() == "dczyxwba"


def test_once_a_request_has_finished_its_pages_are_as_all_others() -> None:
    policy = PrismEviction()
    cache = small_cache(gpu=20, cpu=20, eviction=[lambda: policy, PrismEviction])
    policy.on_arrival(cache.request("abcd", index=0), 0.0)
    cache.use("abcd", index=0)
    cache.use("wxyz", index=1)
    assert not policy._arrived and not policy._demand.pages
    assert cache.leaving_order() == "dcbazyxw"


def test_an_engine_keeps_what_the_next_request_in_the_queue_needs() -> None:
    """Room for 9 pages. While q is computed, fghi and abz begin to wait; fghi takes 5 pages, and ab is the oldest. Kept, it
    leaves 5 tokens of abz to be computed instead of 13."""
    asks = [ask("ab"), ask("cde", 20.0), ask("q", 59.0), ask("fghi", 60.0), ask("abz", 60.5)]
    by_age = small_engine(gpu=9, max_running_requests=1).serve(*asks)
    by_demand = small_engine(gpu=9, max_running_requests=1, eviction=PrismEviction).serve(*asks)
    assert [hits(by_age, 4), hits(by_demand, 4)] == [(0, 0, 0), (2, 0, 0)]
    assert by_age.ttft_s[4] - by_demand.ttft_s[4] == seconds(8.0)


def test_a_request_of_an_emptied_cache_is_waited_for_no_more() -> None:
    """The cache is emptied while abcd is computed, which takes 17 s."""
    policy = PrismEviction()
    requests = make_requests([ask("abcd"), ask("wxyz", 30)])
    requests[1].resets = (Reset("now", 5.0),)
    small_engine(gpu=20, eviction=lambda: policy).run(requests)
    assert not policy._arrived and not policy._demand.pages


def test_a_request_that_goes_on_elsewhere_is_waited_for_there_only() -> None:
    """Engine 0 fails while it computes abcd, and does not come back before all has ended."""
    policies: list[PrismEviction] = []

    def eviction() -> PrismEviction:
        policies.append(PrismEviction())
        return policies[-1]

    outcome = small_cluster(gpu=20, failures=[Failure(engine=0, at_s=10.0)], eviction=eviction).serve(ask("abcd"), ask("ab", 3))
    assert outcome.status.tolist() == [0, 0]
    assert len(policies) > 1 and not any(policy._arrived or policy._demand.pages for policy in policies)


@pytest.mark.parametrize("rules", ["default", "vllm", "sglang"])
def test_a_request_that_its_client_gives_up_is_waited_for_no_more(rules: str) -> None:
    """Of two, the first one runs and the second one waits; what both asked for can then leave in the order of its use."""

    async def serve() -> PrismEviction:
        overrides = [] if rules == "default" else [f"preset={rules}"]
        overrides += ["eviction=prism", "tiers.gpu.capacity=2000pages", "engine.max_running_requests=1"]
        emulator = Emulator(plan_of(overrides))
        env, policy = emulator.cluster.env, emulator.cluster.engines[0].gpu.eviction
        first, second = [emulator.submit([number, *range(40)], 200) for number in range(2)]
        while first.generated < 5:
            env.step()
        assert isinstance(policy, PrismEviction) and len(policy._arrived) == 2
        emulator.abort(first)
        emulator.abort(second)
        env.run(env.now + 10)
        return policy

    policy = asyncio.run(serve())
    assert not policy._arrived and not policy._demand.pages


def test_what_departs_is_in_its_place_at_once() -> None:
    """abcd has been used before wxyz, and is asked for by a request that is given up."""
    policy = PrismEviction()
    cache = small_cache(gpu=20, eviction=[lambda: policy])
    cache.use("abcd", index=0)
    cache.use("wxyz", index=1)
    request = cache.request("abcd", index=2)
    policy.on_arrival(request, 9.0)
    for node in [node for node in cache.tree.root.descendants() if node.is_evictable(0)]:
        policy.on_evictable(node)
    cache.residency.tell_departure(request, 10.0)
    assert cache.leaving_order() == "dcbazyxw"


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_against_single_pages(seed: int) -> None:
    """Requests arrive and are used later, or never before the end: the tier has the pages that a slow rule keeps."""
    random = Random(seed)
    policy, room = PrismEviction(), random.randint(6, 12)
    cache = small_cache(gpu=room, eviction=[lambda: policy])
    used: dict[str, int] = {}
    """When each page, by its prefix, was last used; only what the tier has."""
    waiting: list[tuple[str, int]] = []
    index = 0
    for now in range(60):
        if random.random() < 0.6:
            word = random_word(random)[:6]
            waiting.append((word, index))
            policy.on_arrival(cache.request(word, index=index), float(now))
            index += 1
        if waiting and random.random() < 0.5:
            word, number = waiting[random.randrange(len(waiting))]
            demand = Counter(other[:end] for other, _ in waiting for end in range(1, len(other) + 1))
            path = {word[:end] for end in range(1, len(word) + 1)}
            while len(used | dict.fromkeys(path)) > room:
                leaves = [page for page in used if page not in path and not any(other[:-1] == page for other in used)]
                del used[min(leaves, key=lambda page: (demand[page], used[page]))]
            used |= dict.fromkeys(path, now)
            waiting.remove((word, number))
            cache.use(word, index=number)
            ids = cache.words.ids
            assert cache.on("gpu") == cache.words.text((page, 1) for page in sorted(ids[prefix] for prefix in used))
