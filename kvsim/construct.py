"""Turns nodes of the configuration into objects, checking each node against the class that it configures."""

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeVar, cast

import hydra.utils
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.errors import UsageError
from kvsim.plan import Config
from kvsim.suggest import closest

T = TypeVar("T")


def construct(kind: type[T], node: Any, key: str) -> T:
    """Build an object from the node at ``key``: of the class named by its ``_target_``, or of ``kind`` itself.

    The class must be a dataclass; its fields are the settings. Raises UsageError for unknown, missing or invalid settings.
    """
    if not isinstance(node, dict):
        raise UsageError(f"{key}={node}: choose one by name, {key}=NAME" if node else f"{key} is missing: set {key}=NAME")
    cls = _class(kind, node.get("_target_"), key)
    given = {name: value for name, value in node.items() if name != "_target_"}
    check_names(key, given, [field.name for field in fields(cast(Any, cls)) if field.init])
    try:
        values = _convert(cls, given, key)
        return cls(**values)
    except OmegaConfBaseException as error:
        raise UsageError(f"{join_key(key, error.full_key)}: {first_line(error)}") from error
    except ValueError as error:
        raise UsageError(with_key(key, str(error), given)) from error


def _class(kind: type[T], target: Any, key: str) -> type[T]:
    if target is None:
        return kind
    try:
        cls = hydra.utils.get_class(target)
    except Exception as error:
        raise UsageError(f"{key}._target_: {target} does not exist") from error
    if not issubclass(cls, kind):
        raise UsageError(f"{key}._target_: {target} is not a subclass of {kind.__name__}")
    return cls


def _convert(cls: type, given: Config, key: str) -> Config:
    """Convert the settings to the types of the class's fields. Cached, since the jobs of a sweep share most settings."""
    return deepcopy(_converted(cls, json.dumps(given), key))


@lru_cache(maxsize=256)
def _converted(cls: type, text: str, key: str) -> Config:
    given = json.loads(text)
    merged = OmegaConf.merge(OmegaConf.structured(cls), given)
    for name in sorted(OmegaConf.missing_keys(merged)):
        raise UsageError(f"{join_key(key, name)} is missing: set {join_key(key, name)}=...")
    return {
        str(name): OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        for name, value in merged.items()
        if name in given
    }


def check_names(key: str, node: Any, known: Iterable[str]) -> None:
    """Raise UsageError unless ``node`` is a mapping whose keys are all known."""
    if not isinstance(node, Mapping):
        raise UsageError(f"{key} must be a mapping of settings ({', '.join(known)}), not {node!r}")
    for name in node:
        if name not in known:
            hint = closest(name, known) or (f"; choose from {', '.join(sorted(known))}" if known else "; it has no settings")
            raise UsageError(f"{join_key(key, name)}: there is no such setting{hint}")


def with_key(key: str, message: str, settings: Config) -> str:
    """Prefix a class's error message with the full key of the setting that it is about."""
    about = message.split(maxsplit=1)[0] if message else ""
    return join_key(key, message) if about in settings else f"{key}: {message}"


def join_key(key: str, name: str | None) -> str:
    """The full key of a setting below ``key``."""
    return ".".join(part for part in (key, name) if part)


def first_line(error: Exception) -> str:
    """The first line of an error message."""
    return str(error).splitlines()[0]
