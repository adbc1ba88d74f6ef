"""Composes the configurations of a sweep's jobs. Hydra would begin each from the files: as long as a short replay takes."""

import os
import pickle
from collections.abc import Hashable
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, Node

MOST_COMPOSED = 100
MOST_SENT = 20
"""Of some 20 KB each, with every job."""


class JobConfig(DictConfig):
    """A configuration that is copied in a tenth of the time, as are all its parts: Hydra copies that of a job six times.

    OmegaConf makes each node of a copy anew, and checks its value again.
    """

    @classmethod
    def of(cls, config: DictConfig) -> "JobConfig":
        """The same configuration."""
        copied = _copy(config, None)
        assert isinstance(copied, cls)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "JobConfig":
        copied = _copy(self, self.__dict__["_parent"])
        assert isinstance(copied, JobConfig)
        return copied


def _copy(node: Node, parent: Any) -> Node:
    """The node and all below it, in which every DictConfig is a JobConfig; values are shared, as in a copy of OmegaConf's."""
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
"""By what was chosen. Of this process: a launcher's worker gets a loader of its own for each job."""


class SweepLoader(ConfigLoaderImpl):
    """Composes one configuration for each choice of groups, and sets in a copy of it what differs from job to job.

    What it gives is what Hydra's own loader gives. Overrides that do more than choose from a group or set a value that is
    there (``+key=``, ``~key``) are left to that. Files of configurations must not change meanwhile.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.sent: dict[Hashable, bytes] = {}
        """What was composed where the sweep began, pickled: a worker need not compose it once more."""

    def send(self) -> None:
        """Take along to workers what this process has composed; not what names a class of a plugin that was imported twice."""
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
        """As in Hydra's contract."""
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
        """Whether it sets a value in the configuration, and neither chooses from a group nor adds or takes away a key."""
        key = override.key_or_group
        if override.is_hydra_override() or override.is_add() or override.is_force_add() or override.is_delete():
            return False
        return override.package is None and not self.repository.group_exists(key)


@lru_cache(maxsize=1000)
def _parse(line: str) -> Override:
    return OverridesParser.create().parse_overrides([line])[0]
