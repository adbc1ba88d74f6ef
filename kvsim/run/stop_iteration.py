"""StopIteration out of a policy of the user's own is an error, wherever the policy was asked.

The engines of a simulation are generators, as are many policies' ``victims``. Compiled generators lack PEP 479: they take any
StopIteration for their end, as SimPy does where it resumes a process. A policy's ``next(empty)`` would end them without a word.
"""

from collections.abc import Callable
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import FunctionType
from typing import Any

from kvsim.core.answers import users_classes
from kvsim.errors import UsageError

IS_GUARDED = "__stops_with_error__"


def refuse_stop_iteration(policy: object) -> None:
    """Let the methods and properties of the user's own among a policy's classes raise RuntimeError in its place.

    Raises UsageError for a method that is a coroutine: nobody would await it.
    """
    for kind in users_classes(type(policy)):
        for name, found in list(vars(kind).items()):
            if name.startswith("__"):
                continue
            if iscoroutinefunction(found) or isasyncgenfunction(found):
                raise UsageError(f"{kind.__name__}.{name} is async, and so would never run: define it without async")
            if isinstance(found, FunctionType):
                setattr(kind, name, _guarded(found))
            elif isinstance(found, property) and isinstance(found.fget, FunctionType):
                setattr(kind, name, found.getter(_guarded(found.fget)))


def _guarded(method: FunctionType) -> Callable[..., Any]:
    if isgeneratorfunction(method) or hasattr(method, IS_GUARDED):
        return method

    @wraps(method)
    def guarded(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except StopIteration as error:
            raise RuntimeError(
                f"{method.__name__} raised StopIteration: give next() a default, as in next(found, None)"
            ) from error

    setattr(guarded, IS_GUARDED, True)
    return guarded
