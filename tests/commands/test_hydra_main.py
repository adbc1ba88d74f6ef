"""A command starts as ``hydra.main`` would start it, and composes its configuration once."""

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from kvsim.commands.hydra_main import read_yaml_fast, run_hydra
from kvsim.errors import UsageError
from kvsim.settings.flags import Arguments, parse
from kvsim.settings.sources import set_up

CONF = Path(__file__).resolve().parent.parent.parent / "conf"


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The overrides of each composition."""
    calls: list[list[str]] = []
    compose = ConfigLoaderImpl._load_configuration_impl

    def counted(self: Any, config_name: str, overrides: list[str], *arguments: Any, **settings: Any) -> DictConfig:
        calls.append(overrides)
        return compose(self, config_name, overrides, *arguments, **settings)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
    monkeypatch.chdir(tmp_path)
    return calls


def start(*words: str) -> list[tuple[DictConfig, dict[str, Any]]]:
    """Start a command. Returns the configuration of each job, and Hydra's own part of it."""
    seen = []

    def task(cfg: DictConfig) -> None:
        seen.append((cfg, OmegaConf.to_container(HydraConfig.get())))

    run_hydra(task, "replay", "config", parse(set_up(words)))
    return seen  # type: ignore[return-value]


def test_a_single_run_composes_once(composed: list[list[str]]) -> None:
    ((cfg, own),) = start("eviction=slru", "seed=3", "output=out")
    assert composed == [["eviction=slru", "seed=3", "output=out"]]
    assert cfg.seed == 3 and cfg.eviction.protected_hits == 2 and "hydra" not in cfg
    assert own["job"]["name"] == "replay" and own["overrides"]["task"] == composed[0]
    assert own["mode"].name == "RUN" and own["runtime"]["choices"]["eviction"] == "slru"


def test_a_mistake_composes_once(composed: list[list[str]]) -> None:
    with pytest.raises(ConfigCompositionException):
        start("eviction=slru", "sed=3")
    with pytest.raises(ConfigCompositionException, match="Ambiguous"):
        start("seed=1,2")
    assert len(composed) == 2


def test_a_sweep_starts_with_one_composition(composed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.commands.sweep.begin_sweep", lambda config: composed.append(["begin"]))
    seen = start("-m", "seed=1,2", "output=out")
    assert composed.index(["begin"]) == 1
    assert [cfg.seed for cfg, _ in seen] == [1, 2]
    assert all(own["mode"].name == "MULTIRUN" for _, own in seen)


def test_the_mode_can_come_from_an_override(composed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.commands.sweep.begin_sweep", lambda config: None)
    assert len(start("hydra.mode=MULTIRUN", "seed=1,2,3", "output=out")) == 3


def test_another_folder_adds_choices(composed: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "conf" / "eviction").mkdir(parents=True)
    (tmp_path / "conf" / "eviction" / "mine.yaml").write_text("_target_: a.B\nk: 3\n")
    ((cfg, _),) = start("--config-dir", "conf", "eviction=mine", "output=out")
    assert cfg.eviction.k == 3


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_reads_the_same_with_libyaml(path: Path) -> None:
    slow = OmegaConf.load(path)
    with read_yaml_fast():
        assert OmegaConf.load(path) == slow


def test_numbers_and_duplicates_read_the_same_with_libyaml(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1e9\nb: 1_000\nc: 2026-01-01\nd: on\ne: .inf\nf: '${a}'\ng: [1, 2.5, null]\n")
    slow = OmegaConf.load(path)
    with read_yaml_fast():
        assert OmegaConf.load(path) == slow
        path.write_text("a: 1\na: 2\n")
        with pytest.raises(Exception, match="found duplicate key a"):
            OmegaConf.load(path)


def test_flags_and_overrides_may_be_in_any_order() -> None:
    arguments = parse(["a=1", "--cfg=job", "b=2", "-p", "tiers", "--config-name", "x"])
    assert arguments == Arguments(overrides=["a=1", "b=2"], flags={"--cfg": "job", "--package": "tiers", "--config-name": "x"})
    assert parse(["a=1", "--help", "eviction", "eviction=slru"]).topics == ["eviction", "eviction=slru"]
    assert parse(["-i"]).flags == {"--info": "all"}


@pytest.mark.parametrize(
    "words", [["--help=yes"], ["--cfg"], ["--cfg", "jb"], ["--nope"], ["-x"], ["-m", "-i"], ["--package", "a"]]
)
def test_flags_that_cannot_work_are_named(words: list[str]) -> None:
    with pytest.raises(UsageError, match=words[0].split("=")[0].replace("-m", "--multirun")):
        parse(words)
