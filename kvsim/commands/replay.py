"""``kvsim replay``: replays a trace request by request, without a clock, to get hit rates at full speed."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvsim.commands.application import run_application, run_job

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvsim.commands.objective import Objective


def application(cfg: "DictConfig") -> "Objective":
    """Run one job of a run or multirun."""
    from kvsim.commands.job import run_command

    return run_job("replay", partial(run_command, "replay"), cfg)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("replay", application, arguments)
