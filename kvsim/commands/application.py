"""Runs a Hydra application and turns its errors into one-line messages for the user."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvsim.errors import UsageError
from kvsim.settings.catalog import check_choices
from kvsim.settings.flags import SINGLE, parse
from kvsim.settings.mistake import Listed, Mistake
from kvsim.settings.sources import flags

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvsim.commands.objective import Objective
    from kvsim.plans.plan import Plan
    from kvsim.results.result import RunRecord


def run_application(command: str, task: Callable[..., Any], words: Sequence[str], *, config_name: str = "config") -> None:
    """Run a command whose words are overrides and flags; ``task`` runs one job of it. Raises UsageError.

    What it takes to run a job is imported after the configuration has been composed: most mistakes are found before.
    """
    arguments = parse(words)
    if "--help" in arguments:
        from kvsim.commands.help import show_help

        show_help(command, config_name, arguments.topics)
        return
    if command in SINGLE and ("--multirun" in arguments or any("hydra.mode=" in word for word in arguments.overrides)):
        raise UsageError(f"-m: kvsim {command} takes a single configuration: leave out -m")
    check_choices(arguments.overrides)
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from kvsim.commands.hydra_main import run_hydra
    from kvsim.settings.configuration import check_overrides, explain, with_trace_file
    from kvsim.settings.settings_file import explain_file

    check_overrides(arguments.overrides, is_multirun="--multirun" in arguments)
    if config_name == "config":
        arguments.overrides[:] = with_trace_file(arguments.overrides)
    try:
        try:
            run_hydra(task, command, config_name, arguments)
        except Mistake as mistake:
            raise mistake.error from mistake.error.__cause__
        _end_sweep()
    except Listed:
        return
    except KeyboardInterrupt:
        with undisturbed():
            _end_sweep(is_interrupted=True)
        raise
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(found := _first_cause(error), UsageError):  # found while Hydra imported something
            raise found from None
        raise UsageError(explain(error, arguments.overrides, config_name)) from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise UsageError(explain_file(error)) from error
    finally:
        _forget_sweep()


def _first_cause(error: BaseException) -> BaseException:
    """Return the error at the beginning of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore further interrupts, so that the finished part of a sweep is written however often the user presses Ctrl+C."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_job(command: str, run: "Callable[[Plan, str], RunRecord]", cfg: "DictConfig") -> "Objective":
    """Run the current job: ``run`` takes its plan and the command line that repeats it. A mistake ends a single run at once.

    Returns the objective that an optimizing sweeper needs from a job of a multirun; None for a single run.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from kvsim.commands.sweep_job import run_sweep_job
    from kvsim.files.locking import Lock
    from kvsim.plans.build import build_run

    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return run_sweep_job(command, run, cfg)
    try:
        overrides = list(map(str, OmegaConf.to_container(job.overrides.task) or ()))
        if key := next((override for override in overrides if override.startswith("sweep.")), None):
            raise UsageError(f"{key.partition('=')[0]} has no effect on a single run: add -m or leave it out")
        plan = build_run(cfg, command=command, overrides=overrides, choices=job.runtime.choices)
        try:
            with Lock(plan.output):
                run(plan, shlex.join(["kvsim", command, *flags(job.runtime.config_sources), *overrides]))
        except Exception as error:
            plan.logger.log_failure(plan.output, plan.begun(command), f"{type(error).__name__}: {error}", None)
            raise
    except UsageError as error:
        raise Mistake(error) from error
    return None


def _end_sweep(*, is_interrupted: bool = False) -> None:
    """Write what a sweep that has begun leaves at its end. The module is loaded once the configuration has composed."""
    if sweep := sys.modules.get("kvsim.commands.sweep"):
        sweep.end_sweep(is_interrupted=is_interrupted)


def _forget_sweep() -> None:
    if sweep := sys.modules.get("kvsim.commands.sweep"):
        sweep.forget_sweep()
