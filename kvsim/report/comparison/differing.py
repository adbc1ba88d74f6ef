"""The settings in which runs differ, and what to call them."""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvsim.results.chosen_names import class_name, package
from kvsim.results.result import RunRecord
from kvsim.settings.catalog import OVER_OTHERS

ORDER = ("command", "preset", "trace", "model", "hardware", "drive", "network", "page_tokens", "tiers", "cluster")
"""First parts of keys, in the order of columns; others follow."""
WITHOUT_EFFECT = ("logger", "timeline", "events", "print_tree")
"""Settings that change no result."""


def settings_of(result: RunRecord) -> dict[str, str]:
    """Return the settings of a run by key, with the command; choices by name."""
    return labels(result["config"], result["choices"]) | {"command": result["command"]}


def labels(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """Flatten a configuration to short texts by key; a group becomes the name that was chosen from it, next to its settings.

    ``choices`` are those of the record, by group. A policy that comes from no group has the name of its class.
    """
    return _flattened(config, "") | {package(group): name for group, name in choices.items()}


def _flattened(config: Mapping[str, Any], prefix: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key == "_target_":
            flat[prefix.rstrip(".")] = class_name(config)
        elif isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            flat[f"{prefix}{key}"] = str(value).lower()
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def overridden(results: Iterable[RunRecord]) -> set[str]:
    """Return the keys that the commands of these runs set."""
    words = (word for result in results for word in shlex.split(result.get("command_line") or ""))
    return {key.lstrip("+~") for key, is_set, _ in (word.partition("=") for word in words) if is_set}


def differing(settings: Sequence[Mapping[str, str]], overridden: Collection[str] = ()) -> list[str]:
    """Return the keys whose values differ, and those of choices and tier settings that only some runs have, or set.

    Settings that follow from the choice made from their group, as a model's layers do, are left out unless ``overridden``.
    """
    keys = dict.fromkeys(key for each in settings for key in each)
    of_choices = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    found = []
    for key in keys:
        values = [each[key] for each in settings if key in each]
        is_partial = len(values) < len(settings)
        if key.partition(".")[0] in WITHOUT_EFFECT:
            continue
        is_own = key in of_choices or key.startswith("tiers.") and key.count(".") == 2 or key in overridden
        if len(set(values)) > 1 or is_partial and (is_own or _is_of_one_choice(key, settings)):
            found.append(key)
    found = [key for key in found if key in overridden or not any(_follows(key, choice, settings) for choice in found)]
    return sorted(found, key=lambda key: next((place for place, name in enumerate(ORDER) if key.startswith(name)), len(ORDER)))


def _is_of_one_choice(key: str, settings: Sequence[Mapping[str, str]]) -> bool:
    """Whether all runs made the same choice from a setting's group, as of a trace, so that its null differs from a value."""
    group = key.partition(".")[0]
    return group != key and group in settings[0] and len({each.get(group) for each in settings}) == 1


def _follows(key: str, choice: str, settings: Sequence[Mapping[str, str]]) -> bool:
    """Whether a setting of a group is the same in all runs that made the same choice from the group.

    A preset, a drive and a network card choose settings of other groups; policies and capacities are shown beside them.
    """
    is_preset = choice in OVER_OTHERS and "." in key and not key.endswith((".capacity", ".eviction", ".placement"))
    values: dict[str | None, str | None] = {}
    return (is_preset or key.startswith(f"{choice}.")) and all(
        values.setdefault(each.get(choice), each.get(key)) == each.get(key) for each in settings
    )


def setting_text(key: str, value: str) -> str:
    """Format a setting for a legend: a choice by its name alone, other settings with the last part of the key."""
    if "." not in key and not key.startswith(("page", "seed", "warmup", "sample")):
        return value
    start, _, end = key.rpartition(".")
    return f"{start.rpartition('.')[2]} {value}" if end == "capacity" else f"{end}={value}"


def heading(key: str) -> str:
    """Return the column heading of a setting: ``gpu capacity`` for ``tiers.gpu.capacity``."""
    return key.removeprefix("tiers.").replace(".", " ").replace("_", " ")
