"""Test KV cache policies for LLM servers on real traces: in simulated time, without a clock, or on real hardware.

``load_trace``, ``replay``, ``simulate`` and ``curve`` do from Python what the commands do.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.api import Result, curve, load_trace, replay, simulate

__all__ = ["Result", "curve", "load_trace", "replay", "simulate"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so the command line starts without them."""
    if name == "__version__":
        from importlib.metadata import version

        return version("kvsim")
    if name not in __all__:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    from kvsim.links import check_links

    check_links()
    from kvsim import api

    return getattr(api, name)
