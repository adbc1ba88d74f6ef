"""Composing a configuration is most of the work of many tests, and most of it is the same each time."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins


@contextmanager
def compositions_are_reused() -> Iterator[None]:
    """Let Hydra read kvsim's own files once, and merge them once for each choice of them; values are set in a copy, as ever.

    Where files of a user are on the search path, no merged ones are reused. Copies are pickled: that takes a fifth of the time.
    """
    list_defaults, merge = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    Plugins.instance()  # registers the readers of files
    of_packages = SourcesRegistry.instance().resolve("pkg")
    read = of_packages.load_config
    lists: dict[Any, Any] = {}
    merged: dict[str, bytes] = {}
    files: dict[tuple[str, str, str], bytes] = {}

    def reuse_list(repo: Any, config_name: Any, overrides_list: list[Any], *flags: bool, **named: bool) -> Any:
        if not has_own_files_only(repo) or any(one.is_sweep_override() for one in overrides_list):
            return list_defaults(repo, config_name, overrides_list, *flags, **named)
        values, choices = [], []
        for one in overrides_list:
            is_choice = repo.group_exists(one.key_or_group) and not isinstance(one.value(), dict)
            (choices if is_choice else values).append(one)
        key = (config_name, *[one.input_line for one in choices], *flags, *named.items())
        if key not in lists:
            lists[key] = list_defaults(repo, config_name, overrides_list, *flags, **named)
        return replace(lists[key], config_overrides=values)

    def reuse_merged(loader: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
        if not has_own_files_only(repo):
            return merge(loader, defaults, repo)
        key = repr(defaults)
        if key not in merged:
            merged[key] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(merged[key])

    def reuse_file(source: Any, config_path: str) -> Any:
        key = (source.provider, source.path, config_path)
        if key not in files:
            files[key] = pickle.dumps(read(source, config_path))
        return pickle.loads(files[key])

    def share_sources(repo: CachingConfigRepository, delegate: Any) -> None:
        """Another search path gets a list of its own, and no source changes: so Hydra need not copy all that it has stored."""
        repo.delegate = copy(delegate)
        repo.cache = {}

    with (
        patch.object(config_loader_impl, "create_defaults_list", reuse_list),
        patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", reuse_merged),
        patch.object(of_packages, "load_config", reuse_file),
        patch.object(CachingConfigRepository, "__init__", share_sources),
    ):
        yield


def has_own_files_only(repo: Any) -> bool:
    """Whether all that Hydra reads is part of kvsim and of Hydra."""
    return all(source.scheme() != "file" for source in repo.get_sources())
