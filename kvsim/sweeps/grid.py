"""The jobs of a sweep over all combinations of its values, and of its choices with different settings.

``eviction=lru,slru eviction.protected_hits=2,3`` has four combinations and three jobs: LRU, and segmented LRU with each value. A
job leaves out the settings that its own choices do not have. One that none of the choices has stays in the job, whose composition
reports it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import OmegaConf

from kvsim.errors import UsageError
from kvsim.settings.configuration import explained, only_known_errors
from kvsim.sweeps.composition import Compositions, parsed

Job = list[str]
"""The overrides of a job."""


@dataclass(frozen=True)
class Lacking:
    """The settings, among those that a sweep sets, which some choices of a group lack and others have; by choice."""

    keys: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        choices: dict[str, list[str]] = {}
        for choice, keys in self.keys.items():
            for key in keys:
                choices.setdefault(key, []).append(choice)
        return "; ".join(f"{key} does not exist for {', '.join(lines)}" for key, lines in choices.items())

    def left_out(self, job: Sequence[str]) -> Job:
        """Return a job without the settings that its own choices lack."""
        lost = {key for line in job for key in self.keys.get(line, ())}
        return [line for line in job if line.partition("=")[0] not in lost]


def read_overrides(overrides: Sequence[str], parameters: Mapping[str, Any], loader: ConfigLoader) -> list[Override]:
    """Parse a sweep's overrides, those of its sweeper's ``parameters`` first. Raises UsageError."""
    lines = [*(f"{key}={value}" for key, value in parameters.items()), *overrides]
    with explained(lines), only_known_errors(lines):
        found: list[Override] = OverridesParser.create(config_loader=loader).parse_overrides(lines)
    return found


def combinations(overrides: Sequence[Override]) -> list[Job]:
    """Return the jobs of a grid in the order in which they run: the last override changes fastest. Raises UsageError."""
    if interval := next((one for one in overrides if one.is_interval_sweep()), None):
        raise UsageError(f"{interval.input_line}: an interval has no end of values: list some, or add hydra/sweeper=optuna")
    lines = {one.get_key_element(): values_of(one) for one in overrides}
    return [list(job) for job in itertools.product(*lines.values())]


def samples(overrides: Sequence[Override]) -> list[Job]:
    """Return jobs that together have each value of a sweep whose jobs are chosen as it runs. Raises UsageError."""
    lines = [values_of(one) for one in overrides]
    first = [values[0] for values in lines]
    return [[*first[:place], line, *first[place + 1 :]] for place, values in enumerate(lines) for line in values]


def values_of(override: Override) -> list[str]:
    """Return an override of a sweep as one override per value; of an interval, only its start. Raises UsageError."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    if override.is_interval_sweep():
        return [f"{key}={cast(IntervalSweep, override.value()).start}"]
    if not (values := [f"{key}={value}" for value in override.sweep_string_iterator()]):
        raise UsageError(f"{override.input_line} matches nothing: give at least one value")
    return values


def lacking(compositions: Compositions, overrides: Sequence[Override]) -> Lacking:
    """Return what choices of a sweep lack. Composes each choice, beside the first ones of the other groups. Raises UsageError."""
    options = [values_of(one) for one in overrides if one.is_discrete_sweep() and compositions.is_choice(one)]
    values = [one.key_or_group for one in overrides if compositions.sets_value(one)]
    fixed = [str(one.input_line) for one in overrides if not one.is_sweep_override() and one.key_or_group not in values]
    found: dict[str, list[str]] = {}
    for place, lines in enumerate(options if values else []):
        if len(lines) > 1:
            first = [other[0] for other in (*options[:place], *options[place + 1 :])]
            has = {line: _keys_of(compositions, [*fixed, *first, line], values) for line in lines}
            known = set().union(*has.values())
            found |= {line: [key for key in values if key in known - keys] for line, keys in has.items() if known - keys}
    return Lacking(found)


def prune(jobs: Sequence[Job], lacking: Lacking) -> tuple[list[Job], str]:
    """Return the jobs without what their choices lack, each once, and a line that says so; empty if nothing is left out."""
    if not lacking.keys:
        return list(jobs), ""
    kept = [list(job) for job in dict.fromkeys(tuple(lacking.left_out(job)) for job in jobs)]
    count = f"{len(jobs)} combinations, {len(kept)} make sense" if len(kept) < len(jobs) else f"{len(jobs)} combinations"
    return kept, f"{count}: {lacking}"


def check(compositions: Compositions, jobs: Sequence[Job]) -> None:
    """Compose one job for each choice from a group and for each key that is set. Raises UsageError."""
    tried: set[str] = set()
    for job in jobs:
        tries = {line.partition("=")[0] if compositions.sets_value(parsed(line)) else line for line in job}
        if not tries <= tried:
            compositions.compose(job)
            tried |= tries


def _keys_of(compositions: Compositions, choices: Sequence[str], keys: Sequence[str]) -> set[str]:
    """Return which of the keys the configuration with these choices has."""
    config = OmegaConf.to_container(compositions.compose(choices).config, resolve=False)
    return {key for key in keys if _has(config, key)}


def _has(config: Any, key: str) -> bool:
    """Whether a configuration has a key; an item of a list counts if there is a list."""
    for name in key.split("."):
        name, is_item, _ = name.partition("[")
        if not isinstance(config, dict) or name not in config or is_item and not isinstance(config[name], list):
            return False
        config = config[name]
    return True
