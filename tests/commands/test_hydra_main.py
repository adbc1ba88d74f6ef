"""A command composes its configuration once, as ``hydra.main`` would compose it."""

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from kvsim.commands import hydra_main
from kvsim.commands.hydra_main import ask_hydra, read_yaml_fast
from kvsim.errors import UsageError
from kvsim.settings.configuration import Asked
from kvsim.settings.flags import Arguments, parse
from kvsim.settings.sources import set_up
from kvsim.sweeps import from_hydra

CONF = Path(__file__).resolve().parent.parent.parent / "conf"


def test_no_other_module_uses_internals_of_hydra() -> None:
    package = Path(hydra_main.__file__).parents[1]
    users = {path for path in package.rglob("*.py") if "hydra._internal" in path.read_text()}
    assert users == {Path(hydra_main.__file__), Path(from_hydra.__file__)}


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


def ask(*words: str) -> Asked:
    asked = ask_hydra("replay", "config", parse(set_up(words)))
    assert asked is not None
    return asked


def test_a_single_run_composes_once(composed: list[list[str]]) -> None:
    asked = ask("eviction=slru", "seed=3", "output=out")
    assert composed == [["eviction=slru", "seed=3", "output=out"]] and not asked.is_sweep
    assert asked.config.seed == 3 and asked.config.eviction.protected_hits == 2 and asked.overrides == composed[0]
    assert asked.config.hydra.job.name == "replay" and asked.config.hydra.runtime.choices["eviction"] == "slru"


def test_a_sweep_is_asked_for_by_the_flag_or_by_the_mode(composed: list[list[str]]) -> None:
    for word in ("-m", "hydra.mode=MULTIRUN"):
        asked = ask(word, "seed=1,2", "output=out")
        assert asked.is_sweep and asked.config.output == "out" and "seed=1,2" in asked.overrides
    assert len(composed) == 3, "once with the flag"


@pytest.fixture
def _yaml_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omegaconf._utils.get_yaml_loader", get_yaml_loader)


@pytest.mark.usefixtures("_yaml_is_read_slowly")
def test_every_file_reads_the_same_with_libyaml() -> None:
    for path in CONF.rglob("*.yaml"):
        slow = OmegaConf.load(path)
        with read_yaml_fast():
            assert OmegaConf.load(path) == slow, path


@pytest.mark.usefixtures("_yaml_is_read_slowly")
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
