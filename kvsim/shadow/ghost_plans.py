"""Ghosts as the user writes them: named overrides of the engine's own configuration."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.errors import UsageError
from kvsim.plans.build import SHADOW, build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import compose_with_choices
from kvsim.settings.unused_settings import given, keys_of

FIRST = "as_configured"
"""The name of the first ghost, which has the engine's own settings."""
TIMES = re.compile(r"tiers\.(\w+)\.capacity=([0-9]{1,6}(?:\.[0-9]{1,6})?)x")
"""A capacity as a multiple of the engine's own."""
EXAMPLE = 'for example \'shadow.ghosts={cpu_2x: "tiers.cpu.capacity=2x", arc: "eviction=arc"}\''


def ghost_plans(base: Plan, overrides: Sequence[str], node: Any) -> dict[str, Plan]:
    """Return the plans of the ghosts by name; the first one is ``base``, which ``overrides`` describe.

    ``node`` is the setting ``shadow.ghosts``: texts of overrides by name, or None for twice each tier of limited size.
    Raises UsageError.
    """
    wanted = defaults(base) if node is None else node
    if not isinstance(wanted, Mapping):
        raise UsageError(f"shadow.ghosts must be overrides by name, {EXAMPLE}, not {wanted!r}")
    plans = {FIRST: base}
    for name, text in wanted.items():
        if str(name) in plans:
            raise UsageError(f"shadow.ghosts: {name} is the name of the engine's own settings: choose another name")
        plans[str(name)] = _plan(base, overrides, str(name), _words(str(name), text))
    return plans


def defaults(base: Plan) -> dict[str, str]:
    """Return the ghosts of a command that names none."""
    return {f"{tier.name}_2x": f"tiers.{tier.name}.capacity=2x" for tier in base.tiers if tier.capacity_pages}


def _words(name: str, text: Any) -> list[str]:
    """Return a ghost's overrides, one by one."""
    try:
        words = shlex.split(text) if isinstance(text, str) else text
    except ValueError as error:
        raise UsageError(f"shadow.ghosts.{name}: {text!r}: {error}") from None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and "=" in word for word in words):
        raise UsageError(f"shadow.ghosts.{name} must be overrides, KEY=VALUE, {EXAMPLE}, not {text!r}")
    if key := given(keys_of(words), "shadow"):
        raise UsageError(f"shadow.ghosts.{name}: {key} is a setting of all ghosts together: leave it out")
    return words


def _plan(base: Plan, overrides: Sequence[str], name: str, words: Sequence[str]) -> Plan:
    """Return a ghost's plan. Raises UsageError, with its name."""
    own = keys_of(words)
    kept = [word for word in overrides if not any(given(keys_of([word]), key) for key in (*own, "shadow"))]
    try:
        all_words = [*kept, *(_multiplied(base, word) for word in words)]
        config, choices = compose_with_choices(all_words)
        return build_run(config, command=SHADOW, overrides=all_words, choices=choices)
    except UsageError as error:
        raise UsageError(f"shadow.ghosts.{name}: {error}") from error


def _multiplied(base: Plan, word: str) -> str:
    """Return an override with a capacity that is a multiple of the engine's own in tokens."""
    found = TIMES.fullmatch(word)
    if found is None:
        return word
    name, factor = found.groups()
    capacity = next((tier.capacity_pages for tier in base.tiers if tier.name == name), 0)
    if not capacity:
        what = "is unlimited" if capacity is None else "does not exist"
        raise UsageError(f"{word}: the engine's tier {name} {what}: give a size, such as 64GiB")
    pages = int(float(factor) * capacity)
    if not pages:
        raise UsageError(f"{word}: that is less than one page: choose a larger factor")
    return f"tiers.{name}.capacity={pages * base.page_tokens}tokens"
