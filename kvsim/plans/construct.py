"""Turns nodes of the configuration into objects, checking each node against the class that it configures."""

import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import hydra.utils
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.errors import PolicyFailed, UsageError, first_line
from kvsim.numbers import check_finite
from kvsim.plans.plan import Config
from kvsim.plans.policy_errors import described, is_kvsims, line_of_import
from kvsim.plans.units import with_numbers
from kvsim.settings.sources import shadowed
from kvsim.suggest import closest, hint

logging.getLogger("hydra.utils").addHandler(logging.NullHandler())  # it prints the errors that it raises
T = TypeVar("T")
RENAMED = {
    "kvsim.huggingface.HuggingFaceModel": "kvsim.model.huggingface.HuggingFaceModel",
    "kvsim.report.logger.Logger": "kvsim.results.logger.Logger",
    "kvsim.report.wandb_logger.WandbLogger": "kvsim.report.wandb.logger.WandbLogger",
}
"""Classes that settings files name and that have moved, by their former names."""


def construct(kind: type[T], node: Any, key: str) -> T:
    """Build an object from the node at ``key``: of the class named by its ``_target_``, or of ``kind`` itself.

    The class must be a dataclass; its fields are the settings, and quantities among them may have a unit. Raises UsageError for
    unknown, missing or invalid settings.
    """
    if not isinstance(node, dict):
        choice = f"{key.rpartition('.')[2]}@{key}=NAME" if key.startswith("tiers.") else f"{key}=NAME"
        raise UsageError(f"{key}={node}: choose one by name, {choice}" if node else f"{key} is missing: set {choice}")
    node = with_numbers(node, key)
    cls = class_of(kind, node, key)
    given = {name: value for name, value in node.items() if name != "_target_"}
    check_names(key, given, [field.name for field in fields(cast(Any, cls)) if field.init])
    try:
        values = _convert(cls, given, key)
        return cls(**values)
    except OmegaConfBaseException as error:
        raise UsageError(f"{join_key(key, error.full_key)}: {first_line(error)}") from error
    except ValueError as error:
        raise UsageError(with_key(key, str(error), given)) from error
    except (Exception, SystemExit) as error:
        if is_kvsims(cls.__module__):
            raise
        raise PolicyFailed(f"{key}: {cls.__name__} cannot be built{_where(error)}: {described(error)}") from error


def refuse_infinite(key: str, node: Any) -> None:
    """Raise UsageError for a number that is not finite, in the node at ``key`` or below it."""
    try:
        check_finite(key, node)
    except ValueError as error:
        raise UsageError(str(error)) from error


def class_of(kind: type[T], node: Config, key: str) -> type[T]:
    """The class that a node names, ``kind`` if it names none. Raises UsageError unless it can be built."""
    target, remedy = node.get("_target_"), f"choose by name, {key}=NAME, or set it to a subclass of {kind.__name__}"
    if "_target_" not in node:
        cls: type = kind
    else:
        try:
            cls = hydra.utils.get_class(RENAMED.get(str(target), str(target)))
        except ValueError as error:
            raise UsageError(f"{key}._target_: {target} is not a class; {remedy}") from error
        except (Exception, SystemExit) as error:
            problem = f"{target} {_problem(error, str(target), remedy)}" if target else f"names no class; {remedy}"
            raise UsageError(f"{key}._target_: {problem}") from error
        if not issubclass(cls, kind):
            raise UsageError(f"{key}._target_: {target} is not a subclass of {kind.__name__}")
    has_settings = is_dataclass(cls)
    if inspect.isabstract(cls) or not has_settings:
        what = "abstract" if inspect.isabstract(cls) else "not a dataclass, so it has no settings"
        problem = f"{target} is {what}" if target else "is missing"
        raise UsageError(f"{key}._target_: {problem}; {remedy}")
    return cls


def _problem(error: BaseException, target: str, remedy: str) -> str:
    """Say why a class could not be found: it does not exist, which has a remedy, or its module fails when it is imported."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and not f"{target}.".startswith(f"{error.name}."):
        return f"needs the module {error.name}, which is not installed"
    if other := shadowed(target):
        return f"does not exist: {target.partition('.')[0]} is {other}; rename your module"
    where = _where(error)
    if not where and isinstance(error, (ImportError, AttributeError, ValueError, TypeError)):
        return f"does not exist; {remedy}"
    return f"cannot be imported{where}: {described(error)}"


def _where(error: BaseException) -> str:
    """Say at which line of the user's an error was raised, if at one."""
    line = line_of_import(error)
    return f", at {line}" if line else ""


def _convert(cls: type, given: Config, key: str) -> Config:
    """Convert the settings to the types of the class's fields. Cached, since the jobs of a sweep share most settings."""
    try:
        return deepcopy(_converted(cls, json.dumps(given), key))
    except OverflowError:  # an integer that no float can hold
        refuse_infinite(key, given)
        raise


@lru_cache(maxsize=256)
def _converted(cls: type, text: str, key: str) -> Config:
    given = json.loads(text)
    _check_shapes(cls, given, key)
    merged = OmegaConf.merge(OmegaConf.structured(cls), given)
    for name in sorted(OmegaConf.missing_keys(merged)):
        raise UsageError(f"{join_key(key, name)} is missing: set {join_key(key, name)}=...")
    return {
        str(name): OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        for name, value in merged.items()
        if name in given
    }


def _check_shapes(cls: type, given: Config, key: str) -> None:
    """Raise UsageError for what is no list, or no mapping, where the class has one."""
    types = get_type_hints(cls)
    for name, value in given.items():
        if value is not None and name in types:
            _check_shape(types[name], value, join_key(key, name))


def _check_shape(kind: Any, value: Any, key: str) -> None:
    """Raise UsageError for a value of another shape. A compiled class knows a list or a mapping, but not of what."""
    if get_origin(kind) in (Union, UnionType):
        kind = next((one for one in get_args(kind) if one is not type(None)), kind)
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise UsageError(f"{key} must be a mapping of settings, {{name: value, ...}}, not {value!r}")
        _check_shapes(cast(type, kind), value, key)
    elif dict in (kind, get_origin(kind)) and not isinstance(value, dict):
        raise UsageError(f"{key} must be a mapping, {{name: value, ...}}, not {value!r}")
    elif list in (kind, get_origin(kind)):
        if not isinstance(value, list):
            raise UsageError(f"{key} must be a list, [...], not {value!r}")
        for at, item in enumerate(value):
            _check_shape(next(iter(get_args(kind)), Any), item, f"{key}[{at}]")


def check_names(key: str, node: Any, known: Iterable[str]) -> None:
    """Raise UsageError unless ``node`` is a mapping whose keys are all known."""
    if not isinstance(node, Mapping):
        raise UsageError(f"{key} must be a mapping of settings ({', '.join(known)}), not {node!r}")
    for name in node:
        if name not in known:
            name = str(name)
            hint = closest(name, known) or (f"; choose from {', '.join(sorted(known))}" if known else "; it has no settings")
            raise UsageError(f"{join_key(key, name)}: there is no such setting{hint}")


def with_key(key: str, message: str, settings: Config) -> str:
    """Prefix a class's error message with the full key of the setting that it is about, and suggest one of the choices in it."""
    message = f"{message}{hint(message)}"
    about = cast(re.Match[str], re.match(r"\w*", message))[0]
    if about in settings:
        return join_key(key, message)
    below = [name for name, section in settings.items() if isinstance(section, dict) and about in section]
    return join_key(join_key(key, below[0]), message) if len(below) == 1 else f"{key}: {message}"


def join_key(key: str, name: str | None) -> str:
    """The full key of a setting below ``key``."""
    return ".".join(part for part in (key, name) if part)
