"""Composing a configuration is most of the work of many tests, and most of it is the same each time."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl


@contextmanager
def compositions_are_reused() -> Iterator[None]:
    """Let Hydra read and merge kvsim's own files once for each choice of them; values are set in a copy, as ever.

    Where files of a user are on the search path, nothing is reused.
    """
    list_defaults, merge = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[Any, Any] = {}
    merged: dict[Any, Any] = {}

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
            merged[key] = merge(loader, defaults, repo)
        return deepcopy(merged[key])

    with (
        patch.object(config_loader_impl, "create_defaults_list", reuse_list),
        patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", reuse_merged),
    ):
        yield


def has_own_files_only(repo: Any) -> bool:
    """Whether all that Hydra reads is part of kvsim and of Hydra."""
    return all(source.scheme() != "file" for source in repo.get_sources())
