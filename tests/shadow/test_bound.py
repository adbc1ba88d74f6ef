"""A shadow's memory is bounded, whatever comes, by a count that is never below what Python has allocated."""

import gc
import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest

from kvsim.kv_events.messages import BlockStored
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.shadow import Shadow
from tests.shadow.test_ghosts import plan
from tests.shadow.written import batch

PAGE_TOKENS = 4
MIB = 1 << 20


def endless(longest: int, branching: float) -> Iterator[LiveRequest]:
    """New sessions and longer prompts of recent ones; with ``branching``, a prompt leaves its session's path anywhere."""
    random, paths, pages = Random(1), [[]], 0
    while True:
        base = random.choice(paths) if random.random() < 0.5 else []
        base = base[: random.randint(0, len(base))] if random.random() < branching else base
        path = [*base, *range(pages, pages + random.randint(1, longest))]
        pages += longest
        paths = [*paths[-30:], path]
        keys = tuple(page.to_bytes(16, "big") for page in path)
        yield LiveRequest(float(pages), keys, len(keys) * PAGE_TOKENS + 1, session=str(random.random()))


@pytest.mark.parametrize(
    ("longest", "branching", "eviction"),
    [
        (2, 1.0, "lru"),
        pytest.param(40, 0.3, "lru", marks=pytest.mark.long),
        pytest.param(2, 1.0, "arc", marks=pytest.mark.long),
    ],
)
def test_a_stream_without_end(longest: int, branching: float, eviction: str) -> None:
    """Takes more than a second, since it needs enough requests to fill the memory several times, each allocation traced."""
    base = (f"page_tokens={PAGE_TOKENS}", f"eviction={eviction}")
    ghosts = {
        "engine": plan(*base, "tiers.gpu.capacity=400pages"),
        "cpu": plan(*base, "tiers.gpu.capacity=400pages", "tiers.cpu.capacity=unlimited"),
        "larger": plan(f"page_tokens={2 * PAGE_TOKENS}", "preset=vllm_offload", "tiers.gpu.capacity=100pages",
                       "tiers.cpu.capacity=800pages"),
    }  # fmt: skip
    shadow, stream = Shadow(ghosts, PAGE_TOKENS, ShadowSettings(memory="1MiB")), endless(longest, branching)
    gc.collect()
    tracemalloc.start()
    try:
        for round_ in range(3):
            for _ in range(110):
                shadow.request(next(stream))
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] <= shadow._bound.bytes + 0.1 * MIB, f"round {round_}: counted too little"
            assert shadow._bound.bytes <= MIB
            shadow.check()
    finally:
        tracemalloc.stop()
    seen = shadow.snapshot()
    assert seen.memory_bytes <= MIB
    assert seen.forgotten_pages > 100
    assert "memory was full" in seen.notes[0]


@pytest.mark.parametrize("grows", ["prompts", "answers"])
def test_events_without_end(grows: str) -> None:
    """An engine that never removes a block, and requests with long answers."""
    shadow = Shadow({"engine": plan(f"page_tokens={PAGE_TOKENS}", "tiers.gpu.capacity=50pages")}, PAGE_TOKENS,
                    ShadowSettings(memory="1MiB"))  # fmt: skip
    gc.collect()
    tracemalloc.start()
    try:
        for at in range(2500):
            parent = at - 1 if at % 200 and grows == "answers" else None
            shadow.event("e", batch(0.01 * at, BlockStored((at,), parent, (at,) * PAGE_TOKENS, PAGE_TOKENS)))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] <= shadow._bound.bytes + 0.1 * MIB
        assert shadow._bound.bytes <= MIB
    finally:
        tracemalloc.stop()
    (engine,) = shadow.snapshot().engines
    assert engine.pages["gpu"] < 2500 and not engine.known
    assert any("of their blocks were forgotten" in note for note in shadow.snapshot().notes)
    shadow.check()


def test_a_ghost_too_large_for_the_memory_is_emptied_and_says_so() -> None:
    shadow, stream = Shadow({"engine": plan(f"page_tokens={PAGE_TOKENS}", "tiers.gpu.capacity=100000pages")}, PAGE_TOKENS,
                            ShadowSettings(memory="1MiB")), endless(1, 1.0)  # fmt: skip
    while not shadow.snapshot().ghosts[0].emptied:
        for _ in range(100):
            shadow.request(next(stream))
    assert "caches were emptied: engine" in shadow.snapshot().notes[1]


def test_less_memory_than_a_shadow_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="memory must be at least 1MiB"):
        ShadowSettings(memory="1KiB")
    with pytest.raises(ValueError, match="memory must be a size such as 2GiB"):
        ShadowSettings(memory="much")
