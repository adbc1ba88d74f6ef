"""The configurations of a sweep's jobs. Hydra composes one for each set of choices; a job's values are set in a copy of it."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.settings.configuration import Composed, explained, only_known_errors, without_hydra
from kvsim.settings.sources import use

MOST_KEPT = 100
"""Composed configurations, of some 100 KB each."""


class Compositions:
    """Composes jobs of one sweep, during which the files of settings must not change.

    Hydra needs a hundred times as long to compose a configuration as OmegaConf to set a value in it, which is all that Hydra does
    with the override of an existing setting.
    """

    def __init__(self, loader: ConfigLoader, config_name: str = "config") -> None:
        self._loader, self._config_name = loader, config_name
        self._composed: dict[tuple[str, ...], Composed] = {}
        self._groups: dict[str, bool] = {}

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose the configuration of a job. Raises UsageError."""
        values = [line for line in overrides if self.sets_value(parsed(line))]
        config, choices = self._chosen(tuple(line for line in overrides if line not in values))
        config = deepcopy(config)
        try:
            for override in map(parsed, values):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self._by_hydra(overrides)  # which says what is wrong
        return Composed(config, choices)

    def sets_value(self, override: Override) -> bool:
        """Whether an override sets the value of an existing key: no group's choice, no added or deleted key."""
        changes_keys = override.is_add() or override.is_force_add() or override.is_delete()
        return not (changes_keys or override.package or override.is_hydra_override() or self._is_group(override.key_or_group))

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses from a group."""
        return not override.is_hydra_override() and self._is_group(override.key_or_group)

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            self._groups[key] = bool(self._loader.get_group_options(key))
        return self._groups[key]

    def _chosen(self, choices: tuple[str, ...]) -> Composed:
        if choices not in self._composed:
            if len(self._composed) >= MOST_KEPT:
                self._composed.clear()
            self._composed[choices] = self._by_hydra(choices)
        return self._composed[choices]

    def _by_hydra(self, overrides: Sequence[str]) -> Composed:
        with explained(overrides, self._config_name), only_known_errors(overrides):
            config = self._loader.load_configuration(self._config_name, list(overrides), RunMode.RUN, from_shell=False)
        use(config.hydra.runtime.config_sources)
        return without_hydra(config)


@cache
def parsed(line: str) -> Override:
    """Parse one override of a job."""
    override: Override = OverridesParser.create().parse_override(line)
    return override
