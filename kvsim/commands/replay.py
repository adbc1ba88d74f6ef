"""``kvsim replay``: plays a trace request by request, without a clock. For hit rates, at full speed."""

from collections.abc import Sequence

import hydra
from omegaconf import DictConfig

from kvsim.build import build_run
from kvsim.commands.application import given_overrides, run_application


def run(cfg: DictConfig) -> None:
    """One run, from a composed configuration to the files of its folder."""
    plan = build_run(cfg, command="replay", overrides=given_overrides())
    print(plan)


@hydra.main(version_base="1.3", config_path="pkg://kvsim.conf", config_name="config")
def application(cfg: DictConfig) -> None:
    """The job of a run or multirun."""
    run(cfg)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    run_application(application, arguments)
