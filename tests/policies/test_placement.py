"""Placement policies: when the lower tier gets a copy."""

from importlib.resources import files

import hydra.utils
import pytest
from omegaconf import OmegaConf

from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.placement.exclusive import Exclusive
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
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
    assert not cache.leases and not cache.transfers
    assert all(tier.pool.free + len(cache.on(tier.name)) == tier.pool.capacity for tier in cache.tiers)


def test_write_through_copies_as_soon_as_pages_are_computed() -> None:
    cache = small_cache(gpu=4, cpu=8, disk=8, placement=WriteThrough)
    cache.use("ab")
    assert cache.on("cpu") == cache.on("disk") == "ab"


def test_write_through_tries_again_when_there_was_no_room() -> None:
    cache = small_cache(gpu=6, cpu=2, placement=WriteThrough)
    cache.use("abc")
    assert cache.on("cpu") == "" and cache.counts.no_room_pages == 3
    cache.use("ab")
    assert cache.on("cpu") == "ab"


def test_selective_waits_for_the_second_use() -> None:
    cache = small_cache(gpu=6, cpu=8, placement=WriteThroughSelective)
    cache.use("ab")
    assert cache.on("cpu") == ""
    cache.use("abc")
    assert cache.on("cpu") == "ab"


def test_selective_refuses_a_setting_out_of_range() -> None:
    with pytest.raises(ValueError, match="hits must be at least 1, not 0"):
        WriteThroughSelective(hits=0)


def test_write_back_copies_only_what_is_evicted() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=WriteBack)
    cache.use("abc")
    assert cache.on("cpu") == ""
    cache.use("xy")
    assert (cache.on("gpu"), cache.on("cpu")) == ("axy", "bc")


def test_write_back_keeps_the_lower_copy_of_what_is_loaded() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=WriteBack)
    cache.use("abc")
    cache.use("xyz")
    assert cache.use("abc") == (0, 3, 0)
    assert cache.on("gpu") == "abc" and set("abc") <= set(cache.on("cpu"))


def test_exclusive_moves_what_is_loaded() -> None:
    cache = small_cache(gpu=3, cpu=8, placement=Exclusive)
    cache.use("abc")
    cache.use("xyz")
    assert cache.use("abc") == (0, 3, 0)
    assert (cache.on("gpu"), cache.on("cpu")) == ("abc", "xyz")


def test_each_edge_can_have_its_own_policy() -> None:
    cache = small_cache(gpu=3, cpu=3, disk=9, placement=[WriteThrough, WriteBack])
    cache.use("abc")
    assert (cache.on("cpu"), cache.on("disk")) == ("abc", "")
    cache.use("xyz")
    assert (cache.on("cpu"), cache.on("disk")) == ("xyz", "abc")
