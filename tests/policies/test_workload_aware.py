"""Workload-aware eviction."""

from math import exp
from random import Random

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.workload_aware import PageReuse, RequestClass, WorkloadAware
from tests.core.small import SmallCache, offered, small_cache
from tests.workloads import make_request, random_word


def class_of(requests: int, continued: int, reuse_s: float, window_s: float = 10.0) -> RequestClass:
    made = RequestClass(0, window_s)
    made.count(requests=requests, continued=continued, reuse_s=reuse_s)
    return made


def test_the_chance_of_reuse_is_that_of_the_paper() -> None:
    """p = 6 / 12, a = 6 / (20 + 10) = .2; at age 5: .5 (e^-1 - e^-3) / (.5 + .5 e^-1)."""
    made = class_of(10, 5, 20.0)
    assert made.reuse_probability(5.0) == pytest.approx((exp(-1) - exp(-3)) / (1 + exp(-1)))
    assert made.reuse_probability(0.0) == pytest.approx(0.5 * (1 - exp(-2)))
    assert class_of(0, 0, 0.0).reuse_probability(5.0) == 1


def test_it_falls_with_age() -> None:
    for made in (class_of(10, 5, 20.0, 7.0), class_of(50, 49, 1.0, 7.0), class_of(3, 0, 0.0, 7.0)):
        chances = [made.reuse_probability(age_s / 4) for age_s in range(200)]
        assert chances == sorted(chances, reverse=True)


def filled(*uses: tuple[str, int, str, int], gpu: int = 40, window_s: float = 60.0) -> SmallCache:
    """Words, each used by a request of (session, type, turn)."""
    cache = small_cache(gpu=gpu, eviction=lambda: WorkloadAware(window_s=window_s))
    for index, (word, session, kind, turn) in enumerate(uses):
        cache.use(word, index=index, session=session, kind=kind, turn=turn)
    return cache


CHATS_GO_ON = [(word, session, "chat", turn) for session, word in enumerate("abc") for turn in range(3)]


def test_types_that_are_continued_stay() -> None:
    """A search is used last, but none was ever continued; a chat was used before it."""
    searches = [(word, 10 + session, "search", 0) for session, word in enumerate("stu")]
    cache = filled(*CHATS_GO_ON, *searches, ("x", 20, "chat", 0), ("v", 21, "search", 0))
    order = cache.leaving_order()
    assert order.index("v") < order.index("x")
    assert order.index("s") < order.index("t") < order.index("u") < order.index("v")


def test_counts_are_those_of_the_requests() -> None:
    policy = filled(*CHATS_GO_ON).gpu.eviction
    counts = {key: (made.requests, made.continued, made.reuse_s) for key, made in policy._classes.items()}
    assert counts == {("chat", 0): (3, 3, 12.0), ("chat", 1): (3, 3, 12.0), ("chat", 2): (3, 0, 0.0)}, "four ticks a turn"


def test_requests_without_a_session_are_never_continued() -> None:
    policy = filled(("a", -1, "chat", 0), ("b", -1, "chat", 0)).gpu.eviction
    assert [(made.requests, made.continued) for made in policy._classes.values()] == [(2, 0)]


def test_among_equals_the_later_offset_leaves_first() -> None:
    """Long after their uses all chances are 0."""
    cache = filled(("abc", 0, "chat", 0), ("xyzuvw", 1, "search", 0), ("mn", 2, "file", 0), window_s=1e-3)
    assert [node.pages for node in offered(cache.gpu.eviction, 1e9)] == [6, 3, 2]


def test_among_equals_pages_leave_as_single_ones_would() -> None:
    """Of six pages of one prompt, three end after all of the other; then the third page of either, and so on."""
    for pages, left in ((3, "abcxyz"), (4, "abxyz"), (5, "abxy"), (7, "ax")):
        cache = filled(("abc", 0, "chat", 0), ("xyzuvw", 1, "search", 0), window_s=1e-3)
        assert cache.admit(cache.match(make_request([-1])), cache.gpu.pool.free + pages, 1e9)
        assert "".join(sorted(cache.on("gpu"))) == left


def least(cache: SmallCache, now: float) -> tuple[float, int]:
    """P and the end of the node that leaves first, by looking at all."""
    leaves = [node for node in cache.tree.root.descendants() if node.is_evictable(0)]
    return min((node.notes[0][0].reuse_probability(now - node.last_used), -node.depth - node.pages) for node in leaves)


@pytest.mark.parametrize("seed", range(6))
def test_the_victim_is_that_of_comparing_all_leaves(seed: int) -> None:
    random = Random(seed)
    cache = small_cache(gpu=14, eviction=lambda: WorkloadAware(window_s=random.choice([3.0, 30.0, 300.0])))
    turns = [0] * 6
    running = []
    for index in range(150):
        session = random.randrange(6)
        word = random_word(random, longest=4)
        about = {"index": index, "session": session, "kind": "xy"[session % 2], "turn": turns[session]}
        turns[session] += 1
        running.append(cache.run(f"{session % 3}{word}", **about))
        if len(running) > random.randint(0, 1):
            cache.finish(running.pop(0))
        now = float(next(cache.clock))
        if any(node.is_evictable(0) for node in cache.tree.root.descendants()):
            victim = offered(cache.gpu.eviction, now)[0]
            chance = victim.notes[0][0].reuse_probability(now - victim.last_used)
            assert (chance, -victim.depth - victim.pages) == least(cache, now)


def by_pages(*uses: tuple[str, str], gpu: int = 40) -> tuple[SmallCache, dict[str, tuple[int, int, float]]]:
    """A cache after words, each used by a request of this type, and by type the pages, those used again, and after how long."""
    cache = small_cache(gpu=gpu, eviction=lambda: WorkloadAware(reuse="pages").variant())
    for index, (word, kind) in enumerate(uses):
        cache.use(word, index=index, kind=kind, turn=0)
    classes = cache.gpu.eviction._classes
    return cache, {kind: (made.requests, made.continued, made.reuse_s) for (kind, _), made in classes.items()}


def test_pages_that_any_request_uses_again_are_reused() -> None:
    """A file begins with two pages that a chat has computed a tick ago. A chat uses these four ticks later, and a page of the
    file's a tick after that was computed."""
    _, counts = by_pages(("abc", "chat"), ("abxy", "file"), ("abxz", "chat"))
    assert counts == {"chat": (3 + 4, 2, 2 * 1.0), "file": (4, 3, 2 * 4.0 + 1.0)}


def test_a_page_is_counted_once_for_each_request_that_used_it() -> None:
    """Two requests at once use what a third one has left: the first of them counts."""
    cache, _ = by_pages(("ab", "chat"))
    running = [cache.run(word, index=1 + at, kind="file", turn=0) for at, word in enumerate(("abx", "aby"))]
    (chat,) = cache.gpu.eviction._classes.values()
    assert (chat.requests, chat.continued) == (2, 2)
    for lease in running:
        cache.finish(lease)
    assert [(made.requests, made.continued) for made in cache.gpu.eviction._classes.values()] == [(2, 2), (6, 0)]


def test_a_use_while_the_first_user_runs_is_no_reuse() -> None:
    """Pages in use cannot leave. Of the four left behind, a third request finds three, of the class that ended last."""
    cache, _ = by_pages()
    first = cache.run("ab", index=0, kind="chat", turn=0)
    second = cache.run("abxy", index=1, kind="file", turn=0)
    cache.finish(first)
    cache.finish(second)
    counts = {kind: (made.requests, made.continued) for (kind, _), made in cache.gpu.eviction._classes.items()}
    assert counts == {"chat": (2, 0), "file": (4, 0)}
    cache.use("abx", index=2, kind="chat", turn=0)
    counts = {kind: (made.requests, made.continued) for (kind, _), made in cache.gpu.eviction._classes.items()}
    assert counts == {"chat": (2 + 3, 0), "file": (4, 3)}


def test_what_has_left_is_not_reused() -> None:
    _, counts = by_pages(("abc", "chat"), ("xyz", "file"), ("abc", "chat"), gpu=3)
    assert counts == {"chat": (6, 0, 0.0), "file": (3, 0, 0.0)}


def test_times_of_pages_sum_up_in_any_order() -> None:
    """A tenth of a second has no exact float."""
    at_once, one_by_one = class_of(0, 0, 0.0), class_of(0, 0, 0.0)
    at_once.count_pages(10, 0.1)
    at_once.count_pages(3, 0.7)
    for reuse_s in [0.1] * 5 + [0.7] * 3 + [0.1] * 5:
        one_by_one.count_pages(1, reuse_s)
    assert at_once.reuse_s == one_by_one.reuse_s == 3.1 and at_once.continued == one_by_one.continued == 13


@pytest.mark.parametrize("seed", range(6))
def test_no_page_is_used_again_more_often_than_it_was_kept(seed: int) -> None:
    """With splits, merges and requests that overlap; so a chance is below 1."""
    random = Random(seed)
    cache = small_cache(gpu=14, eviction=PageReuse)
    running = []
    for index in range(200):
        running.append(cache.run(random_word(random, longest=5), index=index, kind=random.choice("xy"), turn=0))
        if len(running) > random.randint(0, 1):
            cache.finish(running.pop(0))
        policy = cache.gpu.eviction
        assert all(0 <= made.continued <= made.requests for made in policy._classes.values())
    assert all(made.continued > 0 for made in policy._classes.values())


def test_reuse_is_of_sessions_or_pages() -> None:
    policy = WorkloadAware(reuse="session")
    assert policy.variant() is policy
    with pytest.raises(ValueError, match="reuse must be session or pages, not page"):
        WorkloadAware(reuse="page")


def test_old_entries_are_forgotten() -> None:
    cache = filled(*[("abc"[index % 3], index % 3, "chat", 0) for index in range(2000)])
    assert sum(len(made.leaves) for made in cache.gpu.eviction._classes.values()) <= 65


def test_a_window_is_positive() -> None:
    with pytest.raises(ValueError, match="window_s must be above 0, not 0"):
        WorkloadAware(window_s=0)


@pytest.mark.parametrize(
    ("about", "missing"),
    [({}, "the session"), ({"session": 1}, "the turn"), ({"session": 1, "turn": 1}, "the type")],
)
def test_a_trace_without_what_it_needs_is_refused(about: dict[str, int], missing: str) -> None:
    with pytest.raises(ValueError, match=f"needs {missing} of each request"):
        WorkloadAware().bind(PolicyContext(requests=[make_request([0], **about)]))


def test_reuse_of_pages_needs_no_sessions() -> None:
    with pytest.raises(ValueError, match="needs the type of each request"):
        PageReuse().bind(PolicyContext(requests=[make_request([0], turn=1)]))
