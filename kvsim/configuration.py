"""Composes a configuration from overrides, and explains in one line which override is wrong."""

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, cast

import hydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.errors import UsageError
from kvsim.suggest import closest

CONFIG = "kvsim.conf"
TIER_POLICY = re.compile(r"tiers\.(\w+)\.(eviction|placement)(\..*)?")


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose a run's configuration from overrides; ``output`` defaults to ``outputs``. Raises UsageError."""
    given = any(override.startswith("output=") for override in overrides)
    try:
        with hydra.initialize_config_module(CONFIG, version_base="1.3"):
            return hydra.compose("config", overrides=[*overrides, *(() if given else ("output=outputs",))])
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(explain(error, list(overrides))) from error


def explain(error: Exception, overrides: Sequence[str], config_name: str = "config") -> str:
    """Return one line that names the wrong override and suggests a correct one."""
    message = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return f"cannot parse the override {error.override!r}: use KEY=VALUE, and quote a value that contains spaces or brackets"
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(error)
    if isinstance(error, ConfigCompositionException):
        if ambiguous := re.match(r"Ambiguous value for argument '(.*?)' 1\.", message):
            return f"{ambiguous[1]} lists several values: add -m to run them one after another"
        if unknown := re.match(r"Could not (?:override|append to|delete) '(.*?)'", message):
            return _unknown_key(unknown[1], overrides, config_name)
    if isinstance(error, OmegaConfBaseException):
        return ": ".join(part for part in (error.full_key, str(error).splitlines()[0]) if part)
    return message


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or ())
    hint = closest(choice, options) or ";"
    return f"{group}={choice}: there is no such choice{hint} choose from {', '.join(options)}"


def _unknown_key(key: str, overrides: Sequence[str], config_name: str) -> str:
    if policy := TIER_POLICY.fullmatch(key):
        tier, family, setting = policy.groups()
        if setting is None:
            return f"{key}: use {family}@tiers.{tier}.{family}=NAME to give the tier its own policy"
        if not any(override.startswith(f"{family}@tiers.{tier}.") for override in overrides):
            return f"{key}: the tier has no policy of its own; add {family}@tiers.{tier}.{family}=NAME"
    keys = _known_keys(overrides, config_name)
    if hint := closest(key, [name for name in keys if name.count(".") == key.count(".")]):
        return f"{key}: there is no such setting{hint}"
    parent = key.rpartition(".")[0]
    siblings = [own for start, _, own in (name.rpartition(".") for name in keys) if start == parent and own != "_target_"]
    known = ", ".join(dict.fromkeys(siblings))
    return f"{key}: there is no such setting; {parent or 'the configuration'} has {known or 'none'}"


def _known_keys(overrides: Sequence[str], config_name: str) -> list[str]:
    """All configuration keys, with the user's group choices applied if they compose."""
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
