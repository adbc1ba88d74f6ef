"""``kvsim saturate`` of one plan: the search for the highest rate, each run in a folder of its own, and the folder of all.

The command and the Python API call it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvsim.errors import UsageError
from kvsim.plans.plan import Plan
from kvsim.report.folder import write_run, write_shared_script
from kvsim.report.saturation_page import write_saturation
from kvsim.report.template import SHARED_SCRIPT
from kvsim.results.fields import SCHEMA
from kvsim.results.result import RunRecord, installed_versions, plain
from kvsim.run.alone import reasons, run_alone
from kvsim.run.execute import Watch, execute, page_bounds, unwatched
from kvsim.run.fingerprint import configuration_hash
from kvsim.run.play import check_verified
from kvsim.run.saturation import Found, Probe, highest_rate
from kvsim.sweeps.folder import finished

PROBED = (
    "requests_per_s", "attainment", "goodput_requests_per_s", "ttft_s_p99", "tpot_s_p99", "hit_rate", "rejected", "shed",
    "folder",
)  # fmt: skip
"""What is recorded of each run beside its rate."""


def saturate(
    plan: Plan,
    command_line: str | None,
    *,
    watch: Callable[[str], Watch] = lambda label: unwatched,
    ended: Callable[[Probe], None] = lambda probe: None,
    is_described: bool = True,
) -> RunRecord:
    """Search for the highest rate at which a plan holds its objectives, and write its folder, which the caller has locked.

    ``watch`` takes what a run is called, ``ended`` is called with each run that has ended. Without ``is_described``, the
    configuration does not say all about the plan, so that no run of an earlier search can stand for one of this.
    Returns the content of ``saturate.json``. Raises UsageError.
    """
    write_shared_script(plan.output)

    def probe(rate: float) -> Probe:
        found = run_at(plan, rate, watch(f"rate {rate:g}"), is_described=is_described)
        ended(found)
        return found

    found = highest_rate(probe, plan.saturate, float(plan.saturate.rate or plan.trace.rate))
    notes = [] if found.highest else reasons(plan, run_alone(plan.with_own_policies(), watch("alone")))
    record = describe(plan, replace(found, notes=[*found.notes, *notes]), command_line)
    write_saturation(plan.output, [(plan.output.name, record)])
    return record


def run_at(plan: Plan, rate: float, watch: Watch = unwatched, *, is_described: bool = True) -> Probe:
    """Simulate a plan at another rate, into a folder of its own, unless that has the result. Raises UsageError."""
    at_rate = with_rate(plan, rate)
    folder = plan.output / f"rate-{rate:g}"
    result = finished(folder, configuration_hash(at_rate, "simulate")) if is_described else None
    if result is None:
        run = execute("simulate", at_rate, watch=watch, is_named=is_described)
        check_verified(run.outcome.hardware)
        bounds = page_bounds(at_rate, run.record, None)
        write_run(folder, run.record, run.outcome, shared_script=f"../{SHARED_SCRIPT}", bounds=bounds)
        result = run.record
    offered = result["throughput"]["offered_requests_per_s"]
    if offered is None:
        raise UsageError("trace: all requests arrive at once, whatever the rate: give a trace with arrival times")
    return Probe(rate=rate, requests_per_s=offered, attainment=result["slo"]["attainment"], record=(folder.name, result))


def with_rate(plan: Plan, rate: float) -> Plan:
    """Return a plan for one more run, whose requests arrive at another rate."""
    config = plan.config | {"trace": plan.config["trace"] | {"rate": rate}}
    return replace(plan.with_own_policies(), trace=replace(plan.trace, rate=rate), config=config)


def describe(plan: Plan, found: Found, command_line: str | None) -> RunRecord:
    """Return the content of ``saturate.json``."""
    first: RunRecord = found.probes[0].record[1]
    highest = found.highest
    page_bytes = first["page_bytes"]
    pages = {name: tier["capacity_pages"] for name, tier in first["tiers"].items()}
    n_bytes = {name: None if capacity is None else capacity * page_bytes for name, capacity in pages.items()}
    gpus = plan.layout.engines * plan.hardware.gpus
    wanted = plan.saturate.rate
    at_wanted = next((probe for probe in found.probes if probe.rate == wanted), None)
    record = {
        "schema": SCHEMA,
        "command": "saturate",
        "command_line": command_line,
        "status": "complete",
        "config": plan.config,
        "choices": plan.choices,
        "versions": installed_versions(),
        "seed": plan.seed,
        "slo": {"ttft_s": plan.slo.ttft_s, "tpot_s": plan.slo.tpot_s, "attainment": plan.saturate.attainment},
        "rate": None if highest is None else highest.rate,
        "fails_at": None if found.lowest_above is None else found.lowest_above.rate,
        "highest": None if highest is None else probed(highest),
        "wanted_rate": wanted,
        "holds_wanted_rate": None if at_wanted is None else at_wanted.attainment >= plan.saturate.attainment,
        "gpus": gpus,
        "capacity_bytes": n_bytes,
        "price_per_hour": plan.saturate.price_per_hour.per_hour(gpus, n_bytes),
        "notes": [*found.notes, *([] if highest is None else highest.record[1]["warnings"])],
        "runs": [probed(probe) for probe in found.probes],
    }
    return {name: plain(value) for name, value in record.items()}


def probed(probe: Probe) -> dict[str, Any]:
    """Return what is recorded of a run."""
    folder, result = probe.record
    values = (
        probe.requests_per_s,
        probe.attainment,
        result["slo"]["goodput_requests_per_s"],
        result["ttft_s"]["p99"],
        result["tpot_s"]["p99"],
        result["hit_rate"],
        result["rejected"],
        (result.get("admission") or {}).get("shed", 0),
        folder,
    )
    return {"rate": probe.rate, **dict(zip(PROBED, values, strict=True))}
