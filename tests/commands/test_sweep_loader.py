"""A job's configuration is the one that Hydra's own loader composes, also the second time and beside others."""

import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf

from kvsim.commands import sweep_loader
from kvsim.commands.sweep_loader import JobConfig, SweepLoader


@pytest.fixture(autouse=True)
def loaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ConfigLoaderImpl, SweepLoader]]:
    """Hydra's and ours, for kvsim's configuration; nothing is composed yet."""
    monkeypatch.setattr(sweep_loader, "_composed", {})
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        plain = GlobalHydra.instance().config_loader()
        assert isinstance(plain, ConfigLoaderImpl)
        yield plain, SweepLoader(plain.get_search_path())


@pytest.mark.parametrize(
    "overrides",
    [
        ["output=x", "tiers.gpu.capacity=100pages", "seed=3"],
        ["hydra.sweep.dir=x", "output=x", "eviction=slru", "eviction.protected_hits=3", "tiers.gpu.capacity=40GiB"],
        ["eviction@tiers.cpu.eviction=arc", "tiers.cpu.capacity=1GiB", "trace=mooncake", "output='a b'", "trace.path='/a,b'"],
        ["trace=mooncake", "trace.tail=full", "curve.policies=[lru,'slru protected_hits=3']", "output=x"],
        ["preset=sglang_hicache", "prefetch=threshold", "prefetch.min_tokens=512", "output=x"],
        ["output=x"],
        ["trace=mooncake", "+trace.extra=1", "trace.extra=2", "output=x"],
        ["trace.sessions=20", "tiers.gpu={capacity: 5pages}", "seed=1", "output=x"],
        ["preset=sglang", "page_tokens=1", "~timeline", "seed=2", "output=x"],
    ],
    ids=" ".join,
)
def test_it_is_what_hydra_composes(overrides: list[str], loaders: tuple[ConfigLoaderImpl, SweepLoader]) -> None:
    plain, ours = loaders
    for task in (overrides, [*overrides, "warmup=0.25"], overrides):
        expected = plain.load_configuration("config", task, RunMode.RUN)
        found = ours.load_configuration("config", task, RunMode.RUN)
        assert OmegaConf.to_container(found) == OmegaConf.to_container(expected)
        assert expected.hydra.overrides.task == [line for line in task if not line.startswith("hydra.")]
    assert len(sweep_loader._composed) == 1


def test_jobs_do_not_see_each_other(loaders: tuple[ConfigLoaderImpl, SweepLoader]) -> None:
    _, ours = loaders
    one, other = (ours.load_configuration("config", [f"seed={seed}", "output=x"], RunMode.RUN) for seed in (1, 2))
    one.tiers.gpu.capacity = "7pages"
    assert isinstance(one, DictConfig) and (one.seed, other.seed) == (1, 2)
    assert other.tiers.gpu.capacity != "7pages" != ours.load_configuration("config", ["seed=3"], RunMode.RUN).tiers.gpu.capacity
    assert len(sweep_loader._composed) == 1


@pytest.mark.parametrize(
    "overrides", [["sed=1"], ["eviction=lruu"], ["tiers.gpu=1,2"], ["tiers.cpu.eviction=lru"], ["eviction.no=1"]]
)
def test_a_mistake_is_the_one_that_hydra_finds(overrides: list[str], loaders: tuple[ConfigLoaderImpl, SweepLoader]) -> None:
    problems = []
    for loader in loaders:
        with pytest.raises(HydraException) as caught:
            loader.load_configuration("config", overrides, RunMode.RUN)
        problems.append((type(caught.value), str(caught.value)))
    assert problems[0] == problems[1]


def test_no_more_is_kept_than_said(loaders: tuple[ConfigLoaderImpl, SweepLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_loader, "MOST_COMPOSED", 2)
    for policy in ("lru", "fifo", "arc", "lru"):
        config = loaders[1].load_configuration("config", [f"eviction={policy}", "seed=1", "output=x"], RunMode.RUN)
        assert config.eviction._target_.rpartition(".")[2].lower() == policy
        assert len(sweep_loader._composed) <= 2


def compare(found: Any, expected: Any, parent: Node | None) -> int:
    """Assert that nothing of a copy is the original's, and all is alike. Returns the number of nodes."""
    assert isinstance(found, type(expected)) and found is not expected and found._get_parent() is parent
    assert found._metadata == expected._metadata and found._metadata is not expected._metadata
    inner, other = (vars(node).get("_content", vars(node).get("_val")) for node in (found, expected))
    if isinstance(other, list):
        inner, other = dict(enumerate(inner)), dict(enumerate(other))
    if not isinstance(other, dict):
        assert inner == other
        return 1
    assert list(inner) == list(other)
    return 1 + sum(compare(inner[key], other[key], found) for key in other)


def test_a_copy_of_a_configuration_is_what_omegaconf_copies(loaders: tuple[ConfigLoaderImpl, SweepLoader]) -> None:
    config = loaders[0].load_configuration("config", ["preset=sglang_hicache", "seed=3"], RunMode.RUN)
    OmegaConf.set_readonly(config.hydra, True)
    config._metadata.resolver_cache["now"] = {"%Y": "2000"}
    ours = JobConfig.of(config)
    for copied in (ours, deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert compare(copied, config, None) > 150
        assert OmegaConf.is_readonly(copied.hydra) and not OmegaConf.is_readonly(copied.trace)
    assert compare(deepcopy(ours.hydra), config.hydra, ours) > 80
    copied.tiers.gpu.capacity = "7pages"
    copied._metadata.resolver_cache["now"]["%Y"] = "2001"
    assert compare(ours, config, None) > 150


def test_what_was_composed_is_sent_to_workers(
    loaders: tuple[ConfigLoaderImpl, SweepLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = loaders
    task = ["eviction=slru", "tiers.gpu.capacity=100pages", "output=x"]
    expected = ours.load_configuration("config", task, RunMode.RUN)
    ours.send()
    monkeypatch.setattr(sweep_loader, "_composed", {})
    there = SweepLoader(plain.get_search_path())
    there.sent = pickle.loads(pickle.dumps(ours.sent))
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", None)
    assert OmegaConf.to_container(there.load_configuration("config", task, RunMode.RUN)) == OmegaConf.to_container(expected)
    with pytest.raises(TypeError):  # another choice is composed there
        there.load_configuration("config", ["eviction=arc", "output=x"], RunMode.RUN)
