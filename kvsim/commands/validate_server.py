"""``kvsim validate server=URL`` and ``results=FILE``: compares simulations with runs against a server."""

import shlex
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from kvsim.commands.application import run_application
from kvsim.errors import WrongResult
from kvsim.plans.build import AGAINST_SERVER, build_run
from kvsim.plans.plan import Plan
from kvsim.report.servers.page import print_server
from kvsim.report.validation.validation import failures
from kvsim.results.progress import progress
from kvsim.results.result import RunRecord
from kvsim.run.execute import own_folder
from kvsim.run.validating_server import ADDRESS, RUNS, Source, asked_of, expanded, validate_server
from kvsim.run.validation_runs import SIMULATED
from kvsim.settings.bare_file import with_bare_file
from kvsim.settings.configuration import Asked, check_run_here, without_hydra
from kvsim.settings.flags import parse
from kvsim.settings.sources import flags

SHOWING = {"--help", "--cfg", "--info", "--hydra-help", "--multirun"}
"""Flags with which no server is asked: they show something, or are refused."""


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    words = [expanded(word) for word in words]
    arguments = parse(words)
    if SHOWING & arguments.flags.keys():
        run_application("validate", partial(start, Source(None, (), None)), words)
        return
    source, more = asked_of(with_bare_file(arguments.overrides))
    run_application("validate", partial(start, source), [*words, *more])


def start(source: Source, asked: Asked) -> None:
    """Run the validation that a configuration describes. Raises UsageError."""
    check_run_here(asked)
    overrides, sources = asked.overrides, list(asked.config.hydra.runtime.config_sources)
    config, choices = without_hydra(asked.config)
    plan = build_run(config, command=AGAINST_SERVER, overrides=overrides, choices=choices)
    command_line = shlex.join(["kvsim", "validate", *flags(sources), *map(_shortened, overrides)])
    with own_folder(plan, "validate"):
        record = validate_server(plan, source, command_line, watch=lambda label: partial(progress, label=label))
        show(plan, record, is_recorded=source.server is None)


def _shortened(override: str) -> str:
    """Return an override as the user writes it."""
    key, _, value = override.partition("=")
    if key == "results" and "'" not in value:
        return f"{key}={value.strip('[]')}"
    return f"server={value}" if key == ADDRESS else override


def show(plan: Plan, record: RunRecord, *, is_recorded: bool) -> None:
    """Print the comparison. Raises WrongResult if a figure is outside its tolerance."""
    console = Console()
    print_server(record, console)
    folders = [SIMULATED, *([] if is_recorded else [RUNS])]
    console.print(f"\n{plan.output}: validate.json validate.html {' '.join(f'{name}/' for name in folders)}", highlight=False)
    if not record["holds"]:
        raise WrongResult(f"the simulation is outside its tolerances: {failures(record)}")
