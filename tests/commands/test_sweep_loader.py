"""A job's configuration is the one that Hydra's own loader composes, also the second time and beside others."""

from collections.abc import Iterator

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kvsim.commands import sweep_loader
from kvsim.commands.sweep_loader import SweepLoader


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
