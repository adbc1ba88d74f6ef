"""From a plan to its result: load the trace, play it, describe what came out. The commands and the Python API do it here."""

import gc
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim import run
from kvsim.engine.collector import without_garbage_collector
from kvsim.engine.outcome import Outcome
from kvsim.fingerprint import bound_names, configuration_hash
from kvsim.plan import Plan
from kvsim.report.result import RunRecord, summarize, warmup_requests
from kvsim.trace.base import Trace

if TYPE_CHECKING:
    from kvsim.bounds.curves import Curve, CurveSettings

KEPT = 4
"""So many traces are kept, those used last."""

Watch = Callable[[int], AbstractContextManager[run.Advance | None]]
"""Is entered with the number of requests to be played; gives what is told now and then how many of them are done."""

_loaded: OrderedDict[str, Trace] = OrderedDict()


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What a run gives."""

    record: RunRecord
    """The content of ``result.json``."""
    outcome: Outcome
    """One row a request, in arrays."""

    @property
    def hit_rate(self) -> float:
        """Hit tokens per prompt token, all tiers together."""
        return float(self.record["hit_rate"] or 0.0)

    @property
    def page_hit_rate(self) -> float:
        """Hit pages per prompt page, all tiers together."""
        return float(self.record["page_hit_rate"] or 0.0)

    @property
    def hit_pages(self) -> np.ndarray:
        """Hit pages of each request; columns gpu, cpu, disk."""
        return self.outcome.hit_pages

    def write(self, folder: str | Path) -> None:
        """Write ``result.json``, ``requests.csv.gz`` and ``report.html``, as the commands do."""
        from kvsim.report.folder import write_run

        write_run(Path(folder), self.record, self.outcome)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A curve, and how long it took."""

    curve: "Curve"
    load_s: float
    """To load the trace."""
    wall_s: float
    """To draw the curve."""


def unwatched(requests: int) -> AbstractContextManager[None]:
    """For runs of which nobody wants to know how far they are."""
    return nullcontext()


def execute(
    command: str,
    plan: Plan,
    trace: Trace | None = None,
    *,
    watch: Watch = unwatched,
    inspect: Callable[[Any], None] | None = None,
    command_line: str | None = None,
    is_named: bool = True,
) -> Result:
    """Run ``replay`` or ``simulate`` on the plan's trace, which is loaded unless it is given.

    ``inspect`` is shown the cache of a replay, as ``run.replay`` says. ``is_named`` says that the configuration tells all: no
    policy was passed as an object. Raises UsageError. Nothing is written, and what a run on hardware found wrong is for the
    caller to look at (``run.check_verified``).
    """
    with without_garbage_collector():
        trace, load_s = (trace, 0.0) if trace else load_trace(plan)
        requests = trace.requests
        run.check_capacity(plan, requests)
        warmup_requests(plan.warmup, len(requests))
        with watch(len(requests)) as advance:
            if command == "replay":
                outcome = run.replay(plan, requests, advance, inspect)
            else:
                outcome = run.simulate(plan, requests, advance)
    record = summarize(
        outcome,
        command=command,
        config=plan.config,
        seed=plan.seed,
        warmup=plan.warmup,
        load_s=load_s,
        command_line=command_line,
        config_hash=configuration_hash(plan, command) if is_named else None,
        bounds=bound_names(plan, requests) if is_named else None,
        page_bytes=plan.model.page_bytes(plan.page_tokens),
    )
    return Result(record=record, outcome=outcome)


def draw(plan: Plan, settings: "CurveSettings", trace: Trace | None = None, *, watch: Watch = unwatched) -> Drawn:
    """Draw the curves of the plan's trace, which is loaded unless it is given. Raises UsageError."""
    from kvsim.bounds.curves import Curves

    curves = Curves(plan, settings)
    trace, load_s = (trace, 0.0) if trace else load_trace(plan)
    began = perf_counter()
    curves.load(trace.requests)
    with watch(curves.replayed_requests) as advance:
        curve = curves.draw(advance)
    return Drawn(curve=curve, load_s=load_s, wall_s=perf_counter() - began)


def load_trace(plan: Plan) -> tuple[Trace, float]:
    """The trace of a plan, and the seconds it took to read it. Raises TraceError and UsageError, as reading it does.

    A process keeps some: the jobs of a sweep share them. What is loaded by then stays out of the garbage collector's sight: it
    would look through the whole trace now and then.
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
