"""Scheduling policies: what every one of them owes the engine, and the order in which each has requests tried.

Prompts are words, a page of 16 tokens for each letter.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import hydra.utils
import pytest
from omegaconf import OmegaConf

from kvsim.core.queue_view import Round, Waiting
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.dfs_weight import DfsWeight
from kvsim.policies.scheduling.kept_order import KeptScheduling
from kvsim.policies.scheduling.longest_prefix import LongestPrefix
from kvsim.policies.scheduling.priority import Priority
from kvsim.policies.scheduling.shortest_prefill import ShortestPrefill
from kvsim.policies.scheduling.shortest_prompt import ShortestPrompt
from tests.policies.slow_scheduling import SlowJob, SlowQueue
from tests.policies.small_queue import PAGE_TOKENS, small_queue
from tests.workloads import EXAMPLES, random_word

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "scheduling"
POLICIES = sorted(path.stem for path in CONF.glob("*.yaml"))
BOUNDED = [name for name in POLICIES if "max_wait_s" in OmegaConf.load(CONF / f"{name}.yaml")]
MODELLED = [name for name in POLICIES if hasattr(SlowQueue, name)]


def policy_of(name: str, **settings: Any) -> SchedulingPolicy:
    made: SchedulingPolicy = hydra.utils.instantiate(OmegaConf.load(CONF / f"{name}.yaml"), **settings)
    return made


# --- every policy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_is_tried_once(name: str) -> None:
    small = small_queue(policy_of(name), "abc abd")
    words = ["abcx", "abdx", "xyz", "ab", "abcx", "xyzw", "q", "abc"]
    small.wait(*words)
    assert len(small.queue) == len(list(small.queue)) == 8
    assert sorted(small.order().split()) == sorted(words)
    assert len(small.queue) == 0 and not small.queue


@pytest.mark.parametrize("name", POLICIES)
def test_looking_at_the_cache_changes_nothing(name: str) -> None:
    """The match of abxy ends inside the node of abcd, which stays whole."""
    small = small_queue(policy_of(name), "abcd")
    before = [(node.runs, node.hits, node.last_used) for node in small.cache.tree.root.descendants()]
    small.wait("abxy", "abcz", "q")
    small.order()
    assert [(node.runs, node.hits, node.last_used) for node in small.cache.tree.root.descendants()] == before


@pytest.mark.parametrize("name", BOUNDED)
def test_who_has_waited_for_longer_than_the_bound_goes_first(name: str) -> None:
    """At 25 s, the requests of 10 and 12 s have waited for more than 10 s, the one of 15 s for exactly 10 s."""
    small = small_queue(policy_of(name, max_wait_s=10.0), "a")
    for at, word in ((15.0, "x"), (12.0, "zzzz"), (10.0, "zzz"), (20.0, "ab")):
        small.wait(word, at=at, priority=1 if word == "ab" else 0)
    assert small.order(now=25.0).split()[:2] == ["zzz", "zzzz"]


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("bound", [-1.0, -0.5])
def test_a_bound_below_zero_is_refused(name: str, bound: float) -> None:
    with pytest.raises(ValueError, match=f"max_wait_s must be 0 or more, not {bound}; null sets no bound"):
        type(policy_of(name))(max_wait_s=bound)


def test_a_request_that_waits_again_has_one_place() -> None:
    """It was overdue before it ran, and is again; its first entry no longer counts."""
    small = small_queue(ShortestPrompt(max_wait_s=1.0))
    (first,) = small.wait("aaaa")
    small.wait("b", at=9.0)
    assert small.take(1, now=9.0) == [first]
    small.queue.push(first)
    assert small.order(now=9.5) == "aaaa b"


# --- each policy by hand -----------------------------------------------------------------------------------------------------


def test_priority_goes_by_priority_then_by_arrival() -> None:
    small = small_queue(Priority())
    for word, priority in (("a", 0), ("b", 2), ("c", 1), ("d", 2), ("e", -1)):
        small.wait(word, priority=priority)
    assert small.order() == "b d c a e"


def test_priority_retracts_the_least_important_that_arrived_last() -> None:
    small = small_queue(Priority())
    jobs = [*small.wait("a", priority=1), *small.wait("b", "c", priority=0), *small.wait("d", priority=2)]
    assert small.queue.ranks_retractions
    assert max(jobs, key=small.queue.retraction_key) is jobs[2]


def test_shortest_prompt_counts_all_tokens_cached_or_not() -> None:
    small = small_queue(ShortestPrompt(), "aaaa")
    small.wait("aaaa", "bbb", "ccccc", "d", "eee")
    assert small.order() == "d bbb eee aaaa ccccc"


def test_shortest_prefill_counts_what_is_not_cached() -> None:
    """Pages left to compute: 1 of aaaaa, 3 of bbb, 2 of aacd (aa is cached)."""
    small = small_queue(ShortestPrefill(), "aaaa")
    small.wait("bbb", "aacd", "aaaaa")
    assert small.order() == "aaaaa aacd bbb"


def test_longest_prefix_goes_by_cached_tokens() -> None:
    """On the GPU: nothing of xyz, abcd of abcdq, abc of abc and abcz."""
    small = small_queue(LongestPrefix(), "abcd")
    small.wait("xyz", "abc", "abcdq", "abcz")
    assert small.order() == "abcdq abc abcz xyz"


def test_longest_prefix_counts_the_cpu_tier() -> None:
    """The GPU has 3 pages and holds only xyz; abcd is in the CPU tier."""
    small = small_queue(LongestPrefix(), "abc xyz", gpu=3, cpu=10)
    assert small.cache.on("gpu") == "xyz"
    small.wait("xq", "abc")
    assert small.order() == "abc xq"


def test_longest_prefix_leaves_a_queue_of_more_than_its_limit_as_it_is() -> None:
    small = small_queue(LongestPrefix(fcfs_above=3), "abc")
    small.wait("x", "y", "abc", "z")
    assert [small.words[job.place] for job in small.take(1)] == ["x"]
    assert small.order() == "abc y z"


def test_the_limit_counts_as_sglang_does() -> None:
    for waiting, expected in ((128, "ab"), (129, "q0")):
        small = small_queue(LongestPrefix(), "ab")
        small.wait(*(f"q{at}" for at in range(waiting - 1)), "ab")
        assert small.words[small.take(1)[0].place] == expected


def test_an_order_stays_where_the_next_round_gives_no_other() -> None:
    """Once z is no longer cached, z1 keeps the place that it had, before requests of the same rank that came before it."""
    small = small_queue(LongestPrefix(in_batch_duplicates="equal"), "z", gpu=2)
    small.wait("x1", "z1")
    small.queue.begin_round(0.0)
    assert small.words[small.queue.first().place] == "z1"
    small.cache.use("uv")
    assert small.order() == "z1 x1"


def test_only_prompts_with_a_page_that_has_come_or_gone_are_looked_up_again() -> None:
    """The GPU has 3 pages, so that xyz drives out abc; of q and q1 it has what it had. abq, which came before q, still does."""
    small = small_queue(LongestPrefix(in_batch_duplicates="equal"), "abc", gpu=3)
    jobs = small.wait("abq", "xq", "q", "ab", "q1")
    small.queue.begin_round(0.0)
    assert small.words[small.queue.first().place] == "abq"
    small.cache.use("xyz")
    assert [small.words[job.place] for job in jobs if not job.is_current] == ["abq", "xq", "ab"]
    assert small.order() == "xq abq ab q q1"


def test_duplicates_come_last() -> None:
    """abx and aby share 2 pages, 32 tokens, with abc, which nobody has computed; az shares only one."""
    small = small_queue(LongestPrefix())
    small.wait("abc", "abx", "q", "aby", "az")
    assert small.order() == "abc q az abx aby"


def test_the_thresholds_of_duplicates_can_be_set() -> None:
    small = small_queue(LongestPrefix(shared_tokens=33))
    small.wait("abc", "abx", "abcd")
    assert small.order() == "abc abx abcd"
    small = small_queue(LongestPrefix(check_up_to_tokens=48), "abc")
    small.wait("abcdx", "abcdy", "abcz")
    assert small.order() == "abcdx abcdy abcz"


def test_dfs_weight_serves_the_branch_with_most_requests_first() -> None:
    """Cached are abc, abd and x. Below ab, d has two requests and c one; aq ends after a, below which there are four."""
    small = small_queue(DfsWeight(), "abc abd x")
    small.wait("x1", "aq", "abc1", "abd1", "abd2", "n", "x2")
    assert small.order() == "abd1 abd2 abc1 aq x1 x2 n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_batch_duplicates": "skip"}, "in_batch_duplicates must be one of last, equal, not skip"),
        ({"check_up_to_tokens": -1}, "check_up_to_tokens must be 0 or more, not -1"),
        ({"shared_tokens": 0}, "shared_tokens must be at least 1, not 0"),
        ({"fcfs_above": -1}, "fcfs_above must be 0 or more, not -1; null sets no limit"),
    ],
)
@pytest.mark.parametrize("kind", [LongestPrefix, ShortestPrefill])
def test_settings_out_of_range_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
    if "fcfs_above" in settings:
        with pytest.raises(ValueError, match=message):
            DfsWeight(**settings)


# --- at random ---------------------------------------------------------------------------------------------------------------


def ordered_anew(policy: SchedulingPolicy) -> SchedulingPolicy:
    """The same policy, whose order of all requests is asked in each round, as that of a user's policy."""

    class Anew(type(policy)):  # type: ignore[misc]
        def order(self, round: Round) -> Sequence[Waiting]:
            answer: Sequence[Waiting] = super().order(round)
            return answer

    return Anew(**{name: getattr(policy, name) for name in getattr(policy, "__dataclass_fields__", ())})  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELLED)
@pytest.mark.parametrize("seed", range(EXAMPLES // 4))
def test_the_order_is_that_of_the_slow_model(name: str, seed: int) -> None:
    """Requests arrive, are admitted, computed and retracted over many rounds; every round has the order of the model."""
    random = Random(seed)
    bound = random.choice([None, 5.0]) if name in BOUNDED else None
    policy = policy_of(name, **({} if bound is None else {"max_wait_s": bound}))
    if isinstance(policy, KeptScheduling) and random.random() < 0.3:
        policy = ordered_anew(policy)
    small = small_queue(policy, has_index=random.random() < 0.8)
    slow = SlowQueue(PAGE_TOKENS)
    models: dict[Waiting, SlowJob] = {}
    entries = 0
    for now in range(25):
        for _ in range(random.randint(0, 3)):
            word, priority = random_word(random), random.randrange(3)
            (job,) = small.wait(word, at=float(now), priority=priority)
            entries += 1
            models[job] = SlowJob(word, job.place[1], float(now), priority, entries)
            slow.jobs.append(models[job])
        count = random.randint(0, len(slow.jobs))
        if count:
            getattr(slow, name)()
        overdue = slow.overdue(now, bound)
        expected = overdue + [job for job in slow.jobs if job not in overdue]
        taken = small.take(count, now)
        assert [models[job] for job in taken] == expected[:count]
        for job in taken:
            slow.jobs.remove(models[job])
            if random.random() < 0.5:
                small.cache.use(models[job].word)
                slow.cached.append(models[job].word)
            if random.random() < 0.3:
                entries += 1
                job.generated = models[job].generated = random.randint(1, 40)
                models[job].entry = entries
                small.queue.push(job)
                slow.jobs.append(models[job])
