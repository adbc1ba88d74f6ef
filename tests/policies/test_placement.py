"""Placement policies: what every one of them owes the core, and edges with policies of their own."""

from functools import partial
from importlib.resources import files
from typing import Any

import hydra.utils
import pytest
from omegaconf import OmegaConf

from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.cost_aware import CostAware
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from tests.core.small import small_cache

POLICIES = sorted(path.name for path in (files("kvsim.conf") / "placement").iterdir() if path.name.endswith(".yaml"))


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_leaks_whatever_the_policy(name: str) -> None:
    settings = OmegaConf.to_container(OmegaConf.create((files("kvsim.conf") / "placement" / name).read_text()))
    assert isinstance(settings, dict)
    policy = hydra.utils.get_class(settings.pop("_target_"))
    assert issubclass(policy, PlacementPolicy)
    cache = small_cache(gpu=4, cpu=5, disk=6, placement=lambda: policy(**settings))
    for word in ("abcd", "xy", "abcd", "pqrs", "xyz", "abcd", "uv", "pq", "abce"):
        cache.use(word)
    assert not cache.leases and not cache.in_flight
    assert all(tier.pool.free + len(cache.on(tier.name)) == tier.pool.capacity for tier in cache.tiers)


def test_each_edge_can_have_its_own_policy() -> None:
    cache = small_cache(gpu=3, cpu=3, disk=9, placement=[WriteThrough, WriteBack])
    cache.use("abc")
    assert (cache.on("cpu"), cache.on("disk")) == ("abc", "")
    cache.use("xyz")
    assert (cache.on("cpu"), cache.on("disk")) == ("xyz", "abc")


@pytest.mark.parametrize("lower", [StoreThreshold, partial(ByLength, disk_min_tokens=3)])
def test_of_a_prompt_the_disk_gets_what_was_written_back_when_it_is_offered_again(lower: Any) -> None:
    cache = small_cache(gpu=3, cpu=8, disk=8, placement=[WriteBack, lower])
    cache.use("abc")
    cache.use("axy")
    assert (cache.on("cpu"), cache.on("disk")) == ("bc", "")
    assert cache.use("abc") == (1, 2, 0)
    assert cache.on("disk") == ("bc" if lower is StoreThreshold else "b")


EDGES: dict[str, tuple[Any, list[str]]] = {
    "write_back": (partial(WriteBack, watermark=0.5), ["", "abcd", "abcd"]),
    "store_threshold": (partial(StoreThreshold, k=2), ["", "", "abcd"]),
    "by_length": (partial(ByLength, disk_min_tokens=4), ["abc", "abcefg", "abcefg"]),
    "cost_aware": (partial(CostAware, margin=0.001), ["", "", ""]),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_edge_to_the_disk_may_have_any_policy_of_its_own(name: str) -> None:
    below, on_disk = EDGES[name]
    cache = small_cache(gpu=4, cpu=8, disk=20, placement=[WriteThrough, below])
    for word, expected in zip(("abcd", "efgh", "abcd"), on_disk, strict=True):
        cache.use(word)
        assert cache.on("disk") == expected, word
    cache.use("ij")
    assert cache.on("cpu") == "abcdefij"
    assert ("gh" in cache.on("disk")) == (name in ("write_back", "cost_aware"))
