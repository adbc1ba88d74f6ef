"""FLOP-aware eviction. Pages are of one token and 16 bytes; tokens p ... S - 1 cost 1,152 + 16 (p + S + 1) FLOPs each."""

from math import inf
from random import Random

import pytest

from kvsim.core.cache import CLAIMED
from kvsim.core.tree import Node
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction import flop_aware
from kvsim.policies.eviction.flop_aware import FlopAware
from kvsim.policies.eviction.flop_tuning import ALPHAS, Piece, Tuning, restore, snapshot
from tests.core.small import MACHINE, MODEL, SmallCache, offered, small_cache
from tests.workloads import make_request, random_word

CONTEXT = PolicyContext(model=MODEL, hardware=MACHINE, page_tokens=1)


def filled(alpha: float, *words: str, gpu: int = 12) -> SmallCache:
    cache = small_cache(gpu=gpu, eviction=lambda: FlopAware(alpha=alpha))
    for word in words:
        cache.use(word)
    return cache


def efficiency(node: Node) -> float:
    return CONTEXT.saved_flops(node.depth, node.depth + node.pages) / (node.pages * MODEL.kv_bytes_per_token)


def ages(nodes: list[Node], policy: FlopAware) -> list[int]:
    """Times that a request was announced since the node was used last: at least 1."""
    return [max(1, sum(at > node.last_used for at in policy._announced_s)) for node in nodes]


def utilities(nodes: list[Node], alpha: float, policy: FlopAware) -> dict[Node, float]:
    """Of each leaf, by looking at all."""

    def minmax(values: list[float]) -> list[float]:
        spread = max(values) - min(values)
        return [(value - min(values)) / spread if spread else 0.0 for value in values]

    efficiencies = minmax([efficiency(node) for node in nodes])
    recencies = minmax([1 / age for age in ages(nodes, policy)])
    return {node: alpha * e + r for node, e, r in zip(nodes, efficiencies, recencies, strict=True)}


def test_efficiency_is_that_of_the_last_bytes() -> None:
    """Nodes ab and cdef: 1,152 + 16 x 3 and 1,152 + 16 x 9 FLOPs for 16 bytes."""
    cache = filled(1.0, "ab", "abcdef")
    assert efficiency(cache.node("ab")) == pytest.approx(1200 / 16)
    assert efficiency(cache.node("abcdef")) == pytest.approx(1296 / 16)


def test_alpha_weighs_depth_against_recency() -> None:
    """Of the two leaves, cdef has all the efficiency and x all the recency."""
    assert filled(0.9, "abcdef", "ab", "x").leaving_order()[0] == "f"
    assert filled(1.1, "abcdef", "ab", "x").leaving_order()[0] == "x"


@pytest.mark.parametrize("alpha", [0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("times", [[1e-9, 2e-9, 3e-9, 4e-9], [0, 0, 0, 3600], [1, 2, 3, 4]])
def test_ages_are_counted_in_requests(alpha: float, times: list[float]) -> None:
    """However much time is between requests, as in a trace whose times are rounded: the same leave first."""
    orders = []
    for now in (times, [10, 20, 30, 40]):
        cache = small_cache(gpu=12, eviction=lambda: FlopAware(alpha=alpha))
        for number, word in enumerate(("abcdef", "gh", "ab", "x")):
            lease = cache.look(word)
            assert cache.admit(lease, len(word), now[number]) and cache.claim(lease, now[number]) == CLAIMED
            cache.insert(lease, now[number])
            cache.finish(lease)
        orders.append([node.runs for node in offered(cache.gpu.eviction, now[-1])])
    assert orders[0] == orders[1] and len(orders[0]) == 3


def test_a_trial_knows_the_ages_of_the_snapshot() -> None:
    policy = filled(1.0, "ab", "cd").gpu.eviction
    again = FlopAware.from_moment(0.5, policy._announced_s)
    assert (again.alpha, list(again._announced_s)) == (0.5, list(policy._announced_s))
    again._announced_s.append(99.0)
    assert len(policy._announced_s) == 4, "two requests, each announced to use nodes and to insert some"


def test_a_trial_without_the_states_is_refused() -> None:
    context = PolicyContext(model=MODEL, page_tokens=1, capacity_pages=9, states_apart=True)
    FlopAware(alpha=1).bind(context)
    with pytest.raises(ValueError, match=r"^alpha=tuned needs recurrent states to share the pages' memory"):
        FlopAware().bind(context)


@pytest.mark.parametrize("bins", [1024, 8, 4])
@pytest.mark.parametrize("alpha", [0, 0.7])
@pytest.mark.parametrize("seed", range(2))
def test_the_victim_is_that_of_comparing_all_leaves(seed: int, alpha: float, bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few bins, efficiencies that share one count as equal."""
    monkeypatch.setattr(flop_aware, "BINS", bins)
    random = Random(seed)
    cache = small_cache(gpu=20, eviction=lambda: FlopAware(alpha=alpha))
    running = []
    for _ in range(120):
        running.append(cache.run(random_word(random, "aaab")))
        if len(running) > random.randint(0, 2):
            cache.finish(running.pop(0))
        now = float(next(cache.clock))
        leaves = [node for node in cache.tree.root.descendants() if node.is_evictable(0)]
        if leaves:
            known = utilities(leaves, alpha, cache.gpu.eviction)
            victims = offered(cache.gpu.eviction, now)
            assert sorted(map(id, victims)) == sorted(map(id, leaves))
            keys = [2 * node.depth + node.pages for node in leaves]
            width = 2**cache.gpu.eviction._halvings
            tolerance = 4 * alpha * width / max(max(keys) - min(keys), 1) if width > 1 else 1e-9
            assert known[victims[0]] <= min(known.values()) + tolerance


def test_long_paths_join_bins_and_forget_no_leaf() -> None:
    cache = filled(1.0, gpu=10_000)
    words = [[0, 1, 2], range(10, 3000), range(4000, 4600), range(5000, 10_000)]
    for index, pages in enumerate(words):
        lease = cache.match(make_request(pages, index=index))
        assert cache.admit(lease, len(pages), float(index))
        cache.insert(lease, float(index))
        cache.finish(lease)
    assert [node.pages for node in offered(cache.gpu.eviction, 9.0)] == [3, 600, 2990, 5000]
    assert cache.gpu.eviction._halvings == 3


def test_old_entries_are_forgotten() -> None:
    cache = filled(1.0, *("abc"[number % 3] for number in range(3000)))
    assert len(cache.gpu.eviction._newest) + len(cache.gpu.eviction._older) <= 1025
    assert sum(len(known.entries) for known in cache.gpu.eviction._bins.filled) <= 1025


# --- alpha: tuned ---

SHALLOW = 60


def workload() -> list[tuple[str, str]]:
    """A long prompt that comes back after ten short ones of their own."""
    return [("long", "abcdefghij") if number % 11 == 0 else ("short", chr(SHALLOW + 256 + number)) for number in range(200)]


def described(pieces: list[Piece]) -> set[tuple[object, ...]]:
    """Pieces with their parents' extents instead of their positions."""
    return {(pieces[piece.parent].extents if piece.parent >= 0 else (), *piece[1:]) for piece in pieces}


def test_a_snapshot_is_restored() -> None:
    cache = filled(0, "abc", "abd", "xy", "ab", gpu=7)
    cache.use("q")
    pieces = snapshot(cache.tree.root, 0)
    again = small_cache(gpu=7)
    restore(pieces, again.core)
    again.check()
    assert described(snapshot(again.tree.root, 0)) == described(pieces)
    assert sum(piece.pages for piece in pieces) == len(cache.on("gpu")) == 7


def test_alpha_is_0_until_five_times_the_requests_before_the_first_eviction() -> None:
    """Twelve pages are full after the long prompt and two short ones: the fourth request evicts, 20 more are collected."""
    cache = small_cache(gpu=12, eviction=FlopAware)
    policy, alphas = cache.gpu.eviction, []
    for index, (_, word) in enumerate(workload()):
        cache.use(word, index=index)
        alphas.append(policy._alpha)
    changed = next(index for index, alpha in enumerate(alphas) if alpha)
    assert changed == 3 + 20
    assert set(alphas[changed:]) == {alphas[-1]}
    hits = {alpha: play(alpha) for alpha in (0, alphas[-1])}
    assert hits[alphas[-1]] > hits[0]


def play(alpha: float) -> int:
    cache = small_cache(gpu=12, eviction=lambda: FlopAware(alpha=alpha))
    return sum(cache.use(word)[0] for _, word in workload())


def test_the_alpha_is_the_least_of_those_that_save_most() -> None:
    cache = filled(0, "abcdefghij", "x", "y")
    context = PolicyContext(model=MODEL, page_tokens=1, capacity_pages=12)
    tuning = Tuning(context, FlopAware.from_moment, cache.gpu.eviction.empty_cache)
    for index in range(3):
        assert tuning.observe(make_request([0], index=index), float(index)) is None
    tuning.begin(cache.node("x"), cache.gpu.eviction._announced_s)
    found = None
    for index, (_, word) in enumerate(workload()[:15], 3):
        assert found is None
        found = tuning.observe(cache.request(word, index=index), 10.0 + index)
    saved = {alpha: tuning.saved_flops(alpha) for alpha in ALPHAS}
    assert saved[found] == max(saved.values()) > saved[0.0]
    assert found == min(alpha for alpha in ALPHAS if saved[alpha] == saved[found])
    assert max(saved.values()) == 2 * CONTEXT.saved_flops(0, 9), "twice all but the last token of the long prompt"


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(-1, "0 or more"), (-0.5, "0 or more"), ("high", "a number of at least 0"), (inf, "a finite number of at least 0")],
)
def test_alpha_is_a_number_or_tuned(alpha: float | str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"alpha must be {expected}, not {alpha!r}; or set it to tuned"):
        FlopAware(alpha=alpha)
