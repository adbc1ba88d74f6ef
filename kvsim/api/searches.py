"""Search for a rate or a purchase, compare with real runs, and put runs side by side."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from kvsim.api.given import folder_for, in_folder, line_of, listed, loaded
from kvsim.errors import UsageError
from kvsim.plans.arguments import Arguments, Overrides, arguments_of
from kvsim.plans.build import AGAINST_SERVER
from kvsim.plans.from_python import check_given, composed, is_described, plan_for
from kvsim.policies.admission.base import AdmissionPolicy
from kvsim.policies.autoscaling.base import AutoscalingPolicy
from kvsim.policies.checkpoint.base import CheckpointPolicy
from kvsim.policies.eviction.base import EvictionPolicy
from kvsim.policies.placement.base import PlacementPolicy
from kvsim.policies.prefetch.base import PrefetchPolicy
from kvsim.policies.routing.base import RoutingPolicy
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.report.validation.presentation import SERVER
from kvsim.run.execute import Result
from kvsim.run.validating import validate as validated
from kvsim.run.validating_server import asked_of, expanded, is_against_server, readable, validate_server
from kvsim.settings.configuration import check_overrides, config_loader, quoted
from kvsim.settings.unused_settings import keys_of
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.contestants import Asked, LeaderboardSettings
from kvsim.sweeps.from_python import refuse_without_guard
from kvsim.sweeps.leaderboard import play_leaderboard
from kvsim.sweeps.purchasing import Question, purchase
from kvsim.sweeps.reporting import Report
from kvsim.sweeps.saturating import saturate as saturated
from kvsim.sweeps.search_results import Leaderboard, Purchase, Saturation, Validation
from kvsim.sweeps.sweep_result import Sweep, SweepRun
from kvsim.trace.base import Trace
from kvsim.trace.memory import as_it_is, source_of


def saturate(
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
) -> Saturation:
    """Find the highest rate of requests that holds latency objectives: ``kvsim saturate``. Arguments are as for ``simulate``.

    ``slo={"ttft_s": 2}`` sets an objective, ``saturate={"attainment": 0.95, "tolerance": 0.02}`` how to search. The trace is
    loaded again at each rate. ``advance`` is called with the number of finished runs. With ``output="DIR"``, the folder is that
    of the command, and what is finished there is not run again; otherwise, it is temporary. Raises UsageError.
    """
    per_tier = {"eviction": eviction, "placement": placement}
    run_wide = {
        "prefetch": prefetch, "checkpoint": checkpoint, "routing": routing, "scheduling": scheduling, "autoscaling": autoscaling,
        "admission": admission,
    }  # fmt: skip
    trace, arguments = loaded(trace, arguments_of(overrides, {**per_tier, **run_wide, **settings}))
    runs = count(1)
    report = advance or (lambda done: None)
    with in_folder("saturate", plan_for("saturate", trace, arguments), arguments) as (plan, is_temporary):
        record = saturated(
            plan,
            line_of("saturate", trace, arguments),
            ended=lambda probe: report(next(runs)),
            is_described=is_described(arguments.objects),
        )
    return Saturation(record, plan.output, is_temporary=is_temporary)


def plan(
    trace: Trace | str | Path,
    *overrides: Overrides,
    prices: str | Path | Mapping[str, Any],
    advance: Callable[[int], None] | None = None,
    **settings: Any,
) -> Purchase:
    """Find the cheapest configuration that holds latency objectives: ``kvsim plan``.

    ``prices`` is a file of prices and choices, or a mapping with its content: ``{"per": "hour", "gpus": {"h100": 2.5}, ...}``.
    ``overrides`` and ``settings`` are as for ``simulate``, such as ``slo={"ttft_s": 2}`` and ``saturate={"attainment": 0.95}``;
    policies that are compared are named in the prices. ``advance`` is called with the number of configurations that were
    simulated. ``output`` is as for ``saturate``. Raises UsageError.
    """
    trace, arguments = loaded(trace, arguments_of(overrides, settings))
    if arguments.objects:
        raise UsageError(f"{next(iter(arguments.objects))}: kvsim.plan takes policies by name: put them into choices.policies")
    check_given(trace, arguments)
    lines = composed(trace, arguments)
    check_overrides(lines)
    if key := next((key for key in ("plan.prices", "prices") if key in keys_of(arguments.overrides)), None):
        raise UsageError(f"{key}: kvsim.plan takes prices by its argument: leave this out, and set prices=")
    if not isinstance(prices, str | Path | Mapping):
        raise UsageError(f"prices: give a file, or a mapping with its content, not {prices!r}")
    if "saturate.rate" in keys_of(arguments.overrides):
        raise UsageError("saturate.rate: the rate that must be held is that of the trace: load it with rate=")
    compositions = Compositions(config_loader())
    runs = count(1)
    report = advance or (lambda done: None)
    output = next((line for line in reversed(lines) if line.startswith("output=")), None)
    with folder_for("plan", output is None) as temporary:
        lines += [] if temporary is None else [f"output={quoted(temporary)}"]
        config = compositions.compose(lines).config
        question = Question(
            config=config,
            overrides=lines,
            compositions=compositions,
            prices=prices if isinstance(prices, Mapping) else str(prices),
            command_line=None if isinstance(prices, Mapping) else line_of("plan", trace, _with_prices(arguments, prices)),
            source=source_of(trace),
        )
        folder = Path(str(config.output))
        record = purchase(question, folder, tell=lambda label, ended: report(next(runs)))
    return Purchase(record, folder, is_temporary=temporary is not None)


def _with_prices(arguments: Arguments, prices: str | Path) -> Arguments:
    return arguments._replace(overrides=[f"plan.prices={readable(str(prices))}", *arguments.overrides])


def leaderboard(
    traces: Trace | str | Path | Mapping[str, Trace],
    *overrides: Overrides,
    family: str = "eviction",
    policies: Sequence[str] | None = None,
    capacities: Sequence[int | str] | None = None,
    measure: str | None = None,
    workers: int = 1,
    output: str | Path | None = None,
    advance: Callable[[int], None] | None = None,
    **settings: Any,
) -> Leaderboard:
    """Rank the policies of a family by runs: ``kvsim leaderboard``.

    ``traces`` is a trace, a file, or several traces by name. ``policies`` play, given by name with optional settings, such as
    ``"slru protected_hits=3"``; None: all of the family. ``capacities`` are numbers of pages or strings such as ``"40GiB"`` or
    ``"5%"``, of each trace's unique pages; None: 5 to 40% of them. ``measure`` is ``hit_rate`` or ``ttft_s``; None: that of the
    family.
    ``overrides`` and ``settings`` are as for ``replay``; a policy that they choose, ``eviction="mine"``, plays with its settings.
    ``workers`` is as for ``sweep``, ``output`` as for ``saturate``. ``advance`` is called with the number of finished runs.
    Raises UsageError.
    """
    refuse_without_guard()
    given = arguments_of(overrides, settings)
    if given.objects:
        raise UsageError(f"{next(iter(given.objects))}: kvsim.leaderboard takes policies by name: see kvsim new")
    if "output" in keys_of(given.overrides):
        raise UsageError("output: kvsim.leaderboard takes it by its argument: set output=")
    named, given = _named_traces(traces, given)
    asked = Asked(
        settings=_leaderboard_settings(family, policies, capacities, measure, workers),
        overrides=given.overrides,
        command_line=None,
        traces=named,
    )
    with folder_for("leaderboard", output is None) as temporary:
        folder = Path(str(output)) if temporary is None else temporary
        record = play_leaderboard(asked, folder, lambda runs: nullcontext(advance))
    return Leaderboard(record, folder, is_temporary=temporary is not None)


def _leaderboard_settings(
    family: str, policies: Sequence[str] | None, capacities: Sequence[int | str] | None, measure: str | None, workers: int
) -> LeaderboardSettings:
    try:
        return LeaderboardSettings(
            family=family,
            policies=listed(policies),
            capacities=listed(capacities),
            measure=measure,
            workers=workers,
        )
    except ValueError as error:
        raise UsageError(f"kvsim.leaderboard: {error}") from error


def _named_traces(
    traces: Trace | str | Path | Mapping[str, Trace], given: Arguments
) -> tuple[list[tuple[str, Trace]], Arguments]:
    """Return the traces with their names, and the arguments that are left. Raises UsageError."""
    if isinstance(traces, Mapping):
        if not traces:
            raise UsageError("kvsim.leaderboard: traces is empty: give a trace, a file, or several traces by name")
        for name, trace in traces.items():
            if not isinstance(trace, Trace):
                raise UsageError(f"kvsim.leaderboard: {name} is no trace: load it with kvsim.load_trace")
            check_given(trace, given)
        return [(name, as_it_is(trace)) for name, trace in traces.items()], given
    trace, given = loaded(traces, given)
    check_given(trace, given)
    return [(trace.name, trace)], given


def validate(
    trace: Trace | str | Path,
    *overrides: Overrides,
    eviction: EvictionPolicy | str | None = None,
    placement: PlacementPolicy | str | None = None,
    prefetch: PrefetchPolicy | str | None = None,
    checkpoint: CheckpointPolicy | str | None = None,
    routing: RoutingPolicy | str | None = None,
    scheduling: SchedulingPolicy | str | None = None,
    **settings: Any,
) -> Validation:
    """Compare simulations with real runs: ``kvsim validate``. Arguments are as for ``simulate``.

    The real runs are those on this machine's GPU, recordings of them (``validate={"measured": ["DIR"]}``), runs on a server
    (``server="http://localhost:8000"``), or results of clients (``results="FILE"``). ``output`` is as for ``saturate``, and
    ``holds`` says whether the simulation is within its tolerances. Raises UsageError, and WrongResult if a reused page held wrong
    data.
    """
    per_tier = {"eviction": eviction, "placement": placement}
    run_wide = {"prefetch": prefetch, "checkpoint": checkpoint, "routing": routing, "scheduling": scheduling}
    arguments = arguments_of(overrides, {**per_tier, **run_wide, **settings})
    if is_against_server(arguments.overrides):
        return _validate_server(trace, arguments)
    trace, arguments = loaded(trace, arguments)
    with in_folder("validate", plan_for("validate", trace, arguments), arguments) as (plan, is_temporary):
        compared = validated(plan, line_of("validate", trace, arguments))
    compared.check_pages()
    return Validation(compared.record, plan.output, compared.presentation, is_temporary=is_temporary)


def _validate_server(trace: Trace | str | Path, arguments: Arguments) -> Validation:
    given = [expanded(line) for line in arguments.overrides]
    trace = as_it_is(trace) if isinstance(trace, Trace) else trace
    before = composed(trace, Arguments([], {})) if isinstance(trace, Trace) else []
    source, more = asked_of(given, before)
    trace, arguments = loaded(trace, Arguments([*given, *more], arguments.objects))
    with in_folder("validate", plan_for(AGAINST_SERVER, trace, arguments), arguments) as (plan, is_temporary):
        record = validate_server(plan, source, line_of("validate", trace, arguments))
    return Validation(record, plan.output, SERVER, is_temporary=is_temporary)


def report(*runs: str | Path | Result | SweepRun | Sweep, output: str | Path | None = None) -> Report:
    """Put runs side by side, with their bounds: ``kvsim report``.

    ``runs`` are folders of runs or sweeps, or what ``replay``, ``simulate`` and ``sweep`` return. With ``output``, a file or a
    folder, the page is written there, as ``write`` does. Raises UsageError.
    """
    if not runs:
        raise UsageError("kvsim.report: give the folders or results to report on")
    in_memory = [run for run in runs if isinstance(run, Result)]
    kept = Path(mkdtemp(prefix="kvsim-report-")) if in_memory else None
    folders = []
    for number, run in enumerate(runs):
        if isinstance(run, Result):
            folders.append((kept or Path()) / str(number))
            run.write(folders[-1])
        elif isinstance(run, str | Path | SweepRun | Sweep):
            folders.append(run.folder if isinstance(run, SweepRun | Sweep) else Path(run))
        else:
            raise UsageError(f"kvsim.report: {run!r} is no folder and no result")
    found = Report(folders, kept=kept, others=[run.kept for run in runs if isinstance(run, SweepRun | Sweep)])
    if output is not None:
        found.write(output)
    return found
