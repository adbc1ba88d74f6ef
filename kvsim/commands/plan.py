"""``kvsim plan``: the cheapest configuration that meets its objectives, by the user's prices, and the flags to start it with."""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from kvsim.commands.application import run_application
from kvsim.commands.hydra_main import read_yaml_fast
from kvsim.errors import NoEffect, UsageError
from kvsim.report.plan_page import hardware_text, print_plan
from kvsim.results.progress import progress
from kvsim.results.rates import percent
from kvsim.settings.configuration import Asked, check_run_here
from kvsim.settings.sources import flags
from kvsim.settings.unused_settings import keys_of
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.purchase import Ended
from kvsim.sweeps.purchasing import Question, described, purchase

SHORT = {"prices": "plan.prices", "saturate.rate": "trace.rate"}
"""What some settings are short for, or are called by ``kvsim saturate``."""


class NothingHolds(UsageError):
    """No configuration meets the objectives, which is an answer."""

    exit_code = 1


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    keys = keys_of(arguments)
    if {"saturate.rate", "trace.rate"} <= keys:
        raise NoEffect("trace.rate", "with saturate.rate, the rate that must be held", "leave one of them out")
    run_application("plan", start, [_in_full(word) for word in arguments])


def _in_full(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"{SHORT.get(key, key)}{equals}{value}"


def start(asked: Asked) -> None:
    """Find the cheapest configuration, write the folder, print the table. Raises UsageError, and NothingHolds."""
    check_run_here(asked)
    prices, folder = asked.config.plan.prices, Path(str(asked.config.output))
    own_flags = flags(asked.config.hydra.runtime.config_sources)
    question = Question(
        config=asked.config,
        overrides=asked.overrides,
        compositions=Compositions(asked.loader, asked.config_name),
        prices=None if prices is None else str(prices),
        command_line=shlex.join(["kvsim", "plan", *own_flags, *asked.overrides]),
        flags=own_flags,
    )
    with read_yaml_fast():
        record = purchase(question, folder, watch=lambda label: partial(progress, label=label), tell=print_ended)
    console = Console()
    print_plan(record, console)
    console.print(f"\n{folder}: plan.json plan.csv plan.html", highlight=False)
    if record["cheapest"] is None:
        raise NothingHolds("no configuration meets the objectives: the reasons are in the table")


def print_ended(label: str, ended: Ended) -> None:
    """Print how a candidate ended."""
    met = ended.reason if ended.result is None else f"{percent(ended.attainment)} meet the objectives, {ended.outcome}"
    print(f"{label}: {ended.candidate.price:,.2f}, {hardware_text(described(ended))}: {met}", flush=True)
