"""The files that ``kvsim new`` writes: for each family the class, its YAML and its test."""

EVICTION = (
    '''
"""@Class@: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.numbers import Real, check_settings
from kvsim.policies.eviction.base import RankedEviction


@dataclass(kw_only=True, eq=False)
class @Class@(RankedEviction):
    """State the purpose of the policy in one sentence, then the rule.

    rank = last use + seconds_per_hit for each hit; the smallest rank is evicted first
    """

    seconds_per_hit: float = 60.0

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "seconds_per_hit")

    def rank(self, node: Node) -> float:
        """Called again after each use of the node; the rank must not change in between."""
        return node.last_used + self.seconds_per_hit * node.hits
''',
    """
# State in one line what is evicted first, and for which traffic that works well.
_target_: kvsim.policies.eviction.@name@.@Class@

# Seconds that a page is kept longer for each hit. 0: LRU.
seconds_per_hit: 60.0
""",
    '''
"""@Class@ by hand: each letter is a page, each use is a prompt of its own."""

import pytest

from kvsim.policies.eviction.@name@ import @Class@
from tests.policies.small import filled


def test_a_page_that_was_hit_often_outlasts_newer_ones() -> None:
    assert filled(@Class@(seconds_per_hit=100), "a", "a", "a", "b", "c").leaving_order() == "bca"


def test_without_a_weight_for_hits_it_is_lru() -> None:
    assert filled(@Class@(seconds_per_hit=0), "a", "a", "a", "b", "c").leaving_order() == "abc"


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds_per_hit must be 0 or more, not -1"):
        @Class@(seconds_per_hit=-1)
''',
)

PREFETCH = (
    '''
"""@Class@: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.policies.prefetch.base import Offer, PrefetchPolicy, Refusal


@dataclass(kw_only=True, eq=False)
class @Class@(PrefetchPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    stored < min_tokens          nothing (threshold)
    no room for all in the CPU   as many pages as fit; nothing if none fits (memory)
    otherwise                    all stored pages
    at admission                 all pages in the CPU tier; nothing from disk
    """

    min_tokens: int = 256

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "min_tokens")

    def fetch(self, offer: Offer) -> int | Refusal:
        if offer.stored_pages * self.page_tokens < self.min_tokens:
            return Refusal.THRESHOLD
        return min(offer.stored_pages, offer.available_pages) or Refusal.MEMORY

    def load(self, request: Request, gpu_pages: int, cpu_pages: int, disk_pages: int) -> int:
        return cpu_pages
''',
    """
# State in one line what is read ahead, and for which traffic that works well.
_target_: kvsim.policies.prefetch.@name@.@Class@

# Shortest continuation worth fetching, in tokens. Recomputing a shorter one is about as fast.
min_tokens: 256
""",
    '''
"""@Class@ by hand: pages of 16 tokens."""

import pytest

from kvsim.policies.prefetch.@name@ import @Class@
from kvsim.policies.prefetch.base import Refusal
from tests.policies.test_prefetch import ANY, bound, offer


def test_it_fetches_from_the_threshold_on() -> None:
    policy = bound(@Class@(min_tokens=256))
    assert policy.fetch(offer(15)) is Refusal.THRESHOLD
    assert policy.fetch(offer(16)) == 16


def test_it_fetches_what_fits() -> None:
    policy = bound(@Class@())
    assert policy.fetch(offer(50, available=20)) == 20
    assert policy.fetch(offer(50, available=0)) is Refusal.MEMORY


def test_it_loads_what_the_cpu_has() -> None:
    assert bound(@Class@()).load(ANY, 1, 3, 4) == 3


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be at least 1, not 0"):
        @Class@(min_tokens=0)
''',
)

PLACEMENT = (
    '''
"""@Class@: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.tree import Node
from kvsim.numbers import Whole, check_settings
from kvsim.policies.placement.base import PlacementPolicy


@dataclass(kw_only=True, eq=False)
class @Class@(PlacementPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    after use        copy down from the ``hits``-th use on; computing the page is the first use
    after eviction   copy down, unless another tier has the page
    """

    hits: int = 3

    def __post_init__(self) -> None:
        check_settings(self, Whole(1), "hits")

    def after_use(self, node: Node, now: float) -> bool:
        return node.hits >= self.hits

    def after_eviction(self, node: Node, now: float) -> bool:
        return True
''',
    """
# State in one line when a page is copied down, and for which traffic that works well.
_target_: kvsim.policies.placement.@name@.@Class@

# Number of uses after which a page is copied down before its eviction. 1 copies it as soon as it is computed.
hits: 3
""",
    '''
"""@Class@ by hand: each letter is a page, each word a prompt."""

from functools import partial

import pytest

from kvsim.policies.placement.@name@ import @Class@
from tests.core.small import small_cache


def test_a_page_is_copied_from_the_hits_th_use_on() -> None:
    cache = small_cache(gpu=6, cpu=8, placement=partial(@Class@, hits=2))
    cache.use("ab")
    assert cache.on("cpu") == ""
    cache.use("abc")
    assert cache.on("cpu") == "ab"


def test_what_is_evicted_is_copied() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=partial(@Class@, hits=9))
    cache.use("abc")
    cache.use("xy")
    assert (cache.on("gpu"), cache.on("cpu")) == ("axy", "bc")


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="hits must be at least 1, not 0"):
        @Class@(hits=0)
''',
)

CHECKPOINT_RULES = """

def test_states_are_saved_at_the_branch_and_at_the_end() -> None:
    assert list(@Class@().after_prefill(Prefill(start=2, known=5, full=9, replay=8))) == [5, 9]


def test_a_short_prefill_saves_none() -> None:
    assert list(@Class@(min_pages=8).after_prefill(Prefill(start=2, known=5, full=9, replay=8))) == []


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="min_pages must be at least 1, not 0"):
        @Class@(min_pages=0)
"""
"""What the test of a new checkpoint policy says, after its imports."""

CHECKPOINT = (
    '''
"""@Class@: name the source of the rule."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.numbers import Whole, check_settings
from kvsim.policies.checkpoint.base import CheckpointPolicy, Prefill


@dataclass(kw_only=True, eq=False)
class @Class@(CheckpointPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    prompt   at the end of the known prefix and after the last full page, if at least min_pages are computed
    answer   nothing
    """

    min_pages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, Whole(1), "min_pages")

    def after_prefill(self, prefill: Prefill) -> Sequence[int]:
        return (prefill.known, prefill.full) if prefill.full - prefill.start >= self.min_pages else ()
''',
    """
# State in one line where a state is saved, and for which traffic that works well.
_target_: kvsim.policies.checkpoint.@name@.@Class@

# Fewest computed pages for which states are saved: recomputing fewer is about as fast.
min_pages: 1

# Most states kept along one path; beyond that, the least recently used one is dropped. null sets no limit.
max_states_per_path: null

# Whether a state stays, in a cache of its own, when the KV of its prefix is evicted from the GPU.
detached: false

# Most states in this cache. null sets no limit.
detached_states: null
""",
    '''
"""@Class@ by hand, in pages."""

import pytest

from kvsim.policies.checkpoint.@name@ import @Class@
from kvsim.policies.checkpoint.base import Prefill
'''
    + CHECKPOINT_RULES,
)

ROUTING = (
    '''
"""@Class@: name the source of the rule."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.numbers import Whole, check_settings
from kvsim.policies.routing.base import EngineStatus, RoutingPolicy
from kvsim.policies.routing.context import RoutingContext


@dataclass(kw_only=True, eq=False)
class @Class@(RoutingPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    the session's last engine has at most max_extra_requests more than the idlest   that engine
    otherwise                                                                       the idlest
    """

    max_extra_requests: int = 8

    def __post_init__(self) -> None:
        check_settings(self, Whole(), "max_extra_requests")

    def bind(self, context: RoutingContext) -> None:
        self._last: dict[int, int] = {}

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        idlest = min(engines, key=lambda status: status.outstanding_requests)
        most = idlest.outstanding_requests + self.max_extra_requests
        for status in engines:
            if status.engine == self._last.get(request.session) and status.outstanding_requests <= most:
                return status.engine
        return idlest.engine

    def on_sent(self, request: Request, engine: int, now: float) -> None:
        if request.session >= 0:
            self._last[request.session] = engine
''',
    """
# State in one line which engine gets a request, and for which traffic that works well.
_target_: kvsim.policies.routing.@name@.@Class@

# Requests that a session's engine may have above the idlest before the session moves. 0: the idlest always.
max_extra_requests: 8
""",
    '''
"""@Class@ by hand: requests that do not end."""

import pytest

from kvsim.policies.routing.@name@ import @Class@
from tests.policies.small_routing import prompt, router


def test_a_session_stays_until_its_engine_has_too_much_to_do() -> None:
    small = router(@Class@(max_extra_requests=2), engines=2)
    assert [small.send(prompt(session=5), 0.0) for _ in range(5)] == [0, 0, 0, 1, 1]


def test_other_requests_go_to_the_idlest_engine() -> None:
    small = router(@Class@(), engines=2)
    assert [small.send(prompt(index=index), 0.0) for index in range(4)] == [0, 1, 0, 1]


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="max_extra_requests must be 0 or more, not -1"):
        @Class@(max_extra_requests=-1)
''',
)

SCHEDULING = (
    '''
"""@Class@: name the source of the rule."""

from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.numbers import Real, check_settings
from kvsim.policies.scheduling.base import SchedulingPolicy


@dataclass(kw_only=True, eq=False)
class @Class@(SchedulingPolicy):
    """State the purpose of the policy in one sentence, then the rule.

    rank = arrival + seconds_per_1024_tokens for each 1,024 tokens to compute; the smallest rank is tried first
    """

    seconds_per_1024_tokens: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self, Real(least=0), "seconds_per_1024_tokens")

    def rank(self, waiting: Waiting) -> float:
        """Called when the request begins to wait; define order() instead for an order that changes while requests wait."""
        return waiting.arrival_s + self.seconds_per_1024_tokens * waiting.target_tokens / 1024
''',
    """
# State in one line which request is admitted first, and for which traffic that works well.
_target_: kvsim.policies.scheduling.@name@.@Class@

# Seconds by which a request is tried later for each 1,024 tokens of its prompt. 0: first come, first served.
seconds_per_1024_tokens: 1.0
""",
    '''
"""@Class@ by hand: prompts are words, a page of 16 tokens for each letter."""

import pytest

from kvsim.policies.scheduling.@name@ import @Class@
from tests.policies.small_queue import small_queue


def test_a_long_prompt_comes_later() -> None:
    small = small_queue(@Class@(seconds_per_1024_tokens=1024))
    small.wait("abcd", at=0.0)
    small.wait("xy", at=30.0)
    small.wait("z", at=60.0)
    assert small.order() == "xy abcd z"


def test_without_a_weight_for_tokens_it_is_first_come_first_served() -> None:
    small = small_queue(@Class@(seconds_per_1024_tokens=0))
    small.wait("abcd", "xy", "z")
    assert small.order() == "abcd xy z"


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds_per_1024_tokens must be 0 or more, not -1"):
        @Class@(seconds_per_1024_tokens=-1)
''',
)
