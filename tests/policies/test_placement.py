"""Placement policies: what every one of them owes the core, and edges with policies of their own."""

from functools import partial
from importlib.resources import files
from typing import Any

import hydra.utils
import pytest
from omegaconf import OmegaConf

from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.by_length import ByLength
from kvsim.policies.placement.store_threshold import StoreThreshold
from kvsim.policies.placement.write_back import WriteBack
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


@pytest.mark.parametrize("lower", [StoreThreshold, partial(ByLength, disk_min_tokens=3)])
def test_of_a_prompt_the_disk_gets_what_was_written_back_when_it_is_offered_again(lower: Any) -> None:
    cache = small_cache(gpu=3, cpu=8, disk=8, placement=[WriteBack, lower])
    cache.use("abc")
    cache.use("axy")
    assert (cache.on("cpu"), cache.on("disk")) == ("bc", "")
    assert cache.use("abc") == (1, 2, 0)
    assert cache.on("disk") == ("bc" if lower is StoreThreshold else "b")
