"""``kvsim plan``: the cheapest configuration that meets its objectives, by prices, each run in a folder of its own.

The command and the Python API call it.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from kvsim.errors import PolicyFailed, UsageError
from kvsim.files.locking import Lock
from kvsim.plans.build import build_run, check_output
from kvsim.plans.combinations import check_objectives
from kvsim.plans.command_settings import PlanSettings, SaturateSettings
from kvsim.plans.construct import construct
from kvsim.plans.from_python import on_source
from kvsim.plans.plan import Plan
from kvsim.report.folder import write_run
from kvsim.report.plan_page import write_plan
from kvsim.report.template import SHARED_SCRIPT
from kvsim.results.fields import SCHEMA
from kvsim.results.result import RunRecord, installed_versions, plain
from kvsim.results.slo import Slo
from kvsim.run.alone import reasons, run_alone
from kvsim.run.execute import Watch, execute, load_trace, page_bounds, unwatched
from kvsim.run.fingerprint import configuration_hash
from kvsim.settings.unused_settings import keys_of
from kvsim.sweeps.composition import Compositions
from kvsim.sweeps.engine_flags import host_copies, starts, without_server
from kvsim.sweeps.engine_setup import Setup
from kvsim.sweeps.folder import begin_folder, index_of, place_job
from kvsim.sweeps.planning import Planned
from kvsim.sweeps.prices import CHOICES, OWN, Prices, read_prices
from kvsim.sweeps.purchase import (
    DEARER,
    FAILS,
    HOLDS,
    REFUSED,
    SKIPPED,
    Candidate,
    Ended,
    candidates,
    cheapest,
    checked,
    priced,
    search,
    why,
)
from kvsim.trace.base import TraceSource

T = TypeVar("T")
NOT_OF_RUNS = ("plan", "saturate", "output")
"""Settings that are none of a simulation's."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, and of whom."""

    config: DictConfig
    """The configuration that the overrides alone describe."""
    overrides: Sequence[str]
    compositions: Compositions
    prices: str | Mapping[str, Any] | None
    """The file of prices, or its content."""
    command_line: str | None
    """The line that repeats the command, if one does."""
    flags: Sequence[str] = ()
    """Flags with which a command finds the same files of settings."""
    source: TraceSource | None = None
    """The trace, if it is in memory."""


def purchase(
    question: Question,
    folder: Path,
    *,
    watch: Callable[[str], Watch] = lambda label: unwatched,
    tell: Callable[[str, Ended], None] = lambda label, ended: None,
) -> RunRecord:
    """Find the cheapest configuration, write the folder, and return the content of ``plan.json``. Raises UsageError.

    ``watch`` takes what a run is called; ``tell`` is called with that of a candidate when it has ended.
    """
    found = _Search(question, folder, watch, tell)
    check_output(folder)
    with Lock(folder):
        record = found.run()
        write_plan(folder, record)
    return record


def _check_own(overrides: Sequence[str], name: str) -> None:
    """Raise UsageError for a setting that the prices choose."""
    keys = keys_of(overrides)
    if key := next((key for key in OWN if key in keys), None):
        how = f": set {CHOICES[key]} there" if key in CHOICES else ", and what has no price there cannot be chosen"
        raise UsageError(f"{key}: leave it out: {name} chooses what costs money{how}")


def _check_drive(overrides: Sequence[str], name: str, prices: Prices) -> None:
    """Raise UsageError for a drive of the catalogue beside one that the prices choose."""
    names = [drive for drive in prices.choices.drives if f"drive={drive}" in prices.drives[drive].lines]
    if names and "drive" in keys_of(overrides):
        raise UsageError(f"drive: leave it out: {name} chooses {', '.join(names)}, whose rates are known by that name")


class _Search:
    """The candidates of a command line, and what is known of them."""

    def __init__(self, asked: Question, folder: Path, watch: Callable[[str], Watch], tell: Callable[[str, Ended], None]) -> None:
        self.asked, self.folder, self.watch, self.tell = asked, folder, watch, tell
        self.settings, self.slo = self._of(PlanSettings, "plan"), self._of(Slo, "slo")
        self.attainment = self._of(SaturateSettings, "saturate").attainment
        check_objectives(self.slo, "plan")
        if asked.prices is None:
            raise UsageError("prices is missing: set prices=FILE, a YAML file with your prices; see docs/guides/plan.md")
        name = asked.prices if isinstance(asked.prices, str) else "prices"
        _check_own(asked.overrides, name)
        self.prices = read_prices(asked.prices)
        _check_drive(asked.overrides, name, self.prices)
        try:
            every = candidates(self.prices, asked.overrides, asked.compositions)
        except UsageError as error:  # the overrides alone have been composed before
            raise UsageError(f"{name}: {error}") from error
        self._copies: dict[tuple[str, ...], int] = {}
        found = checked(every, self._counted)
        self.planned: Planned[Candidate] = priced(found, self.prices, lambda one: self._copies[one.lines])
        self.found = self.planned.jobs
        same = len(every) - len(self.found)
        self.notes = list(self.planned.notes)
        self.notes += [f"{same} of {len(every)} combinations would run as a cheaper one does, and are left out"] if same else []

    def _of(self, kind: type[T], name: str) -> T:
        return construct(kind, OmegaConf.to_container(self.asked.config[name], resolve=True), name)

    def plan(self, one: Candidate) -> Plan:
        """Make the plan of a candidate. Raises UsageError."""
        if one.problem:
            raise UsageError(one.problem)
        config, choices = self.asked.compositions.compose(one.lines)
        return on_source(build_run(config, command="plan", overrides=one.lines, choices=choices), self.asked.source)

    def _counted(self, one: Candidate) -> Plan:
        """Make the plan of a candidate, and keep how many copies of KV its CPU memory has. Raises UsageError."""
        plan = self.plan(one)
        self._copies[one.lines] = host_copies(_setup(plan, one))
        return plan

    def run(self) -> RunRecord:
        """Try the candidates, and return the content of ``plan.json``. Raises UsageError if one reason keeps all from running."""
        able = [at for at in range(len(self.found)) if at not in self.planned.refused]
        if not able and len({str(error) for error in self.planned.refused.values()}) == 1:
            raise next(iter(self.planned.refused.values()))
        first = self.plan(self.found[able[0]]) if able else None
        is_certain = first is not None and not any(request.persistent for request in load_trace(first)[0].requests)
        begin_folder(self.folder, {"command": "simulate", "command_line": self.asked.command_line, "swept": []})
        ended = search(
            self.found,
            self.plan,
            self.attempt,
            refused=dict(self.planned.refused),
            attainment=self.attainment,
            beyond=self.settings.beyond,
            is_certain=is_certain,
        )
        return self.describe(ended)

    def attempt(self, number: int, one: Candidate, plan: Plan) -> Ended:
        """Simulate a candidate into a folder of its own, unless that is done, and tell the user how it ended."""
        label = f"number {number} of {len(self.found)}"
        name, result = place_job(self.folder, str(number), config_hash := configuration_hash(plan, "simulate"))
        try:
            if result is None:
                run = execute("simulate", plan, watch=self.watch(label), command_line=self.simulation(one))
                bounds = page_bounds(plan, run.record, None)
                write_run(self.folder / name, run.record, run.outcome, shared_script=f"../{SHARED_SCRIPT}", bounds=bounds)
                index_of(self.folder.absolute())[config_hash] = name
                result = run.record
        except PolicyFailed:
            raise
        except UsageError as error:
            ended = Ended(candidate=one, outcome=REFUSED, reason=" ".join(str(error).split()), plan=plan)
        else:
            ended = Ended(candidate=one, outcome=HOLDS, result=result, folder=name, plan=plan)
            if ended.attainment < plan.saturate.attainment:
                alone = partial(self.alone, plan, f"{label}, alone")
                ended = replace(ended, outcome=FAILS, reason=why(ended, plan.saturate.attainment, alone))
        self.tell(label, ended)
        return ended

    def alone(self, plan: Plan, label: str) -> list[str]:
        """Say which requests are too slow even by themselves; nothing if so few are that a run without load holds."""
        result = run_alone(plan, self.watch(label))
        return [] if result.record["slo"]["attainment"] >= plan.saturate.attainment else reasons(plan, result)

    def simulation(self, one: Candidate) -> str | None:
        """Return the line that simulates a candidate alone; None if only a program has the trace."""
        if self.asked.source is not None:
            return None
        words = [line for line in one.lines if not _is_of(line, NOT_OF_RUNS)]
        return shlex.join(["kvsim", "simulate", *self.asked.flags, *words])

    def describe(self, ended: Sequence[Ended]) -> RunRecord:
        """Return the content of ``plan.json``."""
        best = cheapest(ended)
        winner = None if best is None else ended[best]
        known = next((one.plan for one in (*([winner] if winner else []), *ended) if one.plan is not None), None)
        setup = None if winner is None or winner.plan is None else _setup(winner.plan, winner.candidate)
        misplaced = [] if setup is None else without_server(setup)
        record = {
            "schema": SCHEMA,
            "command": "plan",
            "command_line": self.asked.command_line,
            "status": "complete",
            "versions": installed_versions(),
            "seed": self.asked.config.seed,
            "config": {} if known is None else known.config,
            "choices": {} if known is None else known.choices,
            "slo": {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s, "attainment": self.attainment},
            "price_unit": self.prices.listed.unit,
            "candidates": [described(one) for one in ended],
            "cheapest": best,
            "routing": None if winner is None or winner.plan is None else winner.plan.choices.get("routing"),
            "simulate": None if winner is None else self.simulation(winner.candidate),
            "start": [] if setup is None else starts(setup),
            "notes": [
                *self.notes,
                *_notes(ended),
                *misplaced,
                *([] if winner is None or not winner.result else winner.result["warnings"]),
            ],
        }
        return {name: plain(value) for name, value in record.items()}


def _setup(plan: Plan, one: Candidate) -> Setup:
    """Return what an engine of a candidate has."""
    per_host = plan.layout.engines // len(set(plan.layout.hosts))
    return Setup(plan=plan, cpu_bytes=one.cpu_bytes // per_host, disk_bytes=one.disk_bytes // per_host)


def _is_of(line: str, names: Sequence[str]) -> bool:
    return line.lstrip("+~").partition("=")[0].partition(".")[0] in names


def _notes(ended: Sequence[Ended]) -> list[str]:
    dearer = [one.candidate.price for one in ended if one.outcome == DEARER]
    certain = sum(one.outcome == SKIPPED for one in ended)
    notes = (
        [f"{len(dearer)} from {min(dearer):,.2f} on were not simulated: they cost more than plan.beyond allows"] if dearer else []
    )
    return [*notes, *([f"{certain} were not simulated, because a cheaper one shows that they fail"] if certain else [])]


def described(ended: Ended) -> dict[str, Any]:
    """Return what is recorded of a candidate."""
    one, result = ended.candidate, ended.result
    measured = {} if result is None else {
        "attainment": result["slo"]["attainment"],
        "requests_per_s": result["throughput"]["offered_requests_per_s"],
        "ttft_s_p99": result["ttft_s"]["p99"],
        "tpot_s_p99": result["tpot_s"]["p99"],
        "hit_rate": result["hit_rate"],
        "rejected": result["rejected"],
    }  # fmt: skip
    return {
        "price": one.price,
        "gpu": one.gpu,
        "engines": one.engines,
        "gpus_per_engine": one.gpus,
        "pipeline_parallel": one.stages,
        "expert_parallel": one.expert_groups,
        "cpu_bytes": one.cpu_bytes,
        "cpu_copies": one.cpu_copies,
        "drive": one.drive,
        "policy": one.policy,
        "outcome": ended.outcome,
        "reason": ended.reason,
        "folder": ended.folder,
        **dict.fromkeys(MEASURED),
        **measured,
    }


MEASURED = ("attainment", "requests_per_s", "ttft_s_p99", "tpot_s_p99", "hit_rate", "rejected")
