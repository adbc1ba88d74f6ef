"""Runs a Hydra application and turns its errors into one-line messages for the user."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvsim.build import build_run
from kvsim.commands.hydra_internals import arguments_parser
from kvsim.commands.mistake import Mistake
from kvsim.commands.objective import Objective
from kvsim.commands.sweep import Listed, end_sweep, forget_sweep
from kvsim.commands.sweep_job import run_sweep_job
from kvsim.configuration import explain
from kvsim.errors import UsageError
from kvsim.plan import Plan
from kvsim.report.result import RunRecord

MISTAKES = ("Config group override must be", "Only one of --run", "The --resolve flag")
"""Beginnings of the user errors that Hydra raises as plain ValueError."""


def run_application(application: Callable[[], Any], arguments: Sequence[str], *, config_name: str = "config") -> None:
    """Run ``application``, made by ``hydra.main`` with ``config_name``, with these arguments. Raises UsageError."""
    arguments = _in_order(arguments)
    overrides = [word for word in arguments if not word.startswith("-")]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would otherwise print errors and end the process itself
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        application()
        end_sweep()
    except Listed:
        return
    except KeyboardInterrupt:
        with undisturbed():
            end_sweep(is_interrupted=True)
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(explain(error, overrides, config_name)) from error
    except ValueError as error:
        if not str(error).startswith(MISTAKES):
            raise
        raise UsageError(" ".join(str(error).split())) from error
    except Mistake as mistake:
        raise mistake.error from None
    finally:
        sys.argv = before
        forget_sweep()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore further interrupts, so that the finished part of a sweep is written however often the user presses Ctrl+C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_job(command: str, run: Callable[[Plan, str], RunRecord], cfg: DictConfig) -> Objective:
    """Run the current job: ``run`` takes its plan and the command line that repeats it. A mistake ends a single run at once.

    Returns the objective that an optimizing sweeper needs from a job of a multirun; None for a single run.
    """
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return run_sweep_job(command, run, cfg)
    try:
        overrides = list(job.overrides.task)
        if key := next((override for override in overrides if override.startswith("sweep.")), None):
            raise UsageError(f"{key.partition('=')[0]} has no effect on a single run: add -m or leave it out")
        plan = build_run(cfg, command=command, overrides=overrides)
        try:
            run(plan, shlex.join(["kvsim", command, *overrides]))
        except Exception as error:
            plan.logger.log_failure(plan.output, plan.config, f"{type(error).__name__}: {error}", None)
            raise
    except UsageError as error:
        raise Mistake(error) from error
    return None


def _in_order(arguments: Sequence[str]) -> list[str]:
    """Move overrides before flags, because Hydra's parser rejects them between flags. Raises UsageError for an unknown flag."""
    parser = arguments_parser()
    parser.exit_on_error = False
    overrides = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    ordered = [*overrides, *(word for word in arguments if word not in overrides)]
    try:
        unknown = parser.parse_known_args(ordered)[1]
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"cannot parse {unknown[0]!r}: use KEY=VALUE, or see --help for the flags")
    return ordered
