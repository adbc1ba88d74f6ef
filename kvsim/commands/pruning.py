"""Sweeps over choices with different settings: a job leaves out the settings that its own choices do not have.

``eviction=lru,slru eviction.protected_hits=2,3`` has four combinations and three jobs: LRU, and segmented LRU with each value. A
setting that none of the choices has stays in the job, whose composition reports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf


class Loader(Protocol):
    """What is needed of the loader of configurations."""

    def sets_value(self, override: Override) -> bool:
        """Whether an override sets the value of a key, rather than choosing from a group or adding a key."""

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses from a group."""

    def compose_job(self, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration of a job of a sweep with this configuration."""


class Pruned(NamedTuple):
    """The jobs of a sweep, and what to tell the user; empty if nothing was left out."""

    jobs: list[list[str]]
    note: str


@dataclass(frozen=True)
class Pruner:
    """Leaves settings out. ``options`` has the choices that the sweep tries from each group, as overrides, by the group's key."""

    options: dict[str, list[str]]

    def __call__(self, loader: Loader, config: DictConfig, job: Sequence[str]) -> list[str]:
        """Return a job's overrides without those of settings that its choices do not have but others of the sweep do."""
        lost = self._lost(loader, config, job)
        return [line for line in job if line not in lost] if lost else list(job)

    def prune(self, loader: Loader, config: DictConfig, jobs: Sequence[Sequence[str]]) -> Pruned:
        """Return the jobs without such settings and, if there were any, without repetitions."""
        kept: dict[tuple[str, ...], None] = {}
        missing: dict[str, dict[str, None]] = {}
        for job in jobs:
            lost = self._lost(loader, config, job)
            for line, choice in lost.items():
                missing.setdefault(line.partition("=")[0], {})[choice] = None
            kept[tuple(line for line in job if line not in lost)] = None
        if not missing:
            return Pruned([list(job) for job in jobs], "")
        told = "; ".join(f"{key} does not exist for {', '.join(choices)}" for key, choices in missing.items())
        count = f"{len(jobs)} combinations, {len(kept)} make sense" if len(kept) < len(jobs) else f"{len(jobs)} combinations"
        return Pruned([list(job) for job in kept], f"{count}: {told}")

    def missing(self, loader: Loader, config: DictConfig, overrides: Sequence[Override]) -> str:
        """Return a line for the user of a sweep that chooses its jobs as it runs; empty if all choices have the same settings."""
        first = [lines[0] for lines in self.options.values()]
        values = [f"{override.key_or_group}=0" for override in overrides if loader.sets_value(override)]
        fixed = [str(override.input_line) for override in overrides
                 if not override.is_sweep_override() and not loader.sets_value(override)]  # fmt: skip
        jobs = [[*fixed, *first, *values]]
        for place, lines in enumerate(self.options.values()):
            jobs += [[*fixed, *first[:place], line, *first[place + 1 :], *values] for line in lines[1:]]
        missing = self.prune(loader, config, jobs).note.partition(": ")[2]
        return f"{missing}; left out there\n" if missing else ""

    def _lost(self, loader: Loader, config: DictConfig, job: Sequence[str]) -> dict[str, str]:
        """Return the overrides to leave out, each with the choice that does not have its setting."""
        values = [line for line in job if loader.sets_value(parsed(line))]
        choices = tuple(line for line in job if line not in values)
        lost = {}
        for line in values:
            key = parsed(line).key_or_group
            if not _has(loader, config, choices, key) and (choice := self._without(loader, config, choices, key)):
                lost[line] = choice
        return lost

    def _without(self, loader: Loader, config: DictConfig, choices: tuple[str, ...], key: str) -> str:
        """Return the choice of a job that lacks a setting which another choice of the same group has; empty if there is none."""
        for lines in self.options.values():
            for own in set(lines) & set(choices):
                for other in lines:
                    changed = tuple(other if line == own else line for line in choices)
                    if _has(loader, config, changed, key):
                        return own
        return ""


def pruner_of(loader: Loader, overrides: Sequence[Override]) -> Pruner | None:
    """Return the pruner of a sweep over these overrides; None if it tries a single choice of each group or sets nothing."""
    options = {
        override.get_key_element(): [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        for override in overrides
        if override.is_discrete_sweep() and loader.is_choice(override)
    }
    varied = {key: lines for key, lines in options.items() if len(lines) > 1}
    return Pruner(varied) if varied and any(map(loader.sets_value, overrides)) else None


@lru_cache(maxsize=10_000)
def parsed(line: str) -> Override:
    """Parse one override of a job."""
    return OverridesParser.create().parse_overrides([line])[0]


_paths: dict[tuple[str, ...], frozenset[str]] = {}
"""The keys of composed configurations, by the choices made."""


def forget() -> None:
    """Forget the keys, since the files may change before the next sweep."""
    _paths.clear()


def _has(loader: Loader, config: DictConfig, choices: tuple[str, ...], key: str) -> bool:
    """Whether the configuration with these choices has a key; an item of a list counts if there is a list."""
    if choices not in _paths:
        composed = OmegaConf.to_container(loader.compose_job(config, choices), resolve=False)
        _paths[choices] = frozenset(_keys(composed, ""))
    paths = _paths[choices]
    return key in paths or any(f"{key[:place]}[" in paths for place, letter in enumerate(key) if letter in ".[")


def _keys(node: Any, prefix: str) -> list[str]:
    """Return the keys below a node; the name of a list is followed by a bracket."""
    if isinstance(node, list):
        return [prefix, f"{prefix}["]
    found = [prefix] if prefix else []
    for name, below in node.items() if isinstance(node, dict) else ():
        found += _keys(below, f"{prefix}.{name}" if prefix else str(name))
    return found
