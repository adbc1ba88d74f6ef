"""``sweep.seeds``: a sweep that runs each of its configurations with several seeds."""

from collections.abc import Callable, Sequence

from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from kvsim.plans.randomness import depends_on_seed
from kvsim.settings.configuration import parse
from kvsim.sweeps.grid import Job

KEY = "sweep.seeds"


def with_seeds(command: str, overrides: Sequence[str], parameters: Sequence[str], first: int, count: int) -> list[str]:
    """Return the overrides of a grid that sweeps ``count`` seeds from ``first`` upwards, too; they change fastest.

    ``parameters`` are the keys that the sweeper's own settings vary. Raises UsageError where seeds cannot have an effect, or are
    chosen already.
    """
    if command in ("curve", "saturate"):
        raise UsageError(f"{KEY} has no effect on kvsim {command}: leave it out")
    read = [override for override in map(parse, overrides) if override.key_or_group != KEY]
    swept = [override.key_or_group for override in read if override.is_sweep_override()]
    if "seed" in (*swept, *parameters):
        raise UsageError(f"{KEY} and seed both choose the seeds: leave one of them out")
    others = [str(override.input_line) for override in read if override.key_or_group != "seed"]
    return [*others, f"seed={','.join(str(first + number) for number in range(count))}"]


def check_effect(grid: Sequence[Job], count: int, plan: Callable[[Job], Plan]) -> None:
    """Raise UsageError if no job of a grid ``with_seeds`` depends on its seed."""
    if not any(_depends(plan, *grid[place : place + 2]) for place in range(0, len(grid), count)):
        raise UsageError(
            f"{KEY} has no effect: no configuration of this sweep depends on the seed (the trace does not follow it, and no "
            "policy draws random numbers); leave it out"
        )


def _depends(plan: Callable[[Job], Plan], one: Job, other: Job) -> bool:
    """Whether two jobs with different seeds differ. One that cannot be planned counts as doing so; its job reports the error."""
    try:
        return depends_on_seed(plan(one), plan(other))
    except UsageError:
        return True
