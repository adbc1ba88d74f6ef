"""Whether policies of the user's own have left alone what is not theirs: the trace, which other runs share, and the caches.

Nothing is checked in a run with kvsim's own policies only.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Concatenate, ParamSpec, Protocol

import numpy as np

from kvsim.core.request import Request
from kvsim.core.tree import NO_CHILDREN
from kvsim.engine.columns import of_requests
from kvsim.engine.outcome import FINISHED, Outcome
from kvsim.errors import PolicyFailed
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import named_parts, user_policies

P = ParamSpec("P")
MAY_CHANGE = "a policy may change nothing but its own"


class Recounted(Protocol):
    """What can recount itself: the caches of a simulation, the server of a replay."""

    def verify(self) -> None:
        """Raise AssertionError if something is wrong."""


class Requests:
    """The requests of a trace as they were, field by field, to compare and to restore."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._columns: dict[str, list[Any] | None] = {}
        """None where all requests have the same object: that of the first one, which ``_same`` has."""
        self._same: dict[str, Any] = {}
        for field in fields(Request):
            column = list(map(attrgetter(field.name), requests))
            first = column[0] if column else None
            is_same = all(map(is_, column, repeat(first)))
            self._columns[field.name], self._same[field.name] = None if is_same else column, first

    def restored(self) -> str:
        """Undo all changes. Returns what the first one was, in words; nothing if there was none."""
        found = ""
        for name, known in self._columns.items():
            column = [self._same[name]] * len(self._requests) if known is None else known
            if all(map(is_, map(attrgetter(name), self._requests), column)):
                continue
            for at, (request, was) in enumerate(zip(self._requests, column, strict=True)):
                now = getattr(request, name)
                if now is not was and (type(now) is not type(was) or now != was):
                    found = found or f"{name} of request {at} was {was!r} and is {now!r}"
                setattr(request, name, was)
        return found


def requests_unchanged(
    run: Callable[Concatenate[Plan, Sequence[Request], P], Outcome],
) -> Callable[Concatenate[Plan, Sequence[Request], P], Outcome]:
    """Let a function that plays requests leave them as they were; it raises PolicyFailed if a policy has changed them."""

    @wraps(run)
    def unchanged(plan: Plan, requests: Sequence[Request], /, *arguments: P.args, **settings: P.kwargs) -> Outcome:
        parts = user_policies(plan)
        if not parts:
            return run(plan, requests, *arguments, **settings)
        requests = list(requests)  # all in memory, so that a change is found, also in those of a long trace
        before = Requests(tuple(requests))
        folder = os.getcwd()
        try:
            outcome = run(plan, requests, *arguments, **settings)
        finally:
            os.chdir(folder)  # the output of this job and of later ones has a path from there
            change = before.restored()
            NO_CHILDREN.clear()  # the only thing besides requests that runs share
        if change:
            raise PolicyFailed(f"a request was changed in a run with {named_parts(parts)}: {change}; {MAY_CHANGE}")
        return outcome

    return unchanged


def recount(plan: Plan, caches: Sequence[Recounted], outcome: Outcome | None) -> None:
    """Raise PolicyFailed if something is wrong with the caches of a run that has ended, or with its outcome, if it is whole."""
    parts = user_policies(plan)
    if not parts:
        return
    try:
        for cache in caches:
            cache.verify()
        if outcome is not None:
            _check_outcome(outcome)
    except AssertionError as error:
        raise PolicyFailed(
            f"the cache was changed in a run with {named_parts(parts)}; a recount at its end finds: {error}; {MAY_CHANGE}"
        ) from error


def _check_outcome(outcome: Outcome) -> None:
    """Check what no order of events can make wrong."""
    prompts = of_requests(outcome, "prompt_pages")
    hits = outcome.hit_pages.sum(axis=1)
    for at in np.flatnonzero(hits > prompts):
        raise AssertionError(f"request {at} hit {hits[at]} of the {prompts[at]} pages of its prompt")
    for name, use in outcome.tiers.items():
        most = use.capacity_pages
        assert most is None or use.peak_pages <= most, f"{name} had {use.peak_pages} pages, of a capacity of {most}"
    if outcome.simulated_s:
        for at in np.flatnonzero((outcome.status == FINISHED) & ~(outcome.e2e_s >= 0)):
            raise AssertionError(f"request {at} took {outcome.e2e_s[at]} s")
