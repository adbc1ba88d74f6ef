"""The names under which policies, models and traces were chosen: what tables and pages call them."""

from collections.abc import Iterable, Mapping
from typing import Any

OF_HYDRA = "hydra/"


def chosen(choices: Mapping[Any, Any], config: Mapping[str, Any], keys: Iterable[str] = ()) -> dict[str, str]:
    """Return Hydra's runtime choices by group, such as ``{"eviction": "lru", "eviction@tiers.cpu.eviction": "arc"}``.

    Groups of Hydra itself and groups without a choice are left out. ``keys`` are those of the user's overrides: where one names
    another class (``eviction._target_=...``), the chosen file no longer says what runs, so the class's name replaces it.
    """
    names = {str(group): str(name) for group, name in choices.items() if name is not None}
    names = {group: name for group, name in names.items() if name != "null" and not group.startswith(OF_HYDRA)}
    replaced = {key.removesuffix("._target_") for key in keys if key.endswith("._target_")}
    for group in names:
        if (place := package(group)) in replaced and "_target_" in (node := _node(config, place)):
            names[group] = class_name(node)
    return names


def package(group: str) -> str:
    """Return where the configuration has a group's choice: ``tiers.cpu.eviction`` for ``eviction@tiers.cpu.eviction``."""
    return group.rpartition("@")[2]


def class_name(node: Any) -> str:
    """Return the name of the class that a node of the configuration describes."""
    return str(node["_target_"]).rpartition(".")[2]


def _node(config: Any, place: str) -> Any:
    """Return the mapping at a place; an empty one if there is none."""
    for name in place.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}
