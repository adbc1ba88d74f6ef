"""``kvsim leaderboard``: the policies of a family, ranked on traces and capacities."""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from kvsim.commands.application import run_application
from kvsim.commands.hydra_main import read_yaml_fast
from kvsim.plans.build import check_output
from kvsim.plans.construct import construct
from kvsim.report.leaderboard import print_leaderboard
from kvsim.results.progress import progress
from kvsim.settings.configuration import Asked, check_run_here
from kvsim.settings.sources import flags
from kvsim.sweeps.contestants import Asked as Board
from kvsim.sweeps.contestants import LeaderboardSettings
from kvsim.sweeps.leaderboard import play_leaderboard

NOT_OF_RUNS = ("leaderboard", "output")
SINGLE = ("policies", "traces", "capacities")
"""Settings of which a single value counts as a list."""


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("leaderboard", start, arguments)


def start(asked: Asked) -> None:
    """Play, write the folder, print the order. Raises UsageError."""
    check_run_here(asked)
    node = OmegaConf.to_container(asked.config.leaderboard, resolve=True)
    assert isinstance(node, dict)
    node |= {name: [node[name]] for name in SINGLE if isinstance(node.get(name), (str, int, float))}
    folder = Path(str(asked.config.output))
    check_output(folder)
    board = Board(
        settings=construct(LeaderboardSettings, node, "leaderboard"),
        overrides=[line for line in asked.overrides if not _is_of(line, NOT_OF_RUNS)],
        command_line=shlex.join(["kvsim", "leaderboard", *flags(asked.config.hydra.runtime.config_sources), *asked.overrides]),
    )
    console = Console()
    with read_yaml_fast():
        record = play_leaderboard(board, folder, partial(progress, label="leaderboard", unit="runs"))
    print_leaderboard(record, console)
    console.print(f"\n{folder}: leaderboard.json leaderboard.csv leaderboard.html", highlight=False)


def _is_of(line: str, names: Sequence[str]) -> bool:
    return line.lstrip("+~").partition("=")[0].partition(".")[0] in names
