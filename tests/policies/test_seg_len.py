"""SegLen: segments and the weighted score by hand, and its victims against comparing all leaves and states."""

from random import Random

import pytest

from kvsim.core.tree import READY, Node
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.seg_len import SegmentLength
from tests.core.small import offered, small_cache
from tests.states.small_hybrid import SmallHybrid, hybrid, use
from tests.workloads import random_word


def cache_of(gpu: int, **settings: float) -> tuple[SmallHybrid, SegmentLength]:
    """A state takes three pages."""
    policy = SegmentLength(**settings)
    policy.bind(PolicyContext(page_tokens=1))
    return hybrid(Last(), gpu=gpu, shared_pages=3, eviction=policy), policy


def candidates(cache: SmallHybrid) -> list[Node]:
    """Leaves and states that may leave."""
    return [node for node in [*cache.tree.root.descendants(), *cache.states.index.values()] if node.is_evictable(0)]


def test_a_segment_begins_at_the_nearest_state() -> None:
    cache, policy = cache_of(60)
    use(cache, "ab", "abcdefg", "xyz", "abq")
    assert [policy.worth(cache.node(word))[0] for word in ("abcdefg", "xyz", "abq")] == [5, 3, 1]
    state = policy.state_of(cache.node("ab"))
    assert policy.worth(state)[0] == 2, "two pages from the beginning"
    last = policy.state_of(cache.node("abcdefg"))
    assert policy.worth(last) == (5, last.last_used_in(0))


def test_short_segments_leave_first_and_with_weight_zero_the_oldest() -> None:
    """xyz is older than q. Together with ab and three states they would take 15 slots."""
    for weight, left in ((1.0, "q"), (0.0, "z")):
        cache, _ = cache_of(14, weight=weight)
        use(cache, "xyz", "q", "ab")
        assert left not in cache.on("gpu"), weight


def test_the_score() -> None:
    """Of segments of 3, 1 and 2, used one after another: 0.85 * segment / 3 + 0.15 * (0, 1/2, 1)."""
    cache, policy = cache_of(60)
    use(cache, "xyz", "q", "ab")
    nodes = [cache.node(word) for word in ("xyz", "q", "ab")]
    states = [policy.state_of(node) for node in nodes]
    first, middle, last = (state.last_used_in(0) for state in states)
    assert offered(policy, 1e3)[0] is nodes[1]
    halfway = (middle - first) / (last - first)
    expected = [0.85, 0.85 / 3 + 0.15 * halfway, 0.85 * 2 / 3 + 0.15]
    assert policy.scores(nodes, 1e3) == pytest.approx(expected)


def test_without_states_it_is_lru() -> None:
    cache = small_cache(gpu=12, eviction=SegmentLength)
    for word in ("abc", "abd", "x", "ab", "abc"):
        cache.use(word)
    assert cache.leaving_order() == "dxcba"


def slow_score(policy: SegmentLength, compared: list[Node], node: Node) -> float:
    """The score of a leaf or state, from the formula alone."""

    def worth(one: Node) -> tuple[int, float]:
        pages, state = (one.partner, one) if one.is_state else (one, one.partner)
        if pages is None or state is None or pages.partner is not state or {pages.state[0], state.state[0]} != {READY}:
            return 0, one.last_used_in(0)
        before = [above for above in above_of(pages) if above.partner is not None and above.partner.state[0] == READY]
        end = before[0].depth + before[0].pages if before else 0
        return pages.depth + pages.pages - end, state.last_used_in(0)

    worths = [worth(one) for one in compared]
    longest, times = max(segment for segment, _ in worths), [used_s for _, used_s in worths]
    segment, used_s = worth(node)
    span = max(times) - min(times)
    length = segment / longest if longest else 0
    return policy.weight * length + (1 - policy.weight) * ((used_s - min(times)) / span if span else 0)


def above_of(node: Node) -> list[Node]:
    """The nodes above, the nearest first."""
    above = []
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
        above.append(node)
    return above


@pytest.mark.parametrize("seed", range(4))
def test_the_victim_is_the_lowest_of_all_leaves_and_states(seed: int) -> None:
    random = Random(seed)
    cache, policy = cache_of(30, weight=random.choice([0.3, 0.85]), samples=1000)
    states = 0
    for _ in range(150):
        use(cache, random_word(random, "abc", longest=6))
        now = float(next(cache.clock))
        compared = candidates(cache)
        scores = {node: slow_score(policy, compared, node) for node in compared}
        victim = offered(policy, now)[0]
        assert scores[victim] == pytest.approx(min(scores.values()))
        states += victim.is_state
    assert states > 5


@pytest.mark.parametrize("weight", [-0.1, 1.1])
def test_a_weight_is_a_share(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        SegmentLength(weight=weight)
