"""Runs a Hydra application and says in one line what a user did wrong."""

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.build import Plan, build_run
from kvsim.commands.mistake import Mistake
from kvsim.commands.sweep import Listed, Objective, end_sweep, forget_sweep, run_sweep_job
from kvsim.errors import UsageError
from kvsim.report.result import RunRecord
from kvsim.suggest import closest

CONFIG = "kvsim.conf"
MISTAKES = ("Config group override must be", "Only one of --run", "The --resolve flag")
"""How the errors begin that Hydra raises as a plain ValueError."""
TIER_POLICY = re.compile(r"tiers\.(\w+)\.(eviction|placement)(\..*)?")


def run_application(application: Callable[[], Any], arguments: Sequence[str], *, config_name: str = "config") -> None:
    """Run ``application``, made by ``hydra.main`` with ``config_name``, with these arguments. Raises UsageError for a mistake."""
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
    """Lets no further interrupt in: what is finished of a sweep is to be written, however often a user asks to end it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_job(command: str, run: Callable[[Plan, str], RunRecord], cfg: DictConfig) -> Objective:
    """Run the job at hand: ``run`` takes its plan and the command line that repeats it. A mistake ends a single run at once.

    Returns what an optimizing sweeper wants to know of a job of a multirun.
    """
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return run_sweep_job(command, run, cfg)
    try:
        overrides = list(job.overrides.task)
        if key := next((override for override in overrides if override.startswith("sweep.")), None):
            raise UsageError(f"{key.partition('=')[0]} has no effect on a single run: add -m, or leave it out")
        plan = build_run(cfg, command=command, overrides=overrides)
        try:
            run(plan, shlex.join(["kvsim", command, *overrides]))
        except Exception as error:
            plan.logger.log_failure(plan.output, plan.config, f"{type(error).__name__}: {error}", None)
            raise
    except UsageError as error:
        raise Mistake(error) from error
    return None


def explain(error: Exception, overrides: Sequence[str], config_name: str = "config") -> str:
    """One line that says which override is wrong, and what would be right."""
    message = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: say KEY=VALUE, with quotes around a value with spaces or brackets"
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(error)
    if isinstance(error, ConfigCompositionException):
        if ambiguous := re.match(r"Ambiguous value for argument '(.*?)' 1\.", message):
            return f"{ambiguous[1]} lists several values: add -m to run one after another"
        if unknown := re.match(r"Could not (?:override|append to|delete) '(.*?)'", message):
            return _unknown_key(unknown[1], overrides, config_name)
    if isinstance(error, OmegaConfBaseException):
        return ": ".join(part for part in (error.full_key, str(error).splitlines()[0]) if part)
    return message


def _in_order(arguments: Sequence[str]) -> list[str]:
    """Overrides before flags: between flags, Hydra's parser would not take them. Raises UsageError for an unknown flag."""
    parser = get_args_parser()
    parser.exit_on_error = False
    overrides = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    ordered = [*overrides, *(word for word in arguments if word not in overrides)]
    try:
        unknown = parser.parse_known_args(ordered)[1]
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"cannot read {unknown[0]!r}: say KEY=VALUE, or see --help for the flags")
    return ordered


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or ())
    hint = closest(choice, options) or ";"
    return f"{group}={choice}: there is no such choice{hint} choose from {', '.join(options)}"


def _unknown_key(key: str, overrides: Sequence[str], config_name: str) -> str:
    if policy := TIER_POLICY.fullmatch(key):
        tier, family, setting = policy.groups()
        if setting is None:
            return f"{key}: say {family}@tiers.{tier}.{family}=NAME to give the tier its own policy"
        if not any(override.startswith(f"{family}@tiers.{tier}.") for override in overrides):
            return f"{key}: the tier has no policy of its own: add {family}@tiers.{tier}.{family}=NAME"
    keys = _known_keys(overrides, config_name)
    if hint := closest(key, [name for name in keys if name.count(".") == key.count(".")]):
        return f"{key}: there is no such setting{hint}"
    parent = key.rpartition(".")[0]
    siblings = [own for start, _, own in (name.rpartition(".") for name in keys) if start == parent and own != "_target_"]
    known = ", ".join(dict.fromkeys(siblings))
    return f"{key}: there is no such setting; {parent or 'the configuration'} has {known or 'none'}"


def _known_keys(overrides: Sequence[str], config_name: str) -> list[str]:
    """All keys, with the user's choices of groups made as far as they can be."""
    groups = {folder.name for folder in files(CONFIG).iterdir() if folder.is_dir()}
    choices = [override for override in overrides if override.split("=")[0].split("@")[0] in groups]
    with hydra.initialize_config_module(CONFIG, version_base="1.3"):
        for chosen in (choices, []):
            try:
                cfg = hydra.compose(config_name, overrides=chosen, return_hydra_config=True)
            except (HydraException, OmegaConfBaseException):
                continue
            groups_of_tiers = [str(name) for name in cfg.hydra.runtime.choices if not str(name).startswith("hydra/")]
            config = cast(dict[str, Any], OmegaConf.to_container(cfg))
            return [*groups_of_tiers, *(name for name in _paths(config) if not name.startswith("hydra"))]
    return []


def _paths(node: dict[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for name, value in node.items():
        paths.append(f"{prefix}{name}")
        if isinstance(value, dict):
            paths += _paths(value, f"{prefix}{name}.")
    return paths
