"""Starts a command through Hydra: what ``hydra.main`` does, except that the configuration of a run is composed only once.

With ``hydra_internals.py`` the only user of Hydra's internals.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra.version
import omegaconf._utils
import yaml
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log, run_job
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig

from kvsim.commands.flags import Arguments
from kvsim.commands.hydra_internals import JobConfig
from kvsim.search_path import extend_search_path

CONFIG = "pkg://kvsim.conf"


class OneComposition(Hydra):
    """Hydra, but the configuration from which it reads ``hydra.mode`` is also that of the run."""

    def launch(self, task: TaskFunction, config_name: str, overrides: list[str], *, is_multirun: bool) -> None:
        """Run the task once, or as the jobs of a multirun if the flag or the configuration says so."""
        if is_multirun:
            self.multirun(config_name, task, [*overrides, "hydra.mode=MULTIRUN"])
            return
        composed = self.config_loader.load_configuration(config_name, overrides, RunMode.RUN, validate_sweep_overrides=False)
        if composed.hydra.mode == RunMode.MULTIRUN:
            self.multirun(config_name, task, overrides)
            return
        parsed = OverridesParser.create().parse_overrides(overrides)
        ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
        self.run_once(task, config_name, JobConfig.of(composed))

    def run_once(self, task: TaskFunction, config_name: str, config: DictConfig) -> None:
        """Run the task as Hydra does, but leave it to the caller to report an error."""
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        config.hydra.mode = RunMode.RUN
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name=config_name)
        context = HydraContext(config_loader=self.config_loader, callbacks=callbacks)
        done = run_job(task, config, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=config, config_name=config_name, job_return=done)
        if isinstance(done._return_value, Exception):
            raise done._return_value


def run_hydra(task: TaskFunction, command: str, config_name: str, arguments: Arguments) -> None:
    """Do what the command line asks for: run the task, or show its configuration. Errors are Hydra's own."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would otherwise print errors and end the process itself
    config_name, overrides = arguments.flags.get("--config-name", config_name), list(arguments.overrides)
    with started_hydra(command) as started, read_yaml_fast():
        if "--cfg" in arguments:
            package = arguments.flags.get("--package")
            started.show_cfg(config_name, overrides, arguments.flags["--cfg"], package, resolve="--resolve" in arguments)
        elif "--info" in arguments:
            started.show_info(arguments.flags["--info"], config_name, overrides)
        elif "--hydra-help" in arguments:
            started.hydra_help(config_name, get_args_parser(), get_args_parser().parse_args(overrides))
        else:
            started.launch(task, config_name, overrides, is_multirun="--multirun" in arguments)


@contextmanager
def started_hydra(command: str) -> Iterator[OneComposition]:
    """Hydra for a command, reading kvsim's configuration and the user's own."""
    hydra.version.setbase("1.3")
    extend_search_path()
    path = create_config_search_path(CONFIG)
    started = OneComposition(command, ConfigLoaderImpl(path))
    GlobalHydra.instance().initialize(started)
    try:
        yield started
    finally:
        GlobalHydra.instance().clear()


@contextmanager
def read_yaml_fast() -> Iterator[None]:
    """Let OmegaConf parse YAML with libyaml, if PyYAML has it: in a tenth of the time, with the same result."""
    slow = omegaconf._utils.get_yaml_loader
    if yaml.__with_libyaml__:
        loader = slow()
        fast = type("FastLoader", (yaml.cyaml.CParser, loader), {"__init__": _init_loader})
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
