"""Everything that kvsim needs of Hydra and OmegaConf beyond their public interfaces. No other module uses their internals.

A sweep of short replays would spend most of its time in Hydra, which composes the configuration of every job from the YAML files,
validates each combination before the first job starts, and pickles the whole configuration for every job. ``speed_up`` replaces
these three steps by ones with the same results. ``tests/commands/test_hydra_internals.py`` compares the results with Hydra's own
and fails where the installed version has other internals.
"""

import copyreg
import os
import pickle
from argparse import ArgumentParser
from collections.abc import Hashable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, Node

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


@lru_cache(maxsize=1000)
def _parse(line: str) -> Override:
    return OverridesParser.create().parse_overrides([line])[0]


_validate_of_hydra = Sweeper.validate_batch_is_legal


def speed_up(config: DictConfig) -> None:
    """Make Hydra launch the sweep with this configuration faster, until ``restore``. Call it before the sweeper starts."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    hydra.config_loader = SweepLoader(hydra.config_loader.get_search_path())
    with suppress(pickle.PicklingError):  # the class of a plugin that was imported twice
        pickle_once(config)
    setattr(Sweeper, "validate_batch_is_legal", _try_each_choice)  # noqa: B010  (types do not allow the assignment)


def restore() -> None:
    """Undo what stays in the process after a sweep."""
    for kind in (ConfigStore, DictConfig):
        copyreg.dispatch_table.pop(kind, None)
    setattr(Sweeper, "validate_batch_is_legal", _validate_of_hydra)  # noqa: B010  (as above)


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


def split_sweep(overrides: list[Override]) -> list[list[str]]:
    """The overrides of each job of a sweep over all combinations, in the order in which they run."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    jobs: list[list[str]] = BasicSweeper.split_arguments(overrides, None)[0]
    return jobs


def arguments_parser() -> ArgumentParser:
    """Hydra's parser of the command line."""
    parser: ArgumentParser = get_args_parser()
    return parser
