"""From a plan to its result: load the trace, run it, summarize the outcome; and to the folder in which that is kept.

Used by the commands, sweeps and the Python API.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.core.request import Request
from kvsim.engine.collector import freeze, without_garbage_collector
from kvsim.engine.outcome import Outcome
from kvsim.errors import UsageError
from kvsim.files.locking import Lock
from kvsim.plans.gpu_memory import GpuMemory
from kvsim.plans.plan import Plan
from kvsim.plans.policy_errors import policies_named
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.report.folder import request_lines, write_run
from kvsim.results.frame import frame, request_columns
from kvsim.results.result import RunRecord, summarize, warmup_requests
from kvsim.run import play
from kvsim.run.fingerprint import bound_names, configuration_hash
from kvsim.run.run_result import RunResult
from kvsim.run.sampling import Sampled, replay_sample
from kvsim.run.upper_bounds import Bound, bounds_of
from kvsim.settings.unused_settings import ALLREDUCE
from kvsim.trace.base import Trace
from kvsim.trace.formats import load_source
from kvsim.trace.spreading import shared_times

if TYPE_CHECKING:
    from kvsim.run.curves import Curve, CurveSettings

MOST_REQUESTS = 200_000
"""Requests up to which the bounds of a run alone are computed for its page: a second or two, mostly far less than the run."""
KEPT = 4
"""Number of loaded traces kept in memory; the least recently used one is dropped first."""

Watch = Callable[[int], AbstractContextManager[play.Advance | None]]
"""Takes the number of requests to run. Entering the result gives a callback that takes the number of finished ones."""

_loaded: OrderedDict[str, Trace] = OrderedDict()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Result(RunResult):
    """The result of a run in this process."""

    record: RunRecord
    """The content of ``result.json``."""
    outcome: Outcome
    """Arrays with one row per request."""

    @cached_property
    def requests(self) -> Any:
        return frame(request_columns(request_lines(self.outcome), self.outcome.tier_names))

    @property
    def hit_pages(self) -> np.ndarray:
        """Hit pages of each request; columns gpu, cpu, disk."""
        return self.outcome.hit_pages

    def write(self, folder: str | Path) -> None:
        """Write ``result.json``, ``requests.csv.gz`` and ``report.html``, as the commands do, without the bounds on the page."""
        write_run(Path(folder), self.record, self.outcome)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A curve and the time it took."""

    curve: "Curve"
    load_s: float
    """Seconds to load the trace."""
    wall_s: float
    """Seconds to compute the curve."""
    trace_note: str
    """What part of the trace is synthetic."""


def unwatched(requests: int) -> AbstractContextManager[None]:
    """A ``Watch`` that reports no progress."""
    return nullcontext()


def check_classes(plan: Plan, requests: Sequence[Request]) -> None:
    """Raise UsageError for objectives of classes that the trace does not have."""
    try:
        plan.slo.check(requests)
    except ValueError as error:
        raise UsageError(f"slo.{error}") from error


def execute(
    command: str,
    plan: Plan,
    trace: Trace | None = None,
    *,
    watch: Watch = unwatched,
    inspect: Callable[[Any, str], None] | None = None,
    command_line: str | None = None,
    is_named: bool = True,
) -> Result:
    """Run ``replay`` or ``simulate`` on ``trace``; without one, load the plan's trace.

    ``inspect`` is called with the cache of a replay (see ``play.replay``). ``is_named`` is False if a policy was passed as an
    object, so that the configuration does not describe the run completely. Writes no files. Raises UsageError. The caller must
    check whether a run on hardware found wrong pages (``play.check_verified``).
    """
    sampled: Sampled | None = None
    with without_garbage_collector():
        trace, load_s = (trace, 0.0) if trace else load_trace(plan)
        requests = trace.requests
        plan = play.with_known_answers(plan, requests)
        play.check_capacity(plan, requests)
        check_classes(plan, requests)
        warmup_requests(plan.warmup, len(requests))
        with watch(len(requests)) as advance:
            if plan.sampling is not None:
                sampled = replay_sample(plan, requests, advance)
                outcome = sampled.outcome
            elif command == "replay":
                outcome = play.replay(plan, requests, advance, inspect)
            else:
                outcome = play.simulate(plan, requests, advance)
    record = summarize(
        outcome,
        command=command,
        config=plan.config,
        choices=plan.choices,
        seed=plan.seed,
        warmup=plan.warmup,
        load_s=load_s,
        command_line=command_line,
        config_hash=configuration_hash(plan, command) if is_named else None,
        bounds=bound_names(plan, requests) if is_named and sampled is None else None,
        page_bytes=plan.page_bytes,
        rules_note=plan.rules_note or None,
        trace_note=trace.note or None,
        run_warnings=[
            *time_warnings(command, requests),
            *communication_warnings(command, plan),
            *(sampled.warnings if sampled else ()),
        ],
        slo=plan.slo,
        model_note=plan.model_note or None,
        gpu_memory=None if plan.gpu_memory is None else memory_record(plan.gpu_memory),
        estimated=sampled.fields if sampled else None,
    )
    return Result(record=record, outcome=outcome)


def memory_record(memory: GpuMemory) -> dict[str, Any]:
    """Return how the memory of an engine's GPUs is divided, for the record; stages and adapters only if there are any."""
    known = asdict(memory) | {"kv_bytes": memory.kv_bytes}
    return {name: value for name, value in known.items() if name not in ("stages", "adapters_bytes") or value}


def time_warnings(command: str, requests: Sequence[Request]) -> list[str]:
    """Return what to know of the arrivals of a run with a clock."""
    shared = shared_times(requests) if command == "simulate" else None
    return [] if shared is None else [shared.warning()]


def communication_warnings(command: str, plan: Plan) -> list[str]:
    """Say whether tensor-parallel GPUs communicate in no time, since the rate of their all-reduces is not known."""
    is_computed = command == "simulate" and ALLREDUCE[0] not in SUBSTRATES[plan.substrate].without_effect
    if not is_computed or plan.hardware.stage_gpus == 1 or plan.hardware.communicates:
        return []
    return [f"communication of the GPUs takes no time with this description: {ALLREDUCE[0]} is null"]


@contextmanager
def own_folder(plan: Plan, command: str, group: str | None = None) -> Iterator[None]:
    """Lock the folder of a run during the block. A run that fails in it is logged as failed, in the ``group`` of its sweep."""
    try:
        with Lock(plan.output):
            yield
    except Exception as error:
        plan.logger.log_failure(plan.output, plan.begun(command), failure_message(error), group)
        raise


def failure_message(error: Exception) -> str:
    """Return in one line what is recorded of an error."""
    return " ".join((str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}").split())


def record_run(
    command: str,
    plan: Plan,
    trace: Trace | None = None,
    *,
    group: str | None = None,
    shared_script: str | None = None,
    show: Callable[[Result, list[str]], None] = lambda result, files: None,
    **how: Any,
) -> Result:
    """Execute a plan, write its folder, log it, ``show`` the result and the names of its files, and verify it.

    ``group`` is the name of the sweep that the run belongs to, ``shared_script`` as in ``write_run``, and the rest as in
    ``execute``. Raises UsageError, and WrongResult for a run on hardware that reused wrong pages.
    """
    result = execute(command, plan, trace, **how)
    bounds = page_bounds(plan, result.record, trace, None if group is None else plan.output.parent / "bounds")
    files = write_run(plan.output, result.record, result.outcome, shared_script=shared_script, bounds=bounds)
    plan.logger.log(plan.output, result.record, group)
    show(result, files)
    play.check_verified(result.outcome.hardware)
    return result


def page_bounds(plan: Plan, record: RunRecord, trace: Trace | None, folder: Path | None = None) -> dict[str, Bound]:
    """Return the bounds that the page of a run shows, by kind: none where none hold, or for a run alone of very many requests.

    ``folder`` is the one for the bounds of a sweep, which shows them for any number of requests.
    """
    names = record.get("bounds") or {}
    if not names or folder is None and record["requests"] + record["warmup_requests"] > MOST_REQUESTS:
        return {}
    return bounds_of(plan, names, (trace or load_trace(plan)[0]).requests, folder)


def draw(plan: Plan, settings: "CurveSettings", trace: Trace | None = None, *, watch: Watch = unwatched) -> Drawn:
    """Compute the curves of ``trace``; without one, load the plan's trace. Raises UsageError."""
    from kvsim.run.curves import Curves

    curves = Curves(plan, settings)
    trace, load_s = (trace, 0.0) if trace else load_trace(plan)
    began = perf_counter()
    curves.load(trace.requests)
    with watch(curves.replayed_requests) as advance:
        curve = curves.draw(advance)
    return Drawn(curve=curve, load_s=load_s, wall_s=perf_counter() - began, trace_note=trace.note)


@policies_named
def load_trace(plan: Plan) -> tuple[Trace, float]:
    """Return a plan's trace and the seconds it took to load. Raises TraceError and UsageError, as the trace's ``load`` does.

    The process keeps the last few traces, so the jobs of a sweep share them. All objects alive after loading are frozen, so the
    garbage collector does not scan the whole trace again and again.
    """
    began = perf_counter()
    if plan.trace.IN_MEMORY:
        return load_source(plan.trace, plan.page_tokens), perf_counter() - began
    key = json.dumps([plan.config["trace"], plan.page_tokens, _file_state(plan)], sort_keys=True)
    if key not in _loaded:
        _loaded[key] = load_source(plan.trace, plan.page_tokens)
        freeze()
    _loaded.move_to_end(key)
    while len(_loaded) > KEPT:
        _loaded.popitem(last=False)
    return _loaded[key], perf_counter() - began


def _file_state(plan: Plan) -> list[tuple[str, int, int]]:
    """Path, modification time and size of each of the trace's files, which change when the file does."""
    states = [(os.path.abspath(path), os.stat(path)) for path in plan.trace.files() if os.path.isfile(path)]
    return [(path, state.st_mtime_ns, state.st_size) for path, state in states]
