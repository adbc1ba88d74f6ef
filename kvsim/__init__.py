"""Test KV cache policies for LLM servers on real traces: in simulated time, without a clock, or on real hardware.

``load_trace``, ``replay``, ``simulate``, ``curve`` and ``sweep`` do from Python what the commands do; ``trace_from_tokens``
makes a trace of prompts in memory.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.api import Curve, Result, Sweep, Trace, curve, load_trace, replay, simulate, sweep, trace_from_tokens

__all__ = ["Curve", "Result", "Sweep", "Trace", "curve", "load_trace", "replay", "simulate", "sweep", "trace_from_tokens"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so the command line starts without them."""
    if name == "__version__":
        from importlib.metadata import version

        return version("kvsim")
    if name not in __all__:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    from kvsim.installation import check_links

    check_links()
    from kvsim import api

    return getattr(api, name)
