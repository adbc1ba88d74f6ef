"""Belady's bound for a cluster: one tier as large as all tiers of all engines."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.engine.outcome import REJECTED
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.run import play
from kvsim.run.fingerprint import bound_names
from kvsim.settings.configuration import compose
from tests.workloads import paths_of

FOUR = ("cluster.engines=4", "cluster.engines_per_host=2", "tiers.gpu.capacity=10pages")


@cache
def plan(*overrides: str) -> Plan:
    settings = ["page_tokens=4", "model=tiny", "rules.recompute_last_token=false", "trace.tail=all", *overrides]
    return build_run(compose(settings), command="simulate", overrides=settings)


def requests_of(words: list[str], apart_s: float = 1000.0) -> list[Request]:
    """A request per word, a page for each letter."""
    return [
        Request(
            index=index,
            arrival_s=apart_s * index,
            prompt_tokens=4 * len(word),
            output_tokens=1,
            runs=extents,
            prompt_pages=len(word),
        )
        for index, (word, extents) in enumerate(zip(words, paths_of(words), strict=True))
    ]


@pytest.mark.parametrize(
    ("overrides", "pages"),
    [
        ([], 4 * 10),
        (["tiers.cpu.capacity=20pages"], 4 * 10 + 2 * 20),
        (["tiers.cpu.capacity=20pages", "tiers.cpu.scope=engine"], 4 * 10 + 2 * 20),
        (["tiers.cpu.capacity=21pages", "tiers.cpu.scope=engine"], 4 * 10 + 4 * 10),
        (["tiers.cpu.capacity=20pages", "tiers.disk.capacity=50pages"], 4 * 10 + 2 * 20 + 2 * 50),
        (["tiers.cpu.capacity=20pages", "tiers.disk.capacity=50pages", "tiers.disk.scope=cluster"], 4 * 10 + 2 * 20 + 50),
        (["tiers.cpu.capacity=unlimited"], None),
    ],
)
def test_every_tier_of_every_engine_counts(overrides: list[str], pages: int | None) -> None:
    assert plan(*FOUR, *overrides).total_pages == pages


def test_two_engines_hold_twice_as_much_but_no_larger_request() -> None:
    """4 pages in all: ``ab`` and ``cd`` both stay. A single engine has room for one of them; neither can serve ``abc``."""
    two, one = plan("cluster.engines=2", "tiers.gpu.capacity=3pages"), plan("tiers.gpu.capacity=3pages")
    requests = requests_of(["ab", "cd", "ab", "cd", "abcde"])
    bound = play.upper_bound(two, requests)
    assert bound.hit_pages[:, 0].tolist() == [0, 0, 2, 2, 0]
    assert bound.status.tolist() == [0, 0, 0, 0, REJECTED]
    assert play.upper_bound(one, requests).hit_pages[:, 0].tolist() == [0, 0, 2, 1, 0]


def test_clusters_share_a_bound_if_they_hold_as_much() -> None:
    requests = requests_of(["ab", "cd"])
    two, four = plan("cluster.engines=2", "tiers.gpu.capacity=10pages"), plan("cluster.engines=4", "tiers.gpu.capacity=10pages")
    one, wide = plan("tiers.gpu.capacity=10pages"), plan("tiers.gpu.capacity=20pages")
    names = [bound_names(each, requests)["belady"] for each in (one, two, four, wide)]
    assert len({*names[:3]}) == 3 and names[1] == names[3]


SHAPES = (
    ("cluster.engines=3",),
    ("cluster.engines=2", "tiers.cpu.capacity=8pages"),
    ("cluster.engines=4", "cluster.engines_per_host=2", "tiers.cpu.capacity=8pages", "placement=write_back"),
    ("cluster.engines=2", "tiers.cpu.capacity=8pages", "tiers.cpu.scope=engine", "placement=exclusive"),
    ("cluster.prefill=2", "cluster.decode=1", "tiers.cpu.capacity=8pages"),
    ("cluster.engines=2", "cluster.engines_per_host=1", "tiers.cpu.capacity=4pages", "tiers.disk.capacity=12pages",
     "tiers.disk.scope=cluster"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "routing"), [*zip(SHAPES, ["round_robin", "kv_aware"] * 3, strict=True)], ids=range(len(SHAPES))
)
def test_a_cluster_hits_no_more_pages_than_its_bound(shape: tuple[str, ...], routing: str) -> None:
    """Requests are so far apart that they are served in the order of the trace."""
    cluster = plan("tiers.gpu.capacity=8pages", f"routing={routing}", *shape)
    rng = np.random.default_rng(17)
    for _ in range(8):
        words = ["".join(rng.choice(["a", "b", "c"], rng.integers(1, 7))) for _ in range(25)]
        requests = [replace(request, output_tokens=int(rng.integers(1, 6))) for request in requests_of(words)]
        served, bound = play.simulate(cluster, requests), play.upper_bound(cluster, requests)
        assert not served.status.any()
        assert 0 < served.hit_pages.sum() <= bound.hit_pages.sum()
