"""KV cache policies of LLM servers, on real traces: in simulated time, without a clock, or against real tiers.

``load_trace``, ``replay``, ``simulate`` and ``curve`` are what the commands do, from Python.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.api import Result, curve, load_trace, replay, simulate

__all__ = ["Result", "curve", "load_trace", "replay", "simulate"]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: the command line answers without them."""
    if name == "__version__":
        from importlib.metadata import version

        return version("kvsim")
    if name not in __all__:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    from kvsim.links import check_links

    check_links()
    from kvsim import api

    return getattr(api, name)
