"""Configurations of runs that an earlier version of kvsim has recorded, which lack the settings that came later."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from kvsim.settings.catalog import choices
from kvsim.settings.configuration import compose


def with_later_settings(config: Mapping[str, Any], chosen: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the settings that it lacks and ``later`` has, at their defaults.

    ``chosen`` are the choices of the run; those that are unknown here, such as the description of another machine, count as not
    made. Raises UsageError if the choices do not go together any more.
    """
    if not _lacks(config, later):
        return dict(config)
    known = [f"{group}={choice}" for group, choice in chosen.items() if "@" not in group and choice in choices(group)]
    defaults = OmegaConf.to_container(compose(known))
    assert isinstance(defaults, dict)
    return _filled(config, later, {str(name): value for name, value in defaults.items()})


def _lacks(config: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    return any(
        name not in config or (_are_groups(config[name], value) and _lacks(config[name], value)) for name, value in later.items()
    )


def _filled(config: Mapping[str, Any], later: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Objects of two classes have nothing in common, and keep what they have."""
    if config.get("_target_", defaults.get("_target_")) != defaults.get("_target_"):
        return dict(config)
    filled = dict(config)
    for name, value in later.items():
        default = defaults.get(name)
        if _are_groups(config.get(name, {}), value, default):
            filled[name] = _filled(config.get(name, {}), value, default or {})
        elif name not in config and name in defaults:
            filled[name] = default
    return filled


def _are_groups(*values: Any) -> bool:
    return all(isinstance(value, Mapping) for value in values)
