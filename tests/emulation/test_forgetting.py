"""A server that runs for long: it keeps what is cached and under way, and answers as one that forgets nothing."""

import gc
import random
import tracemalloc

import pytest

from kvsim.emulation import live_pages
from kvsim.emulation.apis.base import ApiSettings
from kvsim.emulation.apis.table import APIS
from kvsim.emulation.emulator import Emulator
from tests.emulation.driven import after_requests

SYSTEMS = {
    "vllm": ("preset=vllm", "tiers.gpu.capacity=60pages"),
    "vllm_offload": ("preset=vllm_offload", "tiers.gpu.capacity=40pages", "tiers.cpu.capacity=60pages"),
    "sglang": ("preset=sglang", "page_tokens=16", "tiers.gpu.capacity=60pages"),
    "sglang_hicache": ("preset=sglang_hicache", "page_tokens=16", "tiers.gpu.capacity=40pages", "tiers.cpu.capacity=60pages"),
    "kvsim": ("tiers.gpu.capacity=40pages", "tiers.cpu.capacity=60pages", "rules.cache_output=true"),
}


def prompts(number: int) -> list[list[int]]:
    """Prompts of 1 to 12 pages that begin alike, more or less; some come again after a while."""
    rng = random.Random(0)
    seen: list[list[int]] = []
    for _ in range(number):
        if seen and rng.random() < 0.4:
            one = rng.choice(seen[-12:])
            one = one[: rng.randint(1, len(one))] + [rng.randint(0, 10**6) for _ in range(rng.randint(1, 60))]
        else:
            one = [rng.randint(0, 3) * 1000, *[rng.randint(0, 10**6) for _ in range(rng.randint(1, 120))]]
        seen.append(one[:190])
    return seen


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_server_that_forgets_hits_what_one_hits_that_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_known: list[int] = []
    known: list[int] = []
    kept = after_requests(SYSTEMS[name], prompts(150), look=lambda emulator, _: all_known.append(emulator.pages.pages))
    monkeypatch.setattr(live_pages, "LEAST_PAGES", 10)
    forgot = after_requests(SYSTEMS[name], prompts(150), look=lambda emulator, _: known.append(emulator.pages.pages))
    assert forgot == kept and sum(map(sum, kept)) > 0
    assert max(known) < 400 < all_known[-1], "a hundred pages are cached, and what was asked for lately is known, too"


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_memory_does_not_grow_with_the_requests_served(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_pages, "LEAST_PAGES", 100)
    used: list[int] = []

    def look(emulator: Emulator, number: int) -> None:
        if number % 30 == 29:
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
            assert emulator.served == {} and emulator.cluster.unfinished == 0

    many = [[number * 1000 + at for at in range(50)] for number in range(150)]
    tracemalloc.start()
    try:
        after_requests(SYSTEMS[api], many, look=look, prepare=lambda emulator: APIS[api](emulator, ApiSettings()) and None)
    finally:
        tracemalloc.stop()
    assert used[-1] - used[1] < 30_000, "90 requests of four pages each would take more than that"
