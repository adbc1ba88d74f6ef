"""SAECache: what it learns and its priority by hand, and its victims against comparing all leaves."""

from math import erf, log, sqrt
from random import Random

import pytest

from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.sae_cache import ANSWER, FIRST, PROMPT, SHARED, TEMPLATES, SemanticAdaptive, power_of
from kvsim.policies.eviction.sae_learning import Gaps, Parting, QueueWorth, TypeWorth
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import make_request, random_word

Use = tuple[str, int, str]
"""(prompt, session, type)."""


def filled(*uses: Use, gpu: int = 40) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=SemanticAdaptive)
    for index, (word, session, kind) in enumerate(uses):
        cache.use(word, index=index, session=session, kind=kind)
    return cache


def marks(cache: SmallCache, *words: str) -> list[tuple[str, str]]:
    """Queue and type of the nodes that these words end with."""
    return [(mark.queue, mark.kind) for mark in (cache.node(word).notes[0] for word in words)]


# --- what is learned -------------------------------------------------------------------------------------------------


def test_the_weight_of_a_type() -> None:
    """A tenth of the way to 1 + 5 * 2 / 10 + 2 * 3 / 4 = 3.5; then counts have faded, alike: the target stays."""
    worth = TypeWorth()
    worth.evicted_pages, worth.missed_pages, worth.hit_pages, worth.computed_pages = 10, 2, 3, 1
    worth.update()
    assert worth.weight == pytest.approx(0.9 * 1 + 0.1 * 3.5) and worth.missed_pages == pytest.approx(1.98)
    worth.update()
    assert worth.weight == pytest.approx(0.9 * 1.25 + 0.1 * 3.5)
    worth.missed_pages = worth.evicted_pages = worth.hit_pages = 50.0
    for _ in range(200):
        worth.update()
    assert worth.weight == 5.0, "never more"


def test_the_weight_of_a_queue() -> None:
    """Six hits for three pages held, where all queues have one hit a page."""
    worth = QueueWorth()
    worth.held_pages, worth.hit_pages = 3, 6.0
    worth.update(1.0)
    assert worth.weight == pytest.approx(0.9 + 0.1 * 2)
    idle = QueueWorth()
    idle.held_pages = 3
    for _ in range(100):
        idle.update(1.0)
    assert idle.weight == 0.1, "never less"


def test_times_between_turns_are_log_normal() -> None:
    gaps = Gaps()
    assert gaps.survival(100.0) == pytest.approx(0.5 - 0.5 * erf((log(100) - 4.15) / 0.97 / sqrt(2)))
    for _ in range(200):
        gaps.observe(10.0)
    assert gaps.mu == pytest.approx(log(10)) and gaps.survival(5.0) > 0.99 > 0.01 > gaps.survival(20.0)


def test_where_prompts_part() -> None:
    """A mean share of 3/4 is that of P(x) = x^3."""
    parting = Parting()
    for _ in range(300):
        parting.observe(0.75)
    assert parting.gamma == pytest.approx(3) and parting.survival(0.5) == pytest.approx(1 - 0.5**3)


# --- queues and types ------------------------------------------------------------------------------------------------


def test_pages_of_sessions_that_go_on() -> None:
    """The second turn shows it for this session, and raises the chance of first turns: (1 + 1) / (2 + 2)."""
    cache = filled(("a", 0, "chat"), ("ab", 0, "chat"), ("x", 1, "chat"), ("y", 2, "search"))
    assert marks(cache, "ab", "x") == [("sessions/chat", PROMPT)] * 2
    assert marks(cache, "y") == [(FIRST, PROMPT)], "(0 + 1) / (1 + 2)"


def test_pages_of_requests_that_nobody_follows() -> None:
    searches = [(word, session, "search") for session, word in enumerate(("p", "q", "ta", "tb"))]
    cache = filled(*searches)
    assert marks(cache, "ta") == [(FIRST, PROMPT)], "three searches went unanswered before"
    assert marks(cache, "t") == [(TEMPLATES, SHARED)]


def test_answers_are_of_a_type_of_their_own_and_go_first_until_they_are_sent_again() -> None:
    cache = small_cache(gpu=20, eviction=SemanticAdaptive)
    policy = cache.gpu.eviction
    first = make_request(cache.words.pages("ab"), index=0, session=0, kind="chat")
    policy.on_request(first, 0.0)
    node = cache.tree.add(cache.tree.root, ((90, 2),), 2, 0.0)
    assert policy._mark(node, first, "sessions/chat") == PROMPT and node.notes[0].queue == "sessions/chat"
    answer = cache.tree.add(node, ((92, 1),), 1, 0.0)
    assert policy._mark(answer, first, "sessions/chat") == ANSWER and answer.notes[0].queue == FIRST
    assert policy._mark(answer, first, "sessions/chat") == ANSWER and answer.notes[0].queue == "sessions/chat"


def test_the_first_queue_leaves_before_all_others() -> None:
    searches = [(word, session, "search") for session, word in enumerate("pqrs")]
    cache = filled(*searches, ("a", 10, "chat"), ("ab", 10, "chat"), ("z", 11, "search"))
    assert cache.leaving_order() == "pqrszba", "z is the latest, and has no second turn to wait for"


# --- victims ---------------------------------------------------------------------------------------------------------


def slow_place(policy: SemanticAdaptive, node: Node, now: float) -> tuple[int, float, float]:
    """Where a leaf stands, from the formulas alone."""
    if node.notes[0] is None:
        return 2, 0.0, node.last_used
    queue, kind = node.notes[0].queue, node.notes[0].kind
    if queue == FIRST:
        return 0, 0.0, node.last_used
    age = max(now - node.last_used, 1e-3)
    if queue == TEMPLATES:
        share = min(1.0, 2 ** power_of(node.depth + node.pages) / 2 ** power_of(policy._longest))
        chance = 1 - share**policy.parting.gamma
    else:
        gaps = policy.gaps.get(queue, Gaps())
        chance = 0.5 * (1 - erf((log(age) - gaps.mu) / sqrt(2 * gaps.variance + 1e-12)))
    return 1, policy.queues[queue].weight * policy.types[kind].weight * chance / age, node.last_used


@pytest.mark.parametrize("seed", range(5))
def test_the_victim_is_the_lowest_of_all_leaves_and_pages_are_counted(seed: int) -> None:
    random = Random(seed)
    cache = small_cache(gpu=24, eviction=SemanticAdaptive)
    policy, compared = cache.gpu.eviction, 0
    for index in range(250):
        session = random.randrange(40) if random.random() < 0.6 else 100 + index
        word = random.choice(["", "t"]) + random_word(random, "abc", longest=6)
        cache.use(word, index=index, session=session, kind="xyz"[session % 3])
        leaves = [node for node in cache.tree.root.descendants() if node.is_evictable(0)]
        now = float(next(cache.clock))
        places = {node: slow_place(policy, node, now) for node in leaves}
        victim = offered(policy, now)[0]
        least = min(places.values())
        assert places[victim][0] == least[0] and places[victim][1] == pytest.approx(least[1], rel=1e-9, abs=1e-15)
        compared += least[0] == 1
        held = {name: queue.held_pages for name, queue in policy.queues.items() if queue.held_pages}
        counted: dict[str, int] = {}
        for node in cache.tree.root.descendants():
            counted[node.notes[0].queue] = counted.get(node.notes[0].queue, 0) + node.pages
        assert held == counted
    assert compared > 20 and {"sessions/x", TEMPLATES} <= set(policy.queues)
    assert len({worth.weight for worth in policy.types.values()}) > 1, "weights were learned"


def test_old_entries_are_forgotten() -> None:
    cache = filled(*[("abc"[number % 3], number % 3, "chat") for number in range(2000)], gpu=3)
    assert sum(len(group.leaves) for group in cache.gpu.eviction._groups.values()) <= 65


def test_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the session of each request"):
        SemanticAdaptive().bind(PolicyContext(requests=[make_request([0])]))
