"""``kvsim replay``: plays a trace request by request, without a clock. For hit rates, at full speed."""

from collections.abc import Sequence

import hydra
from omegaconf import DictConfig

from kvsim.commands.application import plan_job, run_application, run_job


def run(cfg: DictConfig) -> None:
    """One run, from a composed configuration to the files of its folder."""
    plan = plan_job("replay", cfg)
    trace = plan.trace.load(plan.page_tokens)
    print(trace.name)


@hydra.main(version_base="1.3", config_path="pkg://kvsim.conf", config_name="config")
def application(cfg: DictConfig) -> None:
    """A job of a run or multirun."""
    run_job(run, cfg)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    run_application(application, arguments)
