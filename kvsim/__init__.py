"""Test KV cache policies for LLM servers on real traces: in simulated time, without a clock, or on real hardware.

``load_trace``, ``replay``, ``simulate``, ``curve``, ``sweep``, ``leaderboard``, ``saturate``, ``plan``, ``validate`` and
``report`` do from Python what the commands do; ``trace_from_tokens`` makes a trace of prompts in memory.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.api import (
        Curve,
        Leaderboard,
        Purchase,
        Report,
        Result,
        Saturation,
        Sweep,
        Trace,
        Validation,
        curve,
        leaderboard,
        load_trace,
        plan,
        replay,
        report,
        saturate,
        simulate,
        sweep,
        trace_from_tokens,
        validate,
    )

__all__ = [
    "Curve",
    "Leaderboard",
    "Purchase",
    "Report",
    "Result",
    "Saturation",
    "Sweep",
    "Trace",
    "Validation",
    "curve",
    "leaderboard",
    "load_trace",
    "plan",
    "replay",
    "report",
    "saturate",
    "simulate",
    "sweep",
    "trace_from_tokens",
    "validate",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so the command line starts without them."""
    if name == "__version__":
        from importlib.metadata import version

        return version("kvsim")
    if name not in __all__:
        from kvsim.suggest import closest

        raise AttributeError(f"module 'kvsim' has no attribute {name!r}{closest(name, __all__)}", name=name)
    from kvsim.installation import check_links

    check_links()
    from kvsim import api

    return getattr(api, name)


class _Package(ModuleType):
    """This package, in which ``kvsim.report`` is a function also when the room of that name has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "report" and isinstance(value, ModuleType):
            value.__class__ = _Report
        super().__setattr__(name, value)


class _Report(ModuleType):
    """The room ``report``, which can be called."""

    def __call__(self, *runs: Any, output: Any = None) -> Any:
        """Put runs side by side, with their bounds: see ``kvsim.api.report``."""
        return __getattr__("report")(*runs, output=output)


sys.modules[__name__].__class__ = _Package
