"""Who hears an emulated engine's events knows what its cache has, after every step."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.events import EventFeed
from kvsim.emulation.served import Extras, Served
from kvsim.emulation.tellers import TELLERS
from kvsim.kv_events.codec import decode
from kvsim.kv_events.dialects import DIALECTS, encode
from kvsim.kv_events.hashes import sglang_digest, sglang_told, vllm_digest, vllm_told
from kvsim.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvsim.plans.plan import Plan
from tests.emulation.told_index import Index, held_blocks
from tests.servers.emulated import plan_of

SIZE = 4
SMALL = (f"page_tokens={SIZE}", "tiers.gpu.capacity=24pages")
CPU, DISK = "tiers.cpu.capacity=40pages", "tiers.disk.capacity=60pages"
CACHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm": ("vllm", ("preset=vllm", *SMALL)),
    "vllm, overlap": ("vllm", ("preset=vllm", *SMALL, "rules.loop=overlap")),
    "vllm_offload": ("vllm", ("preset=vllm_offload", *SMALL, CPU)),
    "vllm_offload, arc": ("vllm", ("preset=vllm_offload", *SMALL, CPU, "eviction@tiers.cpu.eviction=arc")),
    "vllm_offload, chunks": (
        "vllm",
        (
            "preset=vllm_offload",
            *SMALL,
            CPU,
            "rules.blocks_per_chunk=2",
            "rules.offload_prompt_only=false",
            "rules.cache_output=true",
        ),
    ),
    "sglang": ("sglang", ("preset=sglang", *SMALL)),
    "sglang_hicache": ("sglang", ("preset=sglang_hicache", *SMALL, CPU)),
    "sglang_hicache, write back": ("sglang", ("preset=sglang_hicache", *SMALL, CPU, "placement=write_back")),
    "sglang_hicache, storage": ("sglang", ("preset=sglang_hicache", *SMALL, CPU, DISK)),
    "own rules": ("vllm", ("rules=default", *SMALL)),
    "own rules, three tiers": ("sglang", ("rules=default", *SMALL, CPU, DISK)),
    "own rules, exclusive": ("sglang", ("rules=default", *SMALL, CPU, "placement=exclusive")),
    "windows": ("vllm", ("preset=vllm_window", "model=gpt_oss_20b", "tiers.gpu.capacity=400pages")),
    "hybrid": ("vllm", ("preset=vllm_hybrid", "page_tokens=64", "tiers.gpu.capacity=120pages")),
}
RARER: dict[str, tuple[str, tuple[str, ...]]] = {
    "fastdeploy": ("vllm", ("preset=fastdeploy", *SMALL, CPU, "tiers.disk.capacity=0")),
    "lightllm": ("vllm", ("preset=lightllm", "tiers.gpu.capacity=100pages")),
    "sglang_mamba": ("sglang", ("preset=sglang_mamba", "tiers.gpu.capacity=120pages", "tiers.gpu.states=shared")),
    "marconi": ("vllm", ("preset=marconi", "tiers.gpu.capacity=120pages")),
    "vllm_plus": ("vllm", ("preset=vllm_plus", "tiers.gpu.capacity=120pages")),
}
GPU_ONLY = {"fastdeploy"}
"""What FastDeploy swaps to the host is told to nobody: it publishes no events."""
PLANS: dict[str, Plan] = {}


def plan_named(name: str) -> Plan:
    """Composed once."""
    if name not in PLANS:
        PLANS[name] = plan_of((CACHES | RARER)[name][1])
    return PLANS[name]


class Heard:
    """An emulator whose clock a test moves, and an index that hears its events."""

    def __init__(self, plan: Plan, engine: str, dialect: str | None = None, *, gpu_only: bool = False, **told: Any) -> None:
        self.gpu_only = gpu_only
        self.emulator = Emulator(plan, 1e-9)
        self.last_only = not told.get("self_describing")
        self.index, self.batches = Index(), list[EventBatch]()
        self.dialect = DIALECTS[dialect or TELLERS[engine].dialect]
        env = self.emulator.cluster.env
        self.feed = EventFeed(self.emulator, TELLERS[engine], self._hear, lambda: float(env.now), **told)

    def _hear(self, batch: EventBatch) -> None:
        read = decode(encode(batch, self.dialect))
        self.batches.append(read)
        self.index.apply(read)
        self.check()

    def check(self) -> None:
        for cache in self.emulator.cluster.caches:
            for tier in cache.tiers[:1] if self.gpu_only else cache.tiers:
                held = held_blocks(cache, tier, self.emulator.pages.next_id, self.feed.blocks, last_only=self.last_only)
                assert self.index.held(tier.name) == held, f"{tier.name} after {len(self.batches)} batches"

    def ask(self, tokens: Sequence[int], output: int, extras: Extras = Extras()) -> Served:  # noqa: B008
        return self.emulator.submit(tokens, output, extras=extras)

    def step(self, events: int = 1) -> None:
        env = self.emulator.cluster.env
        for _ in range(events):
            if env.peek() < 1e300:
                env.step()

    def finish(self) -> None:
        """Until nothing happens any more."""
        env = self.emulator.cluster.env
        for _ in range(100_000):
            if env.peek() == float("inf"):
                return
            env.step()
        raise AssertionError("the simulation does not come to rest")

    @property
    def events(self) -> list[Any]:
        return [event for batch in self.batches for event in batch.events]


def within_a_loop(test: Any) -> Any:
    """Run a test in an event loop, whose time the emulator reads."""

    async def run(*args: Any) -> Any:
        return test(*args)

    return lambda *args: asyncio.run(run(*args))


PIECES = st.lists(st.integers(1, 4), min_size=1, max_size=7)
"""A prompt: each number is a piece of text; equal beginnings have pages in common."""
ASKED = st.tuples(PIECES, st.integers(1, 3 * SIZE), st.integers(0, 60), st.sampled_from(["", "", "abort", "reset"]))


def played(name: str, asked: Sequence[tuple[list[int], int, int, str]], dialect: str) -> None:
    plan, engine = plan_named(name), (CACHES | RARER)[name][0]
    heard = Heard(plan, engine, dialect, self_describing=len(asked) % 2 == 1, gpu_only=name in GPU_ONLY)
    length = SIZE + 1 if plan.page_tokens == SIZE else plan.page_tokens + 1
    for pieces, output, steps, then in asked:
        served = heard.ask([piece * 100 + at for piece in pieces for at in range(length)], output)
        heard.step(steps)
        if then == "abort":
            heard.emulator.abort(served)
        elif then == "reset":
            heard.finish()
            assert heard.emulator.empty()
            heard.finish()
            assert heard.batches[-1].events == (AllBlocksCleared(),)
            assert not any(heard.index.blocks.values())
    heard.finish()
    heard.check()
    for block in heard.index.tokens:
        assert hashed(engine, heard.index.path_of(block), plan.page_tokens) == block


def hashed(engine: str, tokens: list[Any], size: int) -> int:
    """The hash of the last of these tokens' blocks."""
    digest, told = TELLERS[engine].hashing
    last: bytes | None = None
    for at in range(0, len(tokens), size):
        last = digest(last, tokens[at : at + size], None)
    assert last is not None
    return told(last)


def check_index(name: str, examples: int) -> None:
    engine = (CACHES | RARER)[name][0]

    @settings(max_examples=examples)
    @given(st.lists(ASKED, min_size=1, max_size=8), st.sampled_from([engine, f"{engine}_arrays"]))
    def check(asked: list[tuple[list[int], int, int, str]], dialect: str) -> None:
        within_a_loop(played)(name, asked, dialect)

    check()


@pytest.mark.parametrize("name", CACHES)
def test_the_index_has_what_the_cache_has_after_every_step(name: str) -> None:
    check_index(name, 5)


@pytest.mark.long
@pytest.mark.parametrize("name", CACHES | RARER)
def test_the_index_has_what_the_cache_has_after_every_step_of_many(name: str) -> None:
    check_index(name, 100)


# --- what an engine tells, by hand ---------------------------------------------------------------------------------------------

PROMPT = list(range(10, 20))  # two whole pages of 4 tokens, and half of one


def told(name: str, *asked: tuple[list[int], int, Extras], **settings_: Any) -> tuple[Heard, list[Any]]:
    """Serve requests one after another, and return what has been told."""

    def serve() -> Heard:
        heard = Heard(plan_named(name), CACHES[name][0], **settings_)
        for tokens, output, extras in asked:
            heard.ask(tokens, output, extras)
            heard.finish()
        return heard

    heard: Heard = within_a_loop(serve)()
    return heard, heard.events


def chain(*pages: list[int], salt: str | None = None) -> list[bytes]:
    digests: list[bytes] = []
    for page in pages:
        digests.append(vllm_digest(digests[-1] if digests else None, page, salt))
    return digests


def test_vllm_tells_a_request_s_new_blocks_as_one_event() -> None:
    _, events = told("vllm", (PROMPT, 1, Extras()), ([*PROMPT[:8], 1, 2, 3, 4, 5], 1, Extras(session="chat")))
    one, two, three = [vllm_told(digest) for digest in chain([10, 11, 12, 13], [14, 15, 16, 17], [1, 2, 3, 4])]
    common = {"block_size": 4, "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert events == [
        BlockStored((one, two), None, tuple(PROMPT[:8]), extra_keys=(None, None), **common),  # type: ignore[arg-type]
        BlockStored((three,), two, (1, 2, 3, 4), extra_keys=(None,), session_id="chat", **common),  # type: ignore[arg-type]
    ]


def test_vllm_tells_each_removed_block_the_last_of_a_path_first() -> None:
    heard, events = told("vllm", (list(range(1000, 1080)), 1, Extras()), (list(range(2000, 2020)), 1, Extras()))
    (stored,) = [event for event in events[:1] if isinstance(event, BlockStored)]
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert [event.block_hashes for event in removed] == [(block,) for block in reversed(stored.block_hashes[-len(removed) :])]
    assert removed and {(event.medium, event.group_idx) for event in removed} == {("GPU", 0)}
    assert len(heard.index.held("gpu")) <= 24


def test_sglang_joins_removed_blocks_and_tells_pages_of_each_medium() -> None:
    prompts = [(list(range(1000 * n, 1000 * n + 40)), 1, Extras()) for n in range(1, 5)]
    _, events = told("sglang_hicache", *prompts)
    first = events[0]
    assert isinstance(first, BlockStored) and first.medium == "GPU" and first.block_size == 4
    assert first.block_hashes[0] == sglang_told(sglang_digest(None, list(range(1000, 1004))))
    assert len(first.block_hashes) * 4 == len(first.token_ids) and first.extra_keys is None and first.group_idx is None
    assert {event.medium for event in events if isinstance(event, BlockStored)} == {"GPU", "CPU_PINNED"}
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert removed and max(len(event.block_hashes) for event in removed) == 10, "a node of ten pages leaves as one"


def test_vllm_tells_offloaded_blocks_without_tokens_unless_told_otherwise() -> None:
    blind = [event for event in told("vllm_offload", (PROMPT, 8, Extras()))[1] if event.medium == "CPU"]
    one, two = [vllm_told(digest) for digest in chain([10, 11, 12, 13], [14, 15, 16, 17])]
    assert blind == [BlockStored((block,), None, (), 0, medium="CPU", group_idx=0) for block in (one, two)]
    plain = [event for event in told("vllm_offload", (PROMPT, 8, Extras()), self_describing=True)[1] if event.medium == "CPU"]
    assert [(event.block_hashes, event.parent_block_hash, event.token_ids) for event in plain] == [
        ((one,), None, tuple(PROMPT[:4])),
        ((two,), one, tuple(PROMPT[4:8])),
    ]


def test_pages_of_an_answer_are_told_while_it_grows() -> None:
    """In the step after the one that fills the page: kvsim names a page when the next one is taken."""
    heard, _ = told("vllm", (PROMPT, 40, Extras()))
    times = [batch.ts_s for batch in heard.batches]
    assert len(heard.batches) == 1 + 10, "the prompt's pages, then one of the answer at a time"
    step_s = (times[1] - times[0]) / 3  # tokens 11 and 12 of the third page, and the first of the next one
    assert [round((later - before) / step_s, 1) for before, later in pairwise(times[1:])] == [4.0] * 9


def test_a_request_can_have_its_hits_told_by_vllm() -> None:
    """``kv_cache_report_mode`` full: the blocks that it reuses are told again, from the first one on."""
    full = Extras(reports_hits=True, session="s")
    for name, is_told in (("vllm", True), ("sglang", False)):
        _, events = told(name, (PROMPT, 1, full), (PROMPT, 1, full), (PROMPT, 1, Extras()))
        again = [event for event in events[1:] if isinstance(event, BlockStored) and event.parent_block_hash is None]
        assert [event.token_ids for event in again] == ([tuple(PROMPT[:8])] if is_told else [])
        assert all(event.session_id == "s" for event in again)


def test_a_cache_salt_keeps_prompts_apart_and_is_told() -> None:
    for name, salted in (("vllm", (("mine",), None)), ("sglang", None)):
        _, events = told(name, (PROMPT, 1, Extras()), (PROMPT, 1, Extras(salt="mine")), (PROMPT, 1, Extras(salt="mine")))
        plain, mine = [event for event in events if isinstance(event, BlockStored)]
        assert plain.token_ids == mine.token_ids and not set(plain.block_hashes) & set(mine.block_hashes)
        assert mine.extra_keys == salted and mine.cache_salt == (None if salted else "mine")
    one, two = chain([10, 11, 12, 13], [14, 15, 16, 17], salt="mine")
    assert told("vllm", (PROMPT, 1, Extras(salt="mine")))[1][0].block_hashes == (vllm_told(one), vllm_told(two))


@pytest.mark.parametrize("name", CACHES)
def test_an_engine_does_the_same_whether_it_tells_or_not(name: str) -> None:
    prompts = [list(range(start, start + 30)) for start in (0, 100, 0, 200, 100)]

    def times(*, tells: bool) -> list[tuple[float, float, tuple[int, ...]]]:
        emulator = Emulator(plan_named(name), 1e-9)
        env = emulator.cluster.env
        if tells:
            EventFeed(emulator, TELLERS[CACHES[name][0]], lambda _: None, lambda: 0.0)
        served = []
        for prompt in prompts:
            served.append(emulator.submit(prompt, 37))
            env.run(env.now + 0.05)
        while env.peek() < float("inf"):
            env.step()
        return [(one.first_token_s, one.end_s, one.cached_tokens) for one in served]

    told, silent = within_a_loop(lambda: times(tells=True))(), within_a_loop(lambda: times(tells=False))()
    for one, other in zip(told, silent, strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-9) and one[2] == other[2]


def test_each_of_several_engines_tells_of_its_own_cache() -> None:
    plan = plan_of(("preset=vllm", *SMALL, "cluster.engines=2", "routing=round_robin"))

    def serve() -> None:
        emulator, indices = Emulator(plan, 1e-9), {0: Index(), 1: Index()}

        def hear(batch: EventBatch) -> None:
            assert batch.rank is not None
            indices[batch.rank].apply(batch)

        feed = EventFeed(emulator, TELLERS["vllm"], hear, lambda: 0.0)
        env = emulator.cluster.env
        for start in (0, 100, 200, 300):
            emulator.submit(list(range(start, start + 40)), 20)
            while env.peek() < float("inf"):
                env.step()
        for rank, cache in enumerate(emulator.cluster.caches):
            held = held_blocks(cache, cache.tiers[0], emulator.pages.next_id, feed.blocks, last_only=True)
            assert indices[rank].held("gpu") == held and len(held) > 20
        assert not indices[0].held("gpu") & indices[1].held("gpu")

    within_a_loop(serve)()


def test_blocks_are_forgotten_with_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.emulation.live_pages.LEAST_PAGES", 64)

    def serve() -> list[int]:
        heard = Heard(plan_named("vllm"), "vllm")
        known = []
        for number in range(400):
            heard.ask(list(range(number * 100, number * 100 + 40)), 1)
            heard.finish()
            known.append(len(heard.feed.blocks))
        return known

    known = within_a_loop(serve)()
    assert max(known[200:]) <= max(known[:200]) < 300, "of 4,000 pages"
