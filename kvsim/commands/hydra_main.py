"""Composes or shows the configuration of a command by Hydra, as ``hydra.main`` does. kvsim itself runs what is composed.

With ``sweeps/from_hydra.py`` the only user of Hydra's internals.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from math import inf
from typing import Any

import hydra.version
import omegaconf._utils
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf

from kvsim.errors import UsageError
from kvsim.settings.configuration import Asked, only_known_errors
from kvsim.settings.flags import Arguments
from kvsim.settings.search_path import extend_search_path
from kvsim.settings.sources import use

CONFIG = "pkg://kvsim.conf"
MOST_VALUES = 100_000
"""In a file of settings; kvsim's own have some hundreds."""
HERE = "."
"""What ``hydra.run.dir`` is in kvsim's own configurations: Hydra has no folder to make."""


class StartedHydra(Hydra):
    """Hydra with kvsim's configuration and the user's own."""

    def ask(self, config_name: str, overrides: list[str], *, is_sweep: bool) -> Asked:
        """Compose the configuration of a run or sweep; it is a sweep if the flag or the configuration says so."""
        if not is_sweep:
            config = self._load(config_name, overrides, RunMode.RUN, validate_sweep_overrides=False)
            is_sweep = config.hydra.mode == RunMode.MULTIRUN
        if is_sweep:
            config = self._load(config_name, [*overrides, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        else:
            parsed = OverridesParser.create().parse_overrides(overrides)
            ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
        if config.hydra.run.dir != HERE:
            raise UsageError(f"--config-name {config_name}: it does not begin with kvsim's own: put defaults: [config] into it")
        use(config.hydra.runtime.config_sources)
        HydraConfig.instance().set_config(config)
        return Asked(config, config_name, self.config_loader, is_sweep)

    def _load(self, config_name: str, overrides: list[str], mode: RunMode, **settings: bool) -> DictConfig:
        return self.config_loader.load_configuration(config_name, overrides, mode, **settings)

    def show(self, config_name: str, overrides: list[str], kind: str, package: str, *, resolve: bool) -> None:
        """Print the configuration, or the part of it that ``package`` names. Raises UsageError if there is no such part."""
        config = self.config_loader.load_configuration(config_name, overrides, RunMode.RUN)
        HydraConfig.instance().set_config(config)
        OmegaConf.set_readonly(config.hydra, None)
        shown = part = self.get_sanitized_cfg(config, kind)
        if package not in ("", "_global_"):
            try:
                part = OmegaConf.select(shown, package, throw_on_missing=True, default=NOTHING)
            except Exception as error:  # no key of OmegaConf's
                raise UsageError(f"--package {package}: {error}") from error
            if part is NOTHING:
                raise UsageError(f"--package {package}: the configuration has no such part")
            print(f"# @package {package}")
        if resolve and isinstance(part, Container):
            OmegaConf.resolve(part)
        print(OmegaConf.to_yaml(part) if isinstance(part, Container) else part, end="" if isinstance(part, Container) else "\n")


NOTHING = object()


def ask_hydra(command: str, config_name: str, arguments: Arguments) -> Asked | None:
    """Compose what a command line asks for; None if it only asks to show the configuration, which is then printed.

    Raises errors of Hydra, and UsageError where Hydra has none of its own.
    """
    config_name, overrides = arguments.flags.get("--config-name", config_name), list(arguments.overrides)
    with started_hydra(command) as started, read_yaml_fast(), only_known_errors(overrides):
        if "--cfg" in arguments:
            package = arguments.flags.get("--package", "")
            started.show(config_name, overrides, arguments.flags["--cfg"], package, resolve="--resolve" in arguments)
        elif "--info" in arguments:
            text = io.StringIO()  # Hydra logs it, and logging reports an output that is full or closed on its own
            with redirect_stdout(text):
                started.show_info(arguments.flags["--info"], config_name, overrides)
            print(text.getvalue(), end="")
        elif "--hydra-help" in arguments:
            started.hydra_help(config_name, get_args_parser(), get_args_parser().parse_args(overrides))
        else:
            return started.ask(config_name, overrides, is_sweep="--multirun" in arguments)
    return None


@contextmanager
def started_hydra(command: str) -> Iterator[StartedHydra]:
    """Hydra for a command, reading kvsim's configuration and the user's own."""
    hydra.version.setbase("1.3")
    extend_search_path()
    path = create_config_search_path(CONFIG)
    started = StartedHydra(command, ConfigLoaderImpl(path))
    GlobalHydra.instance().initialize(started)
    try:
        yield started
    finally:
        GlobalHydra.instance().clear()


@contextmanager
def read_yaml_fast() -> Iterator[None]:
    """Let OmegaConf parse YAML with libyaml, if PyYAML has it: in a tenth of the time, with the same result.

    Aliases that stand for more than ``MOST_VALUES`` values are an error: OmegaConf makes a copy of each.
    """
    slow = omegaconf._utils.get_yaml_loader
    loader = slow()
    if not hasattr(loader, "checks_size"):
        parts = {"__init__": _init_loader} if yaml.__with_libyaml__ else {}
        bases = (yaml.cyaml.CParser, loader) if yaml.__with_libyaml__ else (loader,)
        fast = type("FastLoader", bases, {**parts, "checks_size": True, "construct_document": _construct_document})
        setattr(omegaconf._utils, "get_yaml_loader", lambda: fast)  # noqa: B010  (types do not allow the assignment)
    try:
        yield
    finally:
        setattr(omegaconf._utils, "get_yaml_loader", slow)  # noqa: B010  (as above)


def _init_loader(self: Any, stream: Any) -> None:
    """Set up a loader without PyYAML's own reader, scanner and parser."""
    yaml.cyaml.CParser.__init__(self, stream)
    yaml.constructor.SafeConstructor.__init__(self)
    yaml.resolver.Resolver.__init__(self)


def _construct_document(self: Any, node: yaml.Node) -> Any:
    """Return the content of a file. Raises YAMLError if it is too large once all aliases are written out."""
    if _values(node, {}) > MOST_VALUES:
        raise yaml.constructor.ConstructorError(
            None, None, f"its aliases stand for more than {MOST_VALUES:,} values", node.start_mark
        )
    return yaml.constructor.SafeConstructor.construct_document(self, node)


def _values(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Return how many values a node stands for; of a node that contains itself, endless many."""
    if node not in known:
        known[node] = inf
        parts = node.value if isinstance(node.value, list) else []
        parts = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        known[node] = 1 + sum([_values(part, known) for part in parts])
    return known[node]
