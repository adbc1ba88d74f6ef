"""``sweep.seeds``: a sweep that runs each of its configurations with several seeds."""

from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvsim.commands import hydra_internals
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.randomness import depends_on_seed

KEY = "sweep.seeds"


def add_seeds(config: DictConfig, command: str, seeds: int, *, is_optimizing: bool) -> None:
    """Sweep ``seed`` over ``seeds`` values, from the run's own upwards; a configuration's seeds follow one another.

    Raises UsageError where seeds have no effect or are chosen already.
    """
    if command in ("curve", "saturate"):
        raise UsageError(f"{KEY} has no effect on kvsim {command}: leave it out")
    if is_optimizing:
        raise UsageError(f"{KEY}: an optimizing sweeper is told one result per configuration: leave it out")
    task = hydra_internals.task_overrides(config)
    parsed = [override for override in OverridesParser.create().parse_overrides(task) if override.key_or_group != KEY]
    if any(override.key_or_group == "seed" and override.is_sweep_override() for override in parsed) or _is_parameter(config):
        raise UsageError(f"{KEY} and seed both choose the seeds: leave one of them out")
    others = [override.input_line or "" for override in parsed if override.key_or_group != "seed"]
    first = int(config.seed)
    if not _has_effect(config, command, others, first):
        raise UsageError(
            f"{KEY} has no effect: no configuration of this sweep depends on the seed (the trace does not follow it, and no "
            "policy draws random numbers); leave it out"
        )
    with read_write(config), open_dict(config):
        config.hydra.overrides.task = [*others, f"seed={','.join(str(first + number) for number in range(seeds))}"]


def _is_parameter(config: DictConfig) -> bool:
    return "seed" in (config.hydra.sweeper.get("params") or {})


def _has_effect(config: DictConfig, command: str, overrides: list[str], seed: int) -> bool:
    """Whether any configuration depends on the seed. One that cannot be built may: its job reports what is wrong."""
    for one, other in _pairs(config, command, overrides, seed):
        if one is None or other is None or depends_on_seed(one, other):
            return True
    return False


def _pairs(config: DictConfig, command: str, overrides: list[str], seed: int) -> Iterator[tuple[Plan | None, Plan | None]]:
    """Yield the plans of each configuration with this seed and with the next one."""
    parameters = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    for job in hydra_internals.split_sweep(config, parser.parse_overrides([*parameters, *overrides])).jobs:
        yield _plan(config, command, [*job, f"seed={seed}"]), _plan(config, command, [*job, f"seed={seed + 1}"])


def _plan(config: DictConfig, command: str, job: list[str]) -> Plan | None:
    try:
        composed = GlobalHydra.instance().config_loader().load_sweep_config(config, job)
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
        return build_run(composed, command=command, overrides=job)
    except (UsageError, HydraException, OmegaConfBaseException):
        return None
