"""The numbers of a run that an optimizing sweep minimizes or maximizes: ``sweep.objective``."""

from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvsim.errors import UsageError
from kvsim.plans.command_settings import SweepSettings
from kvsim.report.comparison import objective as directed
from kvsim.report.comparison.objective import DIRECTIONS, known_objectives, objective, usual_direction
from kvsim.results.result import RunRecord
from kvsim.suggest import closest

Objective = float | list[float] | None


def objectives(result: RunRecord, settings: SweepSettings) -> Objective:
    """The values of ``sweep.objective`` in a result; a list if there are several. Raises UsageError."""
    if settings.objective is None:
        return None
    numbers = [objective(result, name) for name in settings.objective]
    return numbers if len(numbers) > 1 else numbers[0]


def check_objective(settings: SweepSettings) -> None:
    """Raise UsageError for an objective that no result contains."""
    for name in settings.objective or ():
        first = name.split(".")[0]
        known = known_objectives()
        if first not in known:
            hint = closest(first, known) or f"; choose from {', '.join(known)}"
            raise UsageError(f"sweep.objective: result.json has no number {name}{hint}")


def check_directions(config: DictConfig, settings: SweepSettings) -> list[directed.Objective]:
    """Return the objectives of a sweep with their directions: those that its sweeper is given, or those that are usual.

    Raises UsageError if an optimizing sweeper has no direction for each, or was given none and would minimize a hit rate.
    """
    names = settings.objective or []
    usual = [usual_direction(name) for name in names]
    sweeper = config.hydra.sweeper
    if "direction" not in sweeper:
        return _directed(names, usual)
    given: Any = OmegaConf.to_container(sweeper, resolve=True)["direction"]  # type: ignore[index, call-overload]
    chosen = [str(getattr(one, "name", one)) for one in (given if isinstance(given, list) else [given])]
    is_set = not isinstance(given, Enum)  # which the plugin's default is
    if len(chosen) != len(names) or not is_set and chosen != usual:
        raise UsageError(
            f"hydra.sweeper.direction is {_listed(chosen)}, but sweep.objective is {_listed(names)}: "
            f"set hydra.sweeper.direction={_listed(usual)}"
        )
    if unknown := [one for one in chosen if one not in DIRECTIONS]:
        raise UsageError(f"hydra.sweeper.direction must be one of {', '.join(DIRECTIONS)}, not {unknown[0]}")
    return _directed(names, chosen)


def _directed(names: list[str], directions: list[str]) -> list[directed.Objective]:
    return [directed.Objective(name=name, direction=one) for name, one in zip(names, directions, strict=True)]


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"[{','.join(words)}]"
