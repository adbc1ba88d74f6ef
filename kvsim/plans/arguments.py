"""Arguments of the Python API as overrides of the configuration, with policy objects apart from them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.errors import UsageError
from kvsim.numbers import Real, refusal
from kvsim.policies.admission.base import AdmissionPolicy
from kvsim.policies.autoscaling.base import AutoscalingPolicy
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.scheduling.base import SchedulingPolicy

FAMILIES: dict[str, type] = {
    "eviction": EvictionPolicy,
    "placement": PlacementPolicy,
    "prefetch": PrefetchPolicy,
    "checkpoint": CheckpointPolicy,
    "routing": RoutingPolicy,
    "scheduling": SchedulingPolicy,
    "autoscaling": AutoscalingPolicy,
    "admission": AdmissionPolicy,
}
"""The families of policies, with the contract of each."""
BARE = re.compile(r"\d*[A-Za-z][\w.-]*")
"""A text that needs no quotes in an override, unless it is a ``WORD`` or a number such as 1e5."""
WORDS = ("true", "false", "null", "nan", "inf")
NUMBER = re.compile(r"\d+e-?\d+", re.IGNORECASE)

Overrides = str | Mapping[str, Any]
"""An override as on the command line, or settings by their full keys."""


class Arguments(NamedTuple):
    """What a call sets: overrides, and policy objects by key (``eviction``, ``eviction@tiers.cpu.eviction``)."""

    overrides: list[str]
    objects: dict[str, Any]


def arguments_of(overrides: Iterable[Overrides], settings: Mapping[str, Any]) -> Arguments:
    """Return what positional ``overrides`` and keyword ``settings`` set; of the keywords, None means that nothing is set.

    A nested mapping is a group of settings: ``tiers={"gpu": {"capacity": "40GiB"}}``. Raises UsageError for values that are
    neither settings nor policies.
    """
    lines: list[str] = []
    objects: dict[str, Any] = {}
    given = {key: value for key, value in settings.items() if value is not None}
    for part in (*overrides, given):
        if isinstance(part, str):
            lines.append(part)
            continue
        if not isinstance(part, Mapping):
            raise UsageError(f"{part!r} is no override: give KEY=VALUE as text, or a mapping of keys to values")
        for key, value in _flat(part):
            if is_policy(value):
                objects[key] = _checked(key, value)
            else:
                lines.append(override(key, value))
    return Arguments(lines, objects)


def override(key: str, value: Any) -> str:
    """Return ``KEY=VALUE`` such that Hydra reads this value. Raises UsageError for a value of a type that no setting has."""
    try:
        return f"{key}={_written(value)}"
    except ValueError:  # an integer of thousands of digits
        raise UsageError(refusal(key, Real(), value)) from None
    except TypeError:
        text = value.__qualname__ if isinstance(value, type) else repr(value)
        hint = f"; pass an object, {text}(...)" if isinstance(value, type) else ""
        families = ", ".join(FAMILIES)
        raise UsageError(
            f"{key}={text}: not a value of a setting; objects are taken for policies only ({families}){hint}"
        ) from None


def is_policy(value: Any) -> bool:
    """Whether the value is a policy object, of any family."""
    return isinstance(value, tuple(FAMILIES.values()))


def family_of(key: str) -> str:
    """Return the family that a key chooses a policy of: ``eviction`` for ``eviction@tiers.cpu.eviction``."""
    return key.partition("@")[0]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _checked(key: str, policy: Any) -> Any:
    """Return a policy object if ``key`` takes it."""
    kind = FAMILIES.get(family_of(key))
    if kind is None or not isinstance(policy, kind):
        right = next(family for family, contract in FAMILIES.items() if isinstance(policy, contract))
        raise UsageError(f"{key}: {type(policy).__name__} is a policy of the family {right}: pass {right}={policy!r}")
    return policy


def _written(value: Any) -> str:
    """Return a value as Hydra's override grammar reads it. Raises TypeError."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _quoted(str(value))
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    raise TypeError


def _quoted(text: str) -> str:
    if BARE.fullmatch(text) and text.lower() not in WORDS and not NUMBER.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
