"""``kvsim trace info``: what a trace is like, beside published ones."""

from collections.abc import Sequence
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvsim.build import build_trace
from kvsim.commands.application import CONFIG, explain
from kvsim.errors import TraceError, UsageError
from kvsim.trace.base import Trace
from kvsim.trace.records import read_records
from kvsim.trace.statistics import PUBLISHED, trace_statistics

USAGE = """\
usage: kvsim trace info FILE [KEY=VALUE ...]
       kvsim trace info trace=synthetic [KEY=VALUE ...]

Reads a trace, guesses its format unless trace=NAME says it, and shows its statistics beside those of
published traces. Settings as for a run: page_tokens=512, trace.tail=all, trace.limit=1000."""

FORMATS = {"input_length": "mooncake", "requests": "weka", "token_ids": "tokens"}
"""The field by which a format is known, and its choice of the group ``trace``."""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand with the words that follow ``kvsim trace``."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments[1:] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if arguments[0] != "info":
        raise UsageError(f"there is no command trace {arguments[0]!r}; there is info")
    show(load(arguments[1:]))


def load(arguments: Sequence[str]) -> Trace:
    """The trace that a file, overrides or both name."""
    paths = [word for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    if len(paths) > 1 or any(word.startswith("-") for word in arguments):
        raise UsageError(f"cannot read {' '.join(arguments)!r}: say kvsim trace info FILE KEY=VALUE ...")
    if paths and not any(override.startswith("trace=") for override in overrides):
        overrides.append(f"trace={guess_format(paths[0])}")
    try:
        with hydra.initialize_config_module(CONFIG, version_base="1.3"):
            cfg = hydra.compose("config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(explain(error, overrides)) from error
    if paths:
        with open_dict(cfg.trace):
            cfg.trace.path = paths[0]
    source, page_tokens = build_trace(cfg)
    return source.load(page_tokens)


def guess_format(path: str) -> str:
    """The format of a file, by the fields of its first record. Raises TraceError if they fit none."""
    fields = next(read_records(path, 1)).fields
    for field, name in FORMATS.items():
        if field in fields:
            return name
    known = ", ".join(f"{name} ({field})" for field, name in FORMATS.items())
    raise TraceError(path, 1, f"is of no known format: none of the fields of {known}; say trace=NAME")


def show(trace: Trace) -> None:
    """Print a column for the trace and one for each published one."""
    table = Table(title=f"{trace.name}, in pages of {trace.page_tokens} tokens", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for name in ("this trace", *PUBLISHED):
        table.add_column(name, justify="right")
    for row, value in trace_statistics(trace).items():
        table.add_row(row, text(value), *(text(other.get(row)) for other in PUBLISHED.values()))
    Console().print(table)


def text(value: Any) -> str:
    """A statistic for people: whole numbers from 100 on, fractions to six digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.6f}" if value < 1 else f"{value:.1f}"
