"""A job's configuration is the one that Hydra composes from its overrides."""

import pytest
from hydra.core.config_loader import ConfigLoader
from omegaconf import OmegaConf

from kvsim.errors import UsageError
from kvsim.settings.configuration import compose_with_choices, config_loader
from kvsim.sweeps import composition
from kvsim.sweeps.composition import Compositions


@pytest.fixture(scope="module")
def loader() -> ConfigLoader:
    return config_loader()


@pytest.fixture
def compositions(loader: ConfigLoader) -> Compositions:
    return Compositions(loader)


@pytest.mark.parametrize(
    "overrides",
    [
        ["output=x", "eviction=slru", "eviction.protected_hits=3", "tiers.gpu.capacity=40GiB"],
        ["eviction@tiers.cpu.eviction=arc", "tiers.cpu.capacity=1GiB", "trace=mooncake", "output='a b'", "trace.path='/a,b'"],
        ["trace=mooncake", "+trace.extra=1", "trace.limit=2", "output=x"],
        ["trace.sessions=20", "tiers.gpu={capacity: 5pages}", "seed=1", "output=x"],
        ["preset=sglang", "page_tokens=1", "~timeline", "seed=${page_tokens}", "output=x"],
    ],
    ids=" ".join,
)
def test_it_is_what_hydra_composes(overrides: list[str], compositions: Compositions) -> None:
    for job in (overrides, [*overrides, "warmup=0.25"]):
        found, expected = compositions.compose(job), compose_with_choices(job)
        assert found.config == expected.config
        assert OmegaConf.to_container(found.config) == OmegaConf.to_container(expected.config)
        assert found.choices == expected.choices


def test_hydra_composes_once_for_each_set_of_choices(compositions: Compositions, monkeypatch: pytest.MonkeyPatch) -> None:
    compositions.compose(["eviction=slru", "seed=1"])
    monkeypatch.setattr(type(compositions._loader), "load_configuration", None)
    assert compositions.compose(["eviction=slru", "seed=2", "tiers.gpu.capacity=7pages"]).config.seed == 2
    assert compositions.compose(["eviction=slru", "seed=1"]).config.tiers.gpu.capacity != "7pages", "jobs do not share values"
    with pytest.raises(UsageError):
        compositions.compose(["eviction=arc"])


@pytest.mark.parametrize("overrides", [["sed=1"], ["eviction=lruu"], ["tiers.cpu.eviction=lru"], ["seed.x=1"]])
def test_a_mistake_is_the_one_that_hydra_finds(overrides: list[str], compositions: Compositions) -> None:
    with pytest.raises(UsageError) as expected:
        compose_with_choices(overrides)
    with pytest.raises(UsageError) as found:
        compositions.compose(overrides)
    assert str(found.value) == str(expected.value)


def test_no_more_is_kept_than_said(compositions: Compositions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "MOST_KEPT", 2)
    for policy in ("lru", "fifo", "arc", "lru"):
        config = compositions.compose([f"eviction={policy}", "seed=1"]).config
        assert config.eviction._target_.rpartition(".")[2].lower() == policy
        assert len(compositions._composed) <= 2
