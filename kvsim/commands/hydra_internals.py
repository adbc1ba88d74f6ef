"""What sweeps need of Hydra and OmegaConf beyond their public interfaces. Only ``hydra_main.py`` uses internals beside it.

A sweep of short replays would spend most of its time in Hydra, which composes the configuration of every job from the YAML files,
validates each combination before the first job starts, and pickles the whole configuration for every job. ``speed_up`` replaces
these three steps by ones with the same results. It also leaves settings out of the jobs whose choices do not have them
(``pruning.py``). ``tests/commands/test_hydra_internals.py`` compares the results with Hydra's own
and fails where the installed version has other internals.
"""

import copyreg
import os
import pickle
from collections.abc import Hashable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf

from kvsim.commands.pruning import Pruned, Pruner, forget, pruner_of

MOST_COMPOSED = 100
MOST_SENT = 20
"""Configurations sent with every job, of about 20 KB each."""


class JobConfig(DictConfig):
    """A configuration whose copies take a tenth of the time; Hydra copies that of a job six times.

    A copy by OmegaConf creates every node anew and validates its value again.
    """

    @classmethod
    def of(cls, config: DictConfig) -> "JobConfig":
        """Convert a configuration."""
        copied = _copy(config, None)
        assert isinstance(copied, cls)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "JobConfig":
        copied = _copy(self, self.__dict__["_parent"])
        assert isinstance(copied, JobConfig)
        return copied


def _copy(node: Node, parent: Any) -> Node:
    """Copy a node and all nodes below it; every DictConfig becomes a JobConfig. Values are shared, as in OmegaConf's copies."""
    kind = type(node)
    copied: Node = object.__new__(JobConfig if kind is DictConfig else kind)
    state = copied.__dict__
    state.update(node.__dict__, _parent=parent, _metadata=_copy_metadata(node.__dict__["_metadata"]))
    if "_content" in state:
        content, state["_flags_cache"] = state["_content"], None
        if isinstance(content, dict):
            state["_content"] = {key: _copy(below, copied) for key, below in content.items()}
        elif isinstance(content, list):
            state["_content"] = [_copy(below, copied) for below in content]
        elif isinstance(content, Node):
            state["_content"] = _copy(content, copied)
    return copied


def _copy_metadata(metadata: Any) -> Any:
    copied = object.__new__(type(metadata))
    copied.__dict__.update(metadata.__dict__, flags=dict(metadata.flags or {}))
    if metadata.resolver_cache:
        copied.resolver_cache = deepcopy(metadata.resolver_cache)
    return copied


_composed: dict[Hashable, JobConfig] = {}
"""Composed configurations by the choices made. Kept per process: a launcher's worker gets a new loader with each job."""


class SweepLoader(ConfigLoaderImpl):
    """Composes one configuration per combination of group choices, and sets the values of each job in a copy of it.

    The result equals that of Hydra's own loader, which handles every override other than a group choice or a new value of an
    existing key (``+key=``, ``~key``). The YAML files must not change during the sweep.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.sent: dict[Hashable, bytes] = {}
        """Pickled configurations that the launching process composed, so that workers need not compose them again."""
        self.pruner: Pruner | None = None
        """Leaves out of a job what its choices do not have."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose the configuration of a job, as Hydra's loader does, without the settings that its choices do not have."""
        job = sweep_overrides if self.pruner is None else self.pruner(self, master_config, sweep_overrides)
        return super().load_sweep_config(master_config, job)

    def compose_job(self, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration of a job with these choices only; ``seed`` is set so that it is kept for jobs."""
        return super().load_sweep_config(config, [*overrides, f"seed={config.seed}"])

    def send(self) -> None:
        """Add what this process has composed to what workers receive, except classes of plugins that were imported twice."""
        for key, config in list(_composed.items())[-MOST_SENT:]:
            with suppress(pickle.PicklingError):
                self.sent[key] = pickle.dumps(config)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration, as Hydra's loader does."""
        compose = super().load_configuration
        settings = from_shell, validate_sweep_overrides
        parsed = [_parse(line) for line in overrides]
        values = [override for override in parsed if self.sets_value(override)]
        if run_mode != RunMode.RUN or not values or any(override.is_sweep_override() for override in values):
            return compose(config_name, overrides, run_mode, *settings)
        chosen = [override.input_line or "" for override in parsed if override not in values]
        sources = tuple(path.path for path in self.config_search_path.get_path())
        key = (config_name, sources, os.getcwd(), tuple(chosen), *settings)
        if key not in _composed:
            if len(_composed) >= MOST_COMPOSED:
                _composed.clear()
            sent = self.sent.get(key)
            _composed[key] = pickle.loads(sent) if sent else JobConfig.of(compose(config_name, chosen, run_mode, *settings))
        config = deepcopy(_composed[key])
        self._apply_overrides_to_config(values, config)
        own = [override for override in parsed if not override.is_hydra_override()]
        job = config.hydra.job
        config.hydra.overrides.task = [override.input_line for override in own]
        job.override_dirname = get_overrides_dirname(
            overrides=own,
            kv_sep=job.config.override_dirname.kv_sep,
            item_sep=job.config.override_dirname.item_sep,
            exclude_keys=job.config.override_dirname.exclude_keys,
        )
        return config

    def sets_value(self, override: Override) -> bool:
        """Whether the override sets the value of an existing key: no group choice, no added or deleted key."""
        key = override.key_or_group
        if override.is_hydra_override() or override.is_add() or override.is_force_add() or override.is_delete():
            return False
        return override.package is None and not self.repository.group_exists(key)

    def is_choice(self, override: Override) -> bool:
        """Whether the override chooses from a group."""
        return not override.is_hydra_override() and bool(self.repository.group_exists(override.key_or_group))


@lru_cache(maxsize=1000)
def _parse(line: str) -> Override:
    return OverridesParser.create().parse_overrides([line])[0]


_validate_of_hydra = Sweeper.validate_batch_is_legal
_split_of_hydra = BasicSweeper.split_arguments


def speed_up(config: DictConfig) -> None:
    """Make Hydra launch the sweep with this configuration faster, until ``restore``. Call it before the sweeper starts.

    Prints a line if jobs leave settings out.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader = SweepLoader(hydra.config_loader.get_search_path())
    loader.pruner = pruner_of(loader, swept_overrides(config))
    if loader.pruner is not None and not is_grid(config):
        print(loader.pruner.missing(loader, config, swept_overrides(config)), end="", flush=True)

    def split(overrides: list[Override], most: int | None) -> list[list[list[str]]]:
        pruned = _pruned(loader, config, overrides)
        if pruned.note:
            print(pruned.note, flush=True)
        return [list(jobs) for jobs in BasicSweeper.split_overrides_to_chunks(pruned.jobs, most)]

    _set_split(split)
    with suppress(pickle.PicklingError):  # the class of a plugin that was imported twice
        pickle_once(config)
    setattr(Sweeper, "validate_batch_is_legal", _try_each_choice)  # noqa: B010  (types do not allow the assignment)


def restore() -> None:
    """Undo what stays in the process after a sweep."""
    for kind in (ConfigStore, DictConfig):
        copyreg.dispatch_table.pop(kind, None)
    setattr(Sweeper, "validate_batch_is_legal", _validate_of_hydra)  # noqa: B010  (as above)
    _set_split(_split_of_hydra)
    forget()


def _set_split(split: Any) -> None:
    """Replace ``split_arguments`` of the grid sweeper in each copy of its class: Hydra imports plugins twice."""
    found: list[Any] = [BasicSweeper, *Plugins.instance().discover(Sweeper)]
    for kind in found:
        if kind.__name__ == BasicSweeper.__name__:
            setattr(kind, "split_arguments", staticmethod(split))  # noqa: B010  (types do not allow the assignment)


def pickle_once(config: DictConfig) -> None:
    """Pickle the sweep's configuration, which launchers send with every job, only once, and unpickle it once per process.

    The store of configurations that plugins registered is not sent: the plugins register them again in the job's process.
    """
    pickled = pickle.dumps(config)

    def reduce(other: DictConfig) -> Any:
        return (_unpickle, (pickled,)) if other is config else other.__reduce_ex__(2)

    copyreg.pickle(DictConfig, reduce)
    copyreg.pickle(ConfigStore, lambda _store: (ConfigStore.instance, ()))


@lru_cache(maxsize=1)
def _unpickle(pickled: bytes) -> DictConfig:
    config: DictConfig = pickle.loads(pickled)
    return config


def keep_plugins() -> None:
    """Reuse the plugins that this process has found: a launcher would make Hydra import all of them again for its next job."""
    plugins = Plugins.instance()
    found = plugins.discover(), plugins.get_stats()
    setattr(Plugins, "_scan_all_plugins", staticmethod(lambda modules: found))  # noqa: B010  (as above)


def _try_each_choice(sweeper: Sweeper, batch: Sequence[Sequence[str]]) -> None:
    """Compose one configuration for each choice from a group and for each key that is set.

    Hydra would compose the configurations of all jobs before it starts the first.
    """
    assert sweeper.hydra_context is not None and sweeper.config is not None
    loader = sweeper.hydra_context.config_loader
    assert isinstance(loader, SweepLoader)
    read = cache(lambda line: OverridesParser.create().parse_overrides([line])[0])
    what = cache(lambda line: read(line).key_or_group if loader.sets_value(read(line)) else line)
    tried: set[str] = set()
    for job in batch:
        tries = {what(line) for line in job}
        if not tries <= tried:
            loader.load_sweep_config(master_config=sweeper.config, sweep_overrides=list(job))
            tried |= tries
    loader.send()


def swept_overrides(config: DictConfig) -> list[Override]:
    """Return the overrides of a sweep, those of its sweeper's parameters first."""
    parameters = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed: list[Override] = parser.parse_overrides([*parameters, *task_overrides(config)])
    return parsed


def task_overrides(config: DictConfig) -> list[str]:
    """Return the user's overrides as they were written, references in them included."""
    written = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(written, list)
    return [str(override) for override in written]


def is_grid(config: DictConfig) -> bool:
    """Whether the sweep's jobs are all combinations, rather than chosen as it runs."""
    return "BasicSweeper" in str(config.hydra.sweeper._target_)


def split_sweep(config: DictConfig, overrides: list[Override]) -> Pruned:
    """Return the jobs of a sweep over all combinations, in the order in which they run, and what they leave out."""
    return _pruned(sweep_loader(), config, overrides)


def sweep_loader() -> SweepLoader:
    """Return a loader for the jobs of the sweep that Hydra is about to run."""
    return SweepLoader(GlobalHydra.instance().config_loader().get_search_path())


def _pruned(loader: SweepLoader, config: DictConfig, overrides: list[Override]) -> Pruned:
    jobs: list[list[str]] = _split_of_hydra(overrides, None)[0]
    pruner = pruner_of(loader, overrides)
    return Pruned(jobs, "") if pruner is None else pruner.prune(loader, config, jobs)
