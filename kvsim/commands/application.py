"""Runs a command that takes a configuration: a single run, or a sweep. Errors are raised as one-line messages for the user."""

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvsim.errors import UsageError
from kvsim.settings.catalog import GROUPS, check_choices
from kvsim.settings.flags import SINGLE, parse
from kvsim.settings.sources import flags

if TYPE_CHECKING:
    from kvsim.settings.configuration import Asked
    from kvsim.sweeps.command_jobs import RunCommand


def run_application(command: str, start: "Callable[[Asked], None]", words: Sequence[str], *, config_name: str = "config") -> None:
    """Do what a command line asks for: ``start`` the command with its configuration, or show that. Raises UsageError.

    What it takes to run a job is imported after the configuration has been composed: most mistakes are found before.
    """
    arguments = parse(words)
    if "--help" in arguments:
        from kvsim.commands.help import show_help

        show_help(command, config_name, arguments.topics)
        return
    if command in SINGLE and ("--multirun" in arguments or any("hydra.mode=" in word for word in arguments.overrides)):
        raise UsageError(f"-m: kvsim {command} takes a single configuration: leave out -m")
    if config_name == "config":
        from kvsim.settings.bare_file import with_bare_file

        arguments.overrides[:] = with_bare_file(arguments.overrides)
    check_choices(arguments.overrides)
    from kvsim.commands.hydra_main import ask_hydra
    from kvsim.settings.configuration import check_overrides, explained, with_trace_file

    check_overrides(arguments.overrides, is_multirun="--multirun" in arguments)
    if command in SINGLE:
        _check_single(command, arguments.overrides)
    if config_name == "config":
        arguments.overrides[:] = with_trace_file(arguments.overrides)
    with explained(arguments.overrides, config_name):
        if asked := ask_hydra(command, config_name, arguments):
            start(asked)


def _check_single(command: str, overrides: Sequence[str]) -> None:
    """Raise UsageError for several values of a setting, of which the command would run one after another."""
    from kvsim.settings.configuration import parse as parse_override

    for line in overrides:
        if parse_override(line).is_sweep_override():
            key, _, values = line.partition("=")
            how = "choose one" if key in GROUPS else f"a list is written '{key}=[{values}]'"
            raise UsageError(f"{line} lists several values, and kvsim {command} takes a single configuration: {how}")


def start_run(command: str, run: "RunCommand", asked: "Asked") -> None:
    """Run a command once, or the jobs of a sweep. Raises UsageError."""
    if asked.is_sweep:
        from kvsim.sweeps.from_command_line import run_sweep

        run_sweep(command, run, asked)
        return
    from kvsim.plans.build import build_run
    from kvsim.run.execute import own_folder
    from kvsim.settings.configuration import check_run_here, without_hydra

    overrides, sources = asked.overrides, list(asked.config.hydra.runtime.config_sources)
    if key := next((override for override in overrides if override.startswith("sweep.")), None):
        raise UsageError(f"{key.partition('=')[0]} has no effect on a single run: add -m or leave it out")
    check_run_here(asked)
    config, choices = without_hydra(asked.config)
    plan = build_run(config, command=command, overrides=overrides, choices=choices)
    with own_folder(plan, command):
        run(plan, shlex.join(["kvsim", command, *flags(sources), *overrides]), None)
