"""Traces that a process has loaded: the jobs of a sweep share them."""

import gc
import json
import os
from collections import OrderedDict
from time import perf_counter

from kvsim.build import Plan
from kvsim.trace.base import Trace

KEPT = 4
"""So many traces are kept, those used last."""

_loaded: OrderedDict[str, Trace] = OrderedDict()


def load_trace(plan: Plan) -> tuple[Trace, float]:
    """The trace of a plan, and the seconds it took to read it. Raises TraceError and UsageError, as reading it does.

    What is loaded by then stays out of the garbage collector's sight: it would look through the whole trace now and then.
    """
    began = perf_counter()
    key = json.dumps([plan.config["trace"], plan.page_tokens, _file_state(plan)], sort_keys=True)
    if key not in _loaded:
        _loaded[key] = plan.trace.load(plan.page_tokens)
        gc.freeze()
    _loaded.move_to_end(key)
    while len(_loaded) > KEPT:
        _loaded.popitem(last=False)
    return _loaded[key], perf_counter() - began


def _file_state(plan: Plan) -> tuple[str, int, int] | None:
    """What changes when the trace's file does."""
    path = getattr(plan.trace, "path", None)
    if path is None or not os.path.isfile(path):
        return None
    state = os.stat(path)
    return os.path.abspath(path), state.st_mtime_ns, state.st_size
