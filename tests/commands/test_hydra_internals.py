"""Hydra has the internals that kvsim relies on, and a job's configuration equals the one that Hydra's own loader composes."""

import inspect
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf._utils import get_yaml_loader

from kvsim.commands import hydra_internals, hydra_main
from kvsim.commands.hydra_internals import JobConfig, SweepLoader

INTERNALS = [
    (ConfigLoaderImpl.load_configuration, "self config_name overrides run_mode from_shell validate_sweep_overrides"),
    (ConfigLoaderImpl._apply_overrides_to_config, "overrides cfg"),
    (get_overrides_dirname, "overrides exclude_keys item_sep kv_sep"),
    (Plugins._scan_all_plugins, "modules"),
    (Sweeper.validate_batch_is_legal, "self batch"),
    (BasicSweeper.split_arguments, "overrides max_batch_size"),
    (BasicSweeper.split_overrides_to_chunks, "lst n"),
    (ConfigLoaderImpl.load_sweep_config, "self master_config sweep_overrides"),
    (get_args_parser, ""),
    (create_config_search_path, "search_path_dir"),
    (Hydra.__init__, "self task_name config_loader"),
    (Hydra.run, "self config_name task_function overrides with_log_configuration"),
    (Hydra.multirun, "self config_name task_function overrides with_log_configuration"),
    (ConfigLoaderImpl.validate_sweep_overrides_legal, "overrides run_mode from_shell"),
    (get_yaml_loader, ""),
]


@pytest.mark.parametrize(("function", "parameters"), INTERNALS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_installed_hydra_has_the_internals_that_are_replaced_or_called(function: Callable[..., Any], parameters: str) -> None:
    assert " ".join(inspect.signature(function).parameters) == parameters


def test_nodes_of_the_installed_omegaconf_hold_what_is_copied() -> None:
    config = OmegaConf.create({"a": {"b": 1}, "c": [2]})
    names = {"_metadata", "_parent", "_flags_cache", "_content"}
    assert set(vars(config)) == set(vars(config.a)) == set(vars(config.c)) == names
    assert set(vars(config.a._get_node("b"))) == {"_metadata", "_parent", "_flags_cache", "_val"}
    assert {"flags", "resolver_cache"} <= set(vars(config._metadata))


def test_no_other_module_uses_internals_of_hydra() -> None:
    package = Path(hydra_internals.__file__).parents[1]
    users = {path for path in package.rglob("*.py") if "hydra._internal" in path.read_text()}
    assert users == {Path(hydra_internals.__file__), Path(hydra_main.__file__)}


@pytest.fixture(autouse=True)
def loaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ConfigLoaderImpl, SweepLoader]]:
    """Hydra's and ours, for kvsim's configuration; nothing is composed yet."""
    monkeypatch.setattr(hydra_internals, "_composed", {})
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
    assert len(hydra_internals._composed) == 1


def test_jobs_do_not_see_each_other(loaders: tuple[ConfigLoaderImpl, SweepLoader]) -> None:
    _, ours = loaders
    one, other = (ours.load_configuration("config", [f"seed={seed}", "output=x"], RunMode.RUN) for seed in (1, 2))
    one.tiers.gpu.capacity = "7pages"
    assert isinstance(one, DictConfig) and (one.seed, other.seed) == (1, 2)
    assert other.tiers.gpu.capacity != "7pages" != ours.load_configuration("config", ["seed=3"], RunMode.RUN).tiers.gpu.capacity
    assert len(hydra_internals._composed) == 1


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
    monkeypatch.setattr(hydra_internals, "MOST_COMPOSED", 2)
    for policy in ("lru", "fifo", "arc", "lru"):
        config = loaders[1].load_configuration("config", [f"eviction={policy}", "seed=1", "output=x"], RunMode.RUN)
        assert config.eviction._target_.rpartition(".")[2].lower() == policy
        assert len(hydra_internals._composed) <= 2


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
    monkeypatch.setattr(hydra_internals, "_composed", {})
    there = SweepLoader(plain.get_search_path())
    there.sent = pickle.loads(pickle.dumps(ours.sent))
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", None)
    assert OmegaConf.to_container(there.load_configuration("config", task, RunMode.RUN)) == OmegaConf.to_container(expected)
    with pytest.raises(TypeError):  # another choice is composed there
        there.load_configuration("config", ["eviction=arc", "output=x"], RunMode.RUN)


def test_sweeps_are_split_as_before_after_one(loaders: tuple[ConfigLoaderImpl, SweepLoader]) -> None:
    classes = [kind for kind in Plugins.instance().discover(Sweeper) if kind.__name__ == "BasicSweeper"]
    assert len(classes) == 1
    hydra_internals._set_split(lambda overrides, most: [])
    assert all(kind.split_arguments([], None) == [] for kind in (*classes, BasicSweeper))  # type: ignore[attr-defined]
    hydra_internals.restore()
    assert all(kind.split_arguments([], None) == [[[]]] for kind in (*classes, BasicSweeper))  # type: ignore[attr-defined]
