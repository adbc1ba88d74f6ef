"""``rules=sglang_mamba``: one test for each rule, then random and real traces against slower models and recorded hits."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvsim.core.pool import Pool, SlotPool
from kvsim.core.request import Request, RetentionRange
from kvsim.core.rules import CacheSetup, HybridSettings, Rules
from kvsim.core.serving import RulesError
from kvsim.core.tier import Tier
from kvsim.engines.sglang.rules import SGLangMambaRules
from kvsim.engines.sglang.stateful_nodes import StatefulLease, StatefulNodeCache
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.checkpoint.branch import Branch
from kvsim.policies.checkpoint.none import NoCheckpoint
from kvsim.policies.context import PolicyContext
from kvsim.policies.eviction.lru import LRU
from kvsim.run import play
from kvsim.settings.configuration import compose
from kvsim.trace.mooncake import Mooncake
from tests.engine.small import HARDWARE, MODEL
from tests.engines import small
from tests.engines.recorded import golden_rows, reference
from tests.engines.slow_stateful import NoSlot, SlowStateful
from tests.policies.small import POLICIES, policy_of
from tests.workloads import EXAMPLES, Words, as_records, extents_of, random_requests

TRACE = "traces/mooncake_conversation_trace.jsonl.gz"


def make_cache(
    pages: int, states: int, *, chunk: int = 0, page_tokens: int = 1, eviction: Any = None, context: Any = None, **rules: bool
) -> StatefulNodeCache:
    """A cache by SGLang's rules; ``chunk`` is in pages. Page slots are numbered, so that none can have two owners."""
    tiers = []
    for pool in (SlotPool(pages), Pool(states)):
        policy = LRU() if eviction is None or tiers else eviction
        policy.bind(PolicyContext(tier=0, capacity_pages=pages, page_tokens=page_tokens, **(context or {})))
        tiers.append(Tier("gpu", 0, pool, policy))
    hybrid = HybridSettings(
        checkpoint=NoCheckpoint(),
        state_tiers=tiers[1:],
        state_pages=1,
        state_bytes=1_000,
        grid_pages=1,
        prefill_chunk_tokens=chunk * page_tokens,
    )
    cache = SGLangMambaRules(**rules).server(CacheSetup(tiers=tiers[:1], edges=[], page_tokens=page_tokens, hybrid=hybrid))
    assert isinstance(cache, StatefulNodeCache)
    return cache


def check(cache: StatefulNodeCache, held: Iterable[StatefulLease]) -> None:
    """Recount slots of pages and states, pins, and what can be evicted."""
    held = list(held)
    small.check(cache, held)
    assert cache.slots.capacity - cache.slots.free == len(cache.states) + sum(one.states for one in held)
    for node, users in cache.states.items():
        assert node.state[0]
        assert users == sum(one.node is node for one in held)


def hits_of(cache: StatefulNodeCache, requests: list[Request], *, in_flight: int = 1) -> list[int]:
    """Hits of all requests; -1 for a rejected one."""
    rows = small.replayed(cache, requests, in_flight=in_flight)
    check(cache, [])
    return [gpu for gpu, _, _ in rows]


class Small:
    """A cache of one-token pages; ``use`` takes a word. By default it computes one token more than the pages of the word."""

    def __init__(self, pages: int, states: int, **settings: Any) -> None:
        self.cache = make_cache(pages, states, **settings)
        self.words = Words()
        self.running: list[StatefulLease] = []

    def start(self, word: str, *, tail: int = 1, output: int = 0, **about: Any) -> StatefulLease | None:
        return self.serve(self.words.request(word, tail=tail, output=output, **about))

    def serve(self, request: Request) -> StatefulLease | None:
        lease = self.cache.serve(request, request.prompt_tokens + request.output_tokens, 0.0)
        self.running += [lease] if lease else []
        self.check()
        return lease

    def finish(self, lease: StatefulLease | None) -> None:
        assert lease is not None
        self.running.remove(lease)
        self.cache.finish_request(lease)
        self.check()

    def check(self) -> None:
        waiting = self.cache._waiting
        if waiting is not None:
            waiting.slots = self.cache.gpu.pool.take(0)
        check(self.cache, self.running if waiting is None else [*self.running, waiting])

    def use(self, *words: str, tail: int = 1, output: int = 0) -> int:
        """Requests from beginning to end; the hits of the last one, -1 if it was rejected."""
        hits = -1
        for word in words:
            lease = self.start(word, tail=tail, output=output)
            hits = lease.hits[0] if lease else -1
            if lease:
                self.finish(lease)
        return hits

    def answer(self, word: str, answer: str, *, tail: int = 0) -> None:
        """A request with the pages of an answer; its last token's KV is never computed."""
        request = self.words.request(word, tail=tail, output=len(answer) + 1)
        request.output_runs = extents_of(self.words.pages(word + answer)[len(word) :])
        self.finish(self.serve(request))

    def nodes(self) -> list[str]:
        """The letters of each node, in order of their page ids; with a star where there is a state."""
        nodes = sorted(self.cache.tree.root.descendants(), key=lambda node: node.runs)
        return [self.words.text(node.runs) + "*" * (node in self.cache.states) for node in nodes]


# --- hits ------------------------------------------------------------------------------------------------------------------


def test_the_last_token_is_always_computed() -> None:
    cache = Small(20, 10)
    assert [cache.use("abcd", tail=0), cache.use("abcd", tail=0), cache.use("abcd")] == [0, 0, 4]
    assert cache.nodes() == ["abc*", "d*"], "the second look-up cut the node where it ended"


def test_a_hit_ends_at_a_state_and_what_is_known_behind_it_is_computed_again() -> None:
    cache = Small(20, 10, extra_buffer=False)
    cache.use("ab", "abcdef")
    assert cache.nodes() == ["ab*", "cdef*"]
    assert cache.use("abcdxy") == 2
    assert cache.nodes() == ["ab*", "cd", "ef*", "xy*"]
    assert cache.cache.known_pages == {0: 4}
    counts = cache.cache.describe_checkpoints()
    assert (counts["tokens_lost_to_missing_state"], counts["used"], counts["saved"], counts["bytes"]) == (2, 2, 3, 3_000)


def test_states_after_each_chunk_from_the_hit_on() -> None:
    cache = Small(40, 12, chunk=2)
    cache.use("abcde")
    assert cache.nodes() == ["ab*", "cd*", "e*"]
    assert cache.use("abcdefgh") == 5
    assert cache.nodes() == ["ab*", "cd*", "e*", "fg*", "h*"]


def test_the_branching_point_has_a_state_instead_of_the_chunk_s_end() -> None:
    cache = Small(40, 12)
    cache.use("abcd")
    assert cache.use("abxy") == 0
    assert cache.nodes() == ["ab*", "cd*"], "x and y are not inserted: no chunk follows"
    assert cache.use("abxy") == 2
    assert cache.nodes() == ["ab*", "cd*", "xy*"]


def test_without_the_extra_buffer_states_are_at_the_end_of_chunks_only() -> None:
    cache = Small(40, 12, extra_buffer=False)
    cache.use("abcd")
    assert cache.use("abxy") == 0
    assert cache.nodes() == ["ab", "cd*", "xy*"]
    assert [cache.use("abz"), cache.use("abxyz")] == [0, 4]


# --- two pools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extra_buffer", "kept"), [(True, 4), (False, 6)])
def test_a_running_request_works_with_slots_of_its_own(extra_buffer: bool, kept: int) -> None:
    cache = Small(100, 7, extra_buffer=extra_buffer)
    lease = cache.start("a")
    assert lease is not None and lease.states == 7 - 6 + 2 * extra_buffer
    cache.finish(lease)
    cache.use(*"bcdefghij")
    assert cache.nodes() == [f"{letter}*" for letter in "abcdefghij"[-kept:]]


def test_a_leaf_that_loses_its_state_loses_its_pages_and_any_other_node_keeps_them() -> None:
    cache = Small(100, 5)
    cache.use("a", "ab", "x")
    assert cache.nodes() == ["a", "b*", "x*"]
    cache.use("y")
    assert cache.nodes() == ["a", "x*", "y*"], "a has become a leaf without a state"


# --- room and recency ------------------------------------------------------------------------------------------------------


def test_whole_leaves_leave_least_recently_used_first_and_parents_compete() -> None:
    cache = Small(10, 20, chunk=2)
    cache.use("abcd", "xyz")
    assert cache.nodes() == ["ab*", "cd*", "xy*", "z*"]
    cache.use("pqr")
    assert cache.nodes() == ["ab*", "xy*", "z*", "pq*", "r*"], "one page more than needed"
    cache.use("uvw")
    assert cache.nodes() == ["xy*", "z*", "pq*", "r*", "uv*", "w*"], "a and b, left without c and d, were the oldest leaf"


def test_a_request_without_room_keeps_what_it_found_until_it_runs() -> None:
    cache = Small(9, 20)
    cache.use("ab")
    running = cache.start("xyz", output=2)
    waiting = cache.words.request("abcd", tail=1)
    assert cache.serve(waiting) is None
    assert cache.cache._waiting is not None and cache.cache._waiting.states == 1
    assert cache.cache.gpu.evictable_pages == 0
    cache.finish(running)
    lease = cache.serve(waiting)
    assert lease is not None and lease.hits == (2, 0, 0)


# --- answers ---------------------------------------------------------------------------------------------------------------


def test_an_answer_enters_with_its_last_state_and_with_pages_left_out_before() -> None:
    cache = Small(30, 10, cache_output=True)
    cache.use("abcd", tail=0)
    cache.answer("abxy", "pq")
    assert cache.nodes() == ["ab*", "cd*", "xypq*"]
    assert cache.use("abxypqz") == 6


def test_without_the_extra_buffer_an_answer_enters_whole() -> None:
    """The last token of the answer takes a page, which nobody can hit."""
    cache = make_cache(30, 10, extra_buffer=False, cache_output=True)
    request = replace(Words().request("ab", output=3), output_runs=((2, 2),))
    lease = cache.serve(request, 5, 0.0)
    assert lease is not None
    cache.finish_request(lease)
    assert [node.runs for node in cache.states] == [((0, 2),), ((2, 2), (-(1 << 32), 1))]
    assert cache.gpu.pool.free == 30 - 5


# --- policies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_any_policy_is_asked_by_the_contract_alone(name: str) -> None:
    requests = with_answers(random_requests(1, requests=200))
    for request in requests:
        request.turn, request.session = divmod(request.index, 7)
        request.priority, request.kind = request.index % 3, "chat"
        request.retention = (RetentionRange(0, request.prompt_tokens, 30 + 10 * request.priority, 5.0),)
    known = {"requests": requests, "model": MODEL, "hardware": HardwareSpec(**HARDWARE), "empty_cache": small.empty_cache}
    cache = make_cache(14, 12, chunk=2, page_tokens=4, eviction=policy_of(name), context=known, cache_output=True)
    rows = hits_of(cache, requests, in_flight=2)
    assert cache.gpu.evicted_pages > 100
    assert sum(hits for hits in rows) > 50


# --- settings --------------------------------------------------------------------------------------------------------------


def plan(*overrides: str, command: str = "replay") -> Plan:
    return build_run(compose(["preset=sglang_mamba", *overrides]), command=command, overrides=overrides)


def test_the_rules_are_for_replay() -> None:
    assert plan().rules == SGLangMambaRules(cache_output=True)
    assert plan("rules.cache_output=false", "rules.extra_buffer=false").rules == SGLangMambaRules(extra_buffer=False)
    simulated = plan(command="simulate")
    assert simulated.rules == Rules(cache_output=True)
    assert isinstance(simulated.checkpoint, Branch) and simulated.checkpoint.prompt_end


def test_a_replay_counts_states() -> None:
    built = plan("trace.sessions=30", "tiers.gpu.states=100states", "tiers.gpu.capacity=3000pages")
    requests = built.trace.load(built.page_tokens).requests
    outcome = play.replay(built, requests)
    counts = outcome.checkpoints
    assert counts["saved"] > counts["evicted"] > 0 and counts["used"] > 0
    assert counts["bytes"] == counts["saved"] * built.model.state_bytes
    known, hits = outcome.known_pages, outcome.hit_pages.sum(axis=1)
    assert known is not None
    assert (known >= hits).all() and (known - hits).sum() * 64 == counts["tokens_lost_to_missing_state"] > 0


def test_too_few_slots_end_a_run_with_one_line() -> None:
    built = plan("trace.sessions=30", "tiers.gpu.states=9states", "replay.in_flight=3")
    with pytest.raises(UsageError, match=r"^tiers\.gpu\.states: request \d+ finds no slot for a state, since 3 running requests"):
        play.replay(built, built.trace.load(built.page_tokens).requests)


@pytest.mark.parametrize(
    ("overrides", "command", "words"),
    [
        (
            ["tiers.gpu.states=shared"],
            "replay",
            "rules: SGLang keeps states in a pool of their own: set tiers.gpu.states=64states",
        ),
        (
            ["tiers.cpu.capacity=1GiB", "tiers.cpu.states=1GiB"],
            "replay",
            "rules: SGLang's rules for hybrid models have no cpu tier: set",
        ),
        (["model=llama3_8b"], "replay", "rules: these rules of an engine need a model with recurrent layers: set rules=default"),
        (["rules=sglang"], "replay", "rules: these rules of an engine need a model without recurrent layers: set rules=default"),
        (
            ["checkpoint=branch"],
            "replay",
            "checkpoint has no effect under the rules of an engine that decides itself where states",
        ),
        (["checkpoint.prompt_end=false"], "replay", "checkpoint.prompt_end has no effect under the rules of an engine"),
        (
            ["rules.extra_buffer=false"],
            "simulate",
            "rules.extra_buffer has no effect on kvsim simulate with tiers gpu",
        ),
        (
            ["replay.prefill_chunk_tokens=63"],
            "replay",
            "rules: replay.prefill_chunk_tokens=63 is less than page_tokens=64: increase",
        ),
        (["page_tokens=16"], "replay", "rules: SGLang may save a state after any page, but this model has one only after"),
        (["eviction=belady"], "replay", "eviction: Belady is not a valid bound for models with recurrent layers"),
    ],
)
def test_what_the_rules_do_not_support_is_an_error(overrides: list[str], command: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        play.replay(plan(*overrides, command=command), [])
    assert str(error.value).startswith(words)


def test_without_the_extra_buffer_pages_may_have_any_size() -> None:
    assert len(play.replay(plan("page_tokens=16", "rules.extra_buffer=false"), []).hit_pages) == 0


# --- slower models, recorded hits ------------------------------------------------------------------------------------------


def with_answers(requests: list[Request]) -> list[Request]:
    """The requests, with answers that have page ids of their own; pages are of four tokens."""
    answered, next_page = [], 10_000
    for request in requests:
        pages = (request.prompt_tokens + max(request.output_tokens, 1) - 1) // 4 - request.prompt_pages
        answered.append(replace(request, output_runs=((next_page, pages),) if pages else ()))
        next_page += pages + 1
    return answered


def setting(seed: int) -> tuple[int, int, int, dict[str, Any], bool]:
    """Pages, states, requests in flight, settings of both models, and whether answers are cached."""
    return 3 + seed % 37, 4 + seed * 7 % 29, 1 + seed % 4, {"chunk": seed % 5, "extra_buffer": seed % 3 > 0}, seed % 7 > 2


def mine_or_none(requests: list[Request], seed: int) -> list[int] | None:
    """The hits of a random trace; None if it needs more slots for states."""
    pages, states, in_flight, settings, answers = setting(seed)
    try:
        return hits_of(make_cache(pages, states, page_tokens=4, cache_output=answers, **settings), requests, in_flight=in_flight)
    except RulesError:
        return None


def test_random_traces_hit_as_in_the_slow_model() -> None:
    hits = rejected = 0
    for seed in range(2 * EXAMPLES):
        requests = with_answers(random_requests(seed))
        pages, states, in_flight, settings, answers = setting(seed)
        slow = SlowStateful(pages, states, page_tokens=4, answers=answers, **settings)
        mine = mine_or_none(requests, seed)
        try:
            assert mine == slow.play(requests, in_flight=in_flight), seed
        except NoSlot:
            assert mine is None, seed
        hits, rejected = hits + sum(row for row in mine or [] if row > 0), rejected + (mine or []).count(-1)
    assert hits > 40 * EXAMPLES and rejected > EXAMPLES // 3


@pytest.mark.parametrize(
    ("page_tokens", "pages", "states", "in_flight", "settings"),
    [
        (16, 90, 30, 3, {"chunk": 2}),
        (16, 40, 12, 1, {"extra_buffer": False}),
        (512, 60, 20, 2, {"chunk": 3}),
    ],
)
def test_conversations_hit_as_in_the_slow_model(
    chats: dict[int, list[Request]], page_tokens: int, pages: int, states: int, in_flight: int, settings: dict[str, Any]
) -> None:
    cache = make_cache(pages, states, page_tokens=page_tokens, **settings)
    mine = hits_of(cache, chats[page_tokens], in_flight=in_flight)
    assert mine == SlowStateful(pages, states, page_tokens=page_tokens, **settings).play(chats[page_tokens], in_flight=in_flight)
    assert sum(mine) > 500


@pytest.mark.long
def test_random_traces_hit_as_in_the_model_beside_the_repository(shared: Path) -> None:
    model = reference(shared, "sglang_mamba_model")
    for seed in range(1_000, 1_500):
        requests = random_requests(seed)
        pages, states, in_flight, settings, answers = setting(seed)
        mine = mine_or_none(with_answers(requests), seed)
        strategy = "extra_buffer" if settings["extra_buffer"] else "no_buffer"
        kept = "unique" if answers else "room"
        try:
            rows = model.play(as_records(requests), pages, states, strategy, settings["chunk"], kept, in_flight, 4)
        except AssertionError:
            assert mine is None, seed
            continue
        assert mine == [row[2] for row in rows], seed


SEQUENCES = [("3000_64", 3_000, 64, 16), ("6000_256", 6_000, 256, 16), ("6000_256_nochunk", 6_000, 256, 0)]


@pytest.mark.parametrize(("name", "pages", "states", "chunk"), SEQUENCES)
def test_conversation_hits_what_the_engine_hit(
    shared: Path, conversation: list[Request], name: str, pages: int, states: int, chunk: int
) -> None:
    rows = golden_rows(shared, f"conv.sglang_mamba_{name}", 2_000)
    assert hits_of(make_cache(pages, states, chunk=chunk, page_tokens=512), conversation) == [row[0] for row in rows]


@pytest.mark.long
@pytest.mark.parametrize(("name", "pages", "states", "chunk"), SEQUENCES)
def test_the_whole_conversation_hits_what_the_engine_hit(shared: Path, name: str, pages: int, states: int, chunk: int) -> None:
    requests = Mooncake(path=str(shared / TRACE)).load(512).requests
    rows = golden_rows(shared, f"conv.sglang_mamba_{name}", len(requests))
    assert hits_of(make_cache(pages, states, chunk=chunk, page_tokens=512), requests) == [row[0] for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["extra_buffer", "no_buffer"])
@pytest.mark.parametrize("answers", ["room", "unique"])
def test_the_conversation_hits_as_in_the_model_beside_the_repository(shared: Path, strategy: str, answers: str) -> None:
    model = reference(shared, "sglang_mamba_model")
    known = {"room": "none", "unique": "unique"}[answers]
    requests = Mooncake(path=str(shared / TRACE), answers=known, limit=3_000).load(512).requests
    records = as_records(requests)
    for pages, states, chunk, in_flight in ((800, 40, 16, 4), (2_000, 100, 4, 2)):
        rules = {"extra_buffer": strategy == "extra_buffer", "cache_output": answers == "unique"}
        mine = hits_of(make_cache(pages, states, chunk=chunk, page_tokens=512, **rules), requests, in_flight=in_flight)
        rows = model.play(records, pages, states, strategy, chunk, answers, in_flight)
        assert mine == [row[2] for row in rows]
