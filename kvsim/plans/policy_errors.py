"""Whose error it is: names the user's policy, and its line, that raised an error."""

import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from kvsim.core.answers import PolicyError, users_classes
from kvsim.core.serving import RulesError
from kvsim.errors import APPENDIX, PolicyFailed, UsageError
from kvsim.plans.plan import Plan
from kvsim.settings.sources import shown

P = ParamSpec("P")
R = TypeVar("R")


class UserPart(NamedTuple):
    """A part of a run whose class, or a base of it, is not kvsim's."""

    what: str
    """Such as ``eviction policy of the gpu tier, Mine,``."""
    names: tuple[str, ...]
    """The names of the class and its bases."""
    files: tuple[str, ...]
    """Where those that are not kvsim's are written."""


class Line(NamedTuple):
    """A line of the user's that was being run."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{shown(Path(self.file))}:{self.number}, in {self.function}"


def policies_named(run: Callable[Concatenate[Plan, P], R]) -> Callable[Concatenate[Plan, P], R]:
    """Let a function that plays a plan raise UsageError if a policy broke its contract, PolicyFailed if the user's own failed.

    A run that an engine's rules cannot play is a UsageError, too. An interrupt says which line of the user's it found running.
    """

    @wraps(run)
    def named(plan: Plan, /, *arguments: P.args, **settings: P.kwargs) -> R:
        try:
            return run(plan, *arguments, **settings)
        except (UsageError, PolicyError, RulesError) as error:
            if failed := blamed(error, user_policies(plan)):
                raise failed from error
            if isinstance(error, UsageError):
                raise
            raise UsageError(str(error)) from error
        except (Exception, SystemExit, GeneratorExit) as error:
            if failed := failure(error, user_parts(plan)):
                raise failed from error
            raise
        except KeyboardInterrupt as interrupt:
            line = last_line(interrupt, [file for part in user_parts(plan) for file in part.files])
            raise type(interrupt)(*([f" at {line}"] if line else [])) from interrupt

    return named


def user_parts(plan: Plan) -> list[UserPart]:
    """Return the parts of a plan that are not kvsim's."""
    return [*user_policies(plan), *_users([(name, getattr(plan, name)) for name in ("trace", "rules")])]


def user_policies(plan: Plan) -> list[UserPart]:
    """Return the policies of a plan that are not kvsim's: classes of other modules, or derived from such."""
    found: list[tuple[str, object]] = [(f"eviction policy of the {tier.name} tier", tier.eviction) for tier in plan.tiers]
    found += [(f"placement policy of the {tier.name} tier", tier.placement) for tier in plan.tiers]
    policies = ("prefetch", "checkpoint", "routing", "scheduling", "autoscaling", "admission", "decode_routing")
    found += [(f"{name.replace('_', ' ')} policy", getattr(plan, name)) for name in policies]
    return _users(found)


def named_parts(parts: Sequence[UserPart]) -> str:
    """Name the classes of some parts, and their modules."""
    return " and ".join(dict.fromkeys(f"{part.names[0]} of {shown(Path(part.files[0]))}" for part in parts))


def _users(parts: list[tuple[str, object]]) -> list[UserPart]:
    return [user_part for what, part in parts if (user_part := _user_part(what, type(part))).files]


def _user_part(what: str, kind: type) -> UserPart:
    files = {getattr(sys.modules.get(one.__module__), "__file__", None) for one in users_classes(kind)}
    names = tuple(base.__name__ for base in kind.__mro__[:-1] if base.__module__ not in ("abc", "typing"))
    return UserPart(
        f"{what}, {kind.__name__}," if " of " in what else f"{what} {kind.__name__}", names, tuple(sorted(filter(None, files)))
    )


def is_kvsims(module: str) -> bool:
    """Whether a module is a part of kvsim."""
    return module.partition(".")[0] == "kvsim"


def failure(error: BaseException, parts: list[UserPart]) -> PolicyFailed | None:
    """Return the error to raise for one in a run with parts of the user's own; None without such parts.

    It names the part whose code raised the error, else the one that its message is about. If there is neither, kvsim itself has
    failed, perhaps because a part has changed what belongs to the cache; the exit code is then that of a bug.
    """
    for part in parts:
        if line := last_line(error, part.files):
            return PolicyFailed(f"the {part.what} failed at {line}: {described(error)}")
    for part in parts:
        if any(re.search(rf"\b{re.escape(name)}\b", str(error)) for name in part.names):
            return PolicyFailed(f"the {part.what} breaks its contract ({shown(Path(part.files[0]))}): {described(error)}")
    if not parts:
        return None
    failed = PolicyFailed(
        f"kvsim failed in a run with {named_parts(parts)}, which may change nothing but its own: {described(error)}"
    )
    failed.exit_code = 1
    return failed


def blamed(error: Exception, parts: list[UserPart]) -> PolicyFailed | None:
    """Return the error to raise in place of one of kvsim's own kinds, if policies of the user's own are to blame for it.

    They have raised it themselves, or a policy of kvsim's is said to break its contract, which it does only if a policy of the
    user's has changed what belongs to the cache.
    """
    for part in parts:
        if line := line_that_raised(error, part.files):
            return PolicyFailed(f"the {part.what} failed at {line}: {described(error)}")
    if not parts or not isinstance(error, PolicyError) or any(part.names[0] in str(error) for part in parts):
        return None
    return PolicyFailed(f"kvsim failed in a run with {named_parts(parts)}, which may change nothing but its own: {error}")


def line_that_raised(error: BaseException, files: Collection[str]) -> Line | None:
    """Return the line that raised an error if it is in these files; SimPy raises a copy, whose cause is the error."""
    while type(error.__cause__) is type(error):
        error = error.__cause__
    frames = list(walk_tb(error.__traceback__))
    return _line(*frames[-1]) if frames and frames[-1][0].f_code.co_filename in files else None


def described(error: BaseException) -> str:
    """Return the kind of an error and its message, if it has one."""
    message = APPENDIX.sub("", str(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def last_line(error: BaseException, files: Collection[str]) -> Line | None:
    """Return the last line in these files that was run when an error, or what caused it, was raised."""
    found: Line | None = None
    cause: BaseException | None = error
    while cause is not None:
        for frame, number in walk_tb(cause.__traceback__):
            if frame.f_code.co_filename in files:
                found = _line(frame, number)
        cause = cause.__cause__
    return found


def line_of_import(error: BaseException) -> Line | None:
    """Return the line at which the import of a module failed: the last line outside the import machinery."""
    found = None
    for frame, number in walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith("<") and not is_of_loading(frame):
            found = _line(frame, number)
    return found


def is_of_loading(frame: FrameType) -> bool:
    """Whether a frame belongs to what imports modules for kvsim."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("kvsim", "hydra", "omegaconf") or package in sys.stdlib_module_names


def _line(frame: FrameType, number: int) -> Line:
    return Line(frame.f_code.co_filename, number, frame.f_code.co_qualname)
