"""The Python API: load a trace, run it, read the result. Configuration, checks and results are those of the commands."""

from kvsim.api.runs import curve, load_trace, replay, simulate, sweep
from kvsim.api.searches import leaderboard, plan, report, saturate, validate
from kvsim.run.curves import Curve
from kvsim.run.execute import Result
from kvsim.sweeps.reporting import Report
from kvsim.sweeps.search_results import Leaderboard, Purchase, Saturation, Validation
from kvsim.sweeps.sweep_result import Sweep
from kvsim.trace.base import Trace
from kvsim.trace.memory import trace_from_tokens

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
