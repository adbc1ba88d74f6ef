"""``kvsim simulate``: serves a trace in simulated time."""

from collections.abc import Sequence
from functools import partial

import hydra
from omegaconf import DictConfig

from kvsim.commands.application import run_application, run_job
from kvsim.commands.job import run_command
from kvsim.commands.objective import Objective


@hydra.main(version_base="1.3", config_path="pkg://kvsim.conf", config_name="config")
def application(cfg: DictConfig) -> Objective:
    """Run one job of a run or multirun."""
    return run_job("simulate", partial(run_command, "simulate"), cfg)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application(application, arguments)
