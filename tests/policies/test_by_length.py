"""By length: only long prompts are copied below."""

from functools import partial

import pytest

from kvsim.policies.context import PolicyContext
from kvsim.policies.placement.by_length import ByLength
from tests.core.small import small_cache
from tests.workloads import make_request


def test_short_prompts_stay_on_the_gpu() -> None:
    cache = small_cache(gpu=20, cpu=20, disk=20, placement=partial(ByLength, min_tokens=4, disk_min_tokens=6))
    for word in ("abc", "pqrs", "uvwxyz"):
        cache.use(word)
    assert cache.on("cpu") == "pqruvwxy"
    assert cache.on("disk") == "uvwxy"


def by_length(capacities: tuple[int | None, ...], tier: int) -> ByLength:
    policy = ByLength(min_tokens=10, disk_min_tokens=20, adaptive=True)
    policy.bind(PolicyContext(tier=tier, capacities=capacities, page_tokens=1))
    return policy


def learn(policy: ByLength, lengths: list[int]) -> float:
    for tokens in lengths:
        policy.on_request(make_request([], prompt_tokens=tokens), 0.0)
    return policy.boundary


def test_the_boundary_is_the_configured_one_until_512_prompts_were_seen() -> None:
    assert learn(by_length((50, 50), 1), [100] * 511) == 10
    assert learn(by_length((50, 50), 2), [100] * 511) == 20


def test_the_boundary_gives_the_gpu_its_share_of_the_tokens() -> None:
    # 400 prompts of 10 tokens, 100 of 40, 12 of 1,000: 4,000 + 4,000 + 12,000 tokens.
    lengths = [10] * 400 + [40] * 100 + [1_000] * 12
    assert learn(by_length((10, 90), 1), lengths) == 10
    assert learn(by_length((20, 80), 1), lengths) == 40
    assert learn(by_length((40, 60), 1), lengths) == 1_000
    assert learn(by_length((70, 10, 20), 2), lengths) == 1_000
    assert learn(by_length((60, None), 1), lengths) == 10
    assert learn(by_length((None, 60), 1), lengths) == float("inf")


def test_the_boundary_follows_the_last_512_prompts() -> None:
    policy = by_length((50, 50), 1)
    assert learn(policy, [10] * 512) == 10
    assert learn(policy, [30] * 500) == 30
    assert learn(policy, [10] * 512) == 10


@pytest.mark.parametrize("setting", ["min_tokens", "disk_min_tokens"])
def test_settings_out_of_range_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, not 0"):
        ByLength(**{setting: 0})
