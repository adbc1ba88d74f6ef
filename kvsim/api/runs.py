"""Load a trace and run it: once, over a grid, or at every capacity."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, cast

from kvsim.api.given import folder_for, listed, loaded
from kvsim.engine.collector import without_garbage_collector
from kvsim.errors import UsageError
from kvsim.files.locking import Lock
from kvsim.numbers import Whole, refusal
from kvsim.plans.arguments import Arguments, Overrides, arguments_of, override
from kvsim.plans.build import build_trace
from kvsim.plans.construct import construct
from kvsim.plans.from_python import is_described, plan_for
from kvsim.policies.admission.base import AdmissionPolicy
from kvsim.policies.autoscaling.base import AutoscalingPolicy
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.results.progress import progress
from kvsim.results.runs import read_runs
from kvsim.run import play
from kvsim.run.curves import Curve, CurveSettings
from kvsim.run.execute import Result, draw, execute, own_folder, record_run
from kvsim.settings.bare_file import is_path
from kvsim.settings.configuration import compose
from kvsim.sweeps.from_python import SweepPlan, refuse_without_guard, run_sweep, values_of
from kvsim.sweeps.live import LivePage
from kvsim.sweeps.sweep_result import Sweep
from kvsim.trace.base import Trace
from kvsim.trace.formats import load_source
from kvsim.trace.memory import loaded_from

NO_FOLDER = "logger: only runs with an output folder are logged: set output='DIR'"
SWEPT = ("replay", "simulate")
"""Commands that a sweep runs."""


def load_trace(name: str | Path | None = None, *, page_tokens: int = 16, **settings: Any) -> Trace:
    """Read a trace: a file, or a choice of the config group ``trace`` (mooncake, weka, tokens, synthetic, ...) with its settings.

    ``load_trace("conversation.jsonl")``, or ``path="conversation.jsonl"``, recognises the format of the file. Without a name and
    a path, the trace is ``synthetic``. Raises UsageError, or TraceError for a file that cannot be used.
    """
    if name is not None and (isinstance(name, Path) or is_path(name)):
        if "path" in settings:
            raise UsageError(f"load_trace: {name} and path={settings['path']} are two traces: leave one out")
        name, settings = None, settings | {"path": name}
    name = name or ("auto" if "path" in settings else "synthetic")
    origin = (f"trace={name}", *(override(f"trace.{key}", value) for key, value in settings.items()))
    source, pages = build_trace(compose([*origin, f"page_tokens={page_tokens}"]))
    with without_garbage_collector():
        return loaded_from(load_source(source, pages), *origin)


def replay(
    trace: Trace | str | Path,
    *overrides: Overrides,
    eviction: EvictionPolicy | str | None = None,
    placement: PlacementPolicy | str | None = None,
    prefetch: PrefetchPolicy | str | None = None,
    checkpoint: CheckpointPolicy | str | None = None,
    advance: Callable[[int], None] | None = None,
    **settings: Any,
) -> Result:
    """Replay a trace without a clock: ``kvsim replay``.

    ``trace`` may be a file, too, or a choice of the group ``trace`` such as ``"synthetic"``; then ``page_tokens`` and settings of
    the trace, such as ``"trace.limit=1000"``, are given here.

    ``overrides`` are those of the command line, such as ``"tiers.gpu.capacity=6000pages"``, or mappings such as
    ``{"tiers.gpu.capacity": "6000pages"}``. Keyword ``settings`` are the same: ``model="qwen3_32b", seed=1``, or nested,
    ``tiers={"gpu": {"capacity": "6000pages"}}``.

    A policy is given by its name, or as an object; each tier without a policy of its own for that family gets a copy of the
    object. ``advance`` is called now and then with the number of finished requests. With ``output="DIR"``, the run's folder is
    written, and ``logger="wandb"`` logs it. Raises UsageError.
    """
    policies = {"eviction": eviction, "placement": placement, "prefetch": prefetch, "checkpoint": checkpoint}
    return _run("replay", trace, arguments_of(overrides, policies | settings), advance)


def simulate(
    trace: Trace | str | Path,
    *overrides: Overrides,
    eviction: EvictionPolicy | str | None = None,
    placement: PlacementPolicy | str | None = None,
    prefetch: PrefetchPolicy | str | None = None,
    checkpoint: CheckpointPolicy | str | None = None,
    routing: RoutingPolicy | str | None = None,
    scheduling: SchedulingPolicy | str | None = None,
    autoscaling: AutoscalingPolicy | str | None = None,
    admission: AdmissionPolicy | str | None = None,
    advance: Callable[[int], None] | None = None,
    **settings: Any,
) -> Result:
    """Serve a trace in simulated time: ``kvsim simulate``. Arguments are as for ``replay``; ``scheduling`` orders the queue,
    ``routing`` chooses the engine of a cluster that gets a request, ``autoscaling`` says how many engines serve, and
    ``admission`` which requests are served at all.

    ``substrate="hardware"`` serves it on this machine instead; raises WrongResult if a reused page held wrong data.
    """
    per_tier = {"eviction": eviction, "placement": placement}
    run_wide = {
        "prefetch": prefetch, "checkpoint": checkpoint, "routing": routing, "scheduling": scheduling, "autoscaling": autoscaling,
        "admission": admission,
    }  # fmt: skip
    return _run("simulate", trace, arguments_of(overrides, {**per_tier, **run_wide, **settings}), advance)


def sweep(
    trace: Trace | str | Path,
    settings: Mapping[str, Any],
    *overrides: Overrides,
    command: str = "replay",
    workers: int = 1,
    output: str | Path | None = None,
    advance: Callable[[int], None] | None = None,
    **fixed: Any,
) -> Sweep:
    """Run all combinations of the values of ``settings``: ``kvsim replay -m``, or with ``command="simulate"`` that command.

    ``settings`` maps keys to values: ``{"eviction": ["lru", "lfu"], "tiers.gpu.capacity": ["10GiB", "40GiB"]}``. A policy may be
    an object. What all runs share is given by ``overrides`` and by the keywords ``fixed``, as for ``replay``.

    With ``workers`` above 1, the runs are spread over so many new processes; a script must then call this under
    ``if __name__ == "__main__":``. A job that fails is reported in ``errors``, and the others go on; if all fail, UsageError is
    raised. With ``output``, the folder is the one that the command would write: ``kvsim report`` reads it, and a job whose result
    is there already is not run again. ``advance`` is called with the number of jobs done; without it, a terminal shows a progress
    bar. Raises UsageError.
    """
    refuse_without_guard()
    if not isinstance(cast(object, settings), Mapping) or not settings:
        example = '{"eviction": ["lru", "lfu"]}'
        raise UsageError(f"kvsim.sweep: settings must map keys to values, such as {example}, not be {settings!r}")
    trace, given = loaded(trace, arguments_of(overrides, fixed))
    if command not in SWEPT:
        raise UsageError(f"kvsim.sweep: command must be one of {', '.join(SWEPT)}, not {command!r}")
    if output is None and any("logger" in (key, line.partition("=")[0]) for key in settings for line in given.overrides):
        raise UsageError(NO_FOLDER)
    if not Whole(1).holds(workers):
        raise UsageError(refusal("kvsim.sweep: workers", Whole(1), workers))
    plan = SweepPlan(command=command, trace=trace, settings=values_of(settings), fixed=given)
    logger = plan.check()
    watch = progress(len(plan.jobs), "sweep", unit="jobs", lines=False) if advance is None else nullcontext(advance)
    with folder_for("sweep", output is None) as temporary, Lock(folder := temporary or Path(output or ".")):
        with watch as report, closing(LivePage(folder, len(plan.jobs) - len(plan.planned.refused))) as live:
            ended = run_sweep(plan, folder, workers, report if output is None else live.after(report))
            runs = read_runs([folder], damaged_fail=True)
            live.finish(runs)
        logger.log_sweep(folder, runs)
        failures = {one.name: one.failure for one in ended.values()}
        swept = Sweep(folder, failures, is_temporary=output is None)
    if not swept.runs:
        name, error = next(iter(swept.errors.items()))
        raise UsageError(f"all {len(swept.errors)} jobs failed; the first is job {name}: {error}")
    return swept


def curve(
    trace: Trace | str | Path,
    *overrides: Overrides,
    capacities: Sequence[int | str] | None = None,
    policies: Sequence[str] = (),
    fraction: float = 1.0,
    advance: Callable[[int], None] | None = None,
    **settings: Any,
) -> Curve:
    """Compute hit rate against the capacity of one tier: ``kvsim curve``. Includes exact LRU, in one pass, and Belady's bound.

    ``capacities`` are numbers of pages or strings such as ``"40GiB"``; None chooses 1, 2, 5, 10, ... from the largest prompt on.
    ``policies`` are eviction policies by name, with optional settings: ``"slru protected_hits=3"``. A ``fraction`` below 1
    replays only this share of the requests, at proportionally smaller capacities. ``overrides`` and ``settings`` are as for
    ``replay``, for example ``model="qwen3_32b"``. Raises UsageError.
    """
    trace, arguments = loaded(trace, arguments_of(overrides, settings))
    plan = plan_for("curve", trace, arguments)
    node = {"capacities": listed(capacities), "policies": listed(policies) or [], "fraction": fraction}
    return draw(plan, construct(CurveSettings, node, "curve"), trace, watch=lambda _: nullcontext(advance)).curve


def _run(command: str, trace: Trace | str | Path, arguments: Arguments, advance: Callable[[int], None] | None) -> Result:
    trace, arguments = loaded(trace, arguments)
    plan = plan_for(command, trace, arguments)
    is_kept = any(line.startswith("output=") for line in arguments.overrides)
    if not is_kept and any(line.startswith("logger=") for line in arguments.overrides):
        raise UsageError(NO_FOLDER)
    how: dict[str, Any] = {"watch": lambda _: nullcontext(advance), "is_named": is_described(arguments.objects)}
    if is_kept:
        with own_folder(plan, command):
            return record_run(command, plan, trace, **how)
    result = execute(command, plan, trace, **how)
    play.check_verified(result.outcome.hardware)
    return result
