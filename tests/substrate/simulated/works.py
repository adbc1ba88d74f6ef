"""Steps that differ from others in some respects."""

from inspect import signature
from typing import Any

from kvsim.engine.substrate import Work


def altered(work: Work, **changes: Any) -> Work:
    """Return a step that is like another one, but for these changes."""
    given = {name: getattr(work, name) for name in signature(Work).parameters}
    return Work(**{**given, **changes})
