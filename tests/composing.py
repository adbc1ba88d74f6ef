"""Configurations for tests, composed like those of a sweep's jobs: by Hydra once for each set of choices."""

from functools import cache

from omegaconf import DictConfig

from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import config_loader
from kvsim.sweeps.composition import Compositions


@cache
def _compositions() -> Compositions:
    return Compositions(config_loader())


def composed(*overrides: str) -> DictConfig:
    """The configuration that Hydra composes from these overrides. Raises UsageError."""
    return _compositions().compose(overrides).config


def plan(*overrides: str, command: str = "replay") -> Plan:
    """The plan of a run with these overrides. Raises UsageError."""
    return build_run(composed(*overrides), command=command, overrides=overrides)
