"""Starts a command through Hydra: what ``hydra.main`` does, except that the configuration of a run is composed only once.

With ``hydra_internals.py`` the only user of Hydra's internals.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import hydra.version
import omegaconf._utils
import yaml
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log, run_job
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import Container, DictConfig, OmegaConf

from kvsim.commands.hydra_internals import JobConfig
from kvsim.errors import UsageError
from kvsim.settings.configuration import only_known_errors
from kvsim.settings.flags import Arguments
from kvsim.settings.search_path import extend_search_path

CONFIG = "pkg://kvsim.conf"
HERE = "."
"""What ``hydra.run.dir`` is in kvsim's own configurations: Hydra has no folder to make."""


class OneComposition(Hydra):
    """Hydra, but the configuration from which it reads ``hydra.mode`` is also that of the run."""

    def launch(self, task: TaskFunction, config_name: str, overrides: list[str], *, is_multirun: bool) -> Exception | None:
        """Run the task once, or as the jobs of a multirun if the flag or the configuration says so.

        Returns the error of a single run that failed.
        """
        if is_multirun:
            self.multirun(config_name, task, [*overrides, "hydra.mode=MULTIRUN"])
            return None
        composed = self.config_loader.load_configuration(config_name, overrides, RunMode.RUN, validate_sweep_overrides=False)
        if composed.hydra.run.dir != HERE:
            raise UsageError(f"--config-name {config_name}: it does not begin with kvsim's own: put defaults: [config] into it")
        if composed.hydra.mode == RunMode.MULTIRUN:
            self.multirun(config_name, task, overrides)
            return None
        parsed = OverridesParser.create().parse_overrides(overrides)
        ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
        return self.run_once(task, config_name, JobConfig.of(composed))

    def run_once(self, task: TaskFunction, config_name: str, config: DictConfig) -> Exception | None:
        """Run the task as Hydra does, but return its error, if any."""
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        config.hydra.mode = RunMode.RUN
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name=config_name)
        context = HydraContext(config_loader=self.config_loader, callbacks=callbacks)
        done = run_job(task, config, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=config, config_name=config_name, job_return=done)
        return done._return_value if isinstance(done._return_value, Exception) else None

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


def run_hydra(task: TaskFunction, command: str, config_name: str, arguments: Arguments) -> None:
    """Do what the command line asks for: run the task, or show its configuration. Errors of a task are raised as they are.

    Those of Hydra, too, or as UsageError where Hydra has none of its own.
    """
    config_name, overrides = arguments.flags.get("--config-name", config_name), list(arguments.overrides)
    failed = None
    with _all_errors_raised(), started_hydra(command) as started, read_yaml_fast(), only_known_errors(overrides):
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
            failed = started.launch(task, config_name, overrides, is_multirun="--multirun" in arguments)
    if failed:
        raise failed


@contextmanager
def _all_errors_raised() -> Iterator[None]:
    """Keep Hydra from printing errors and ending the process itself."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


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
